"""What must hold of what a collector leaves: no way that is offered leads into the void."""

from __future__ import annotations

from rollwire.consumers.weights.census import read_books, take_census
from rollwire.consumers.weights.paths import plan_path
from rollwire.consumers.weights.reader import load_version
from rollwire.consumers.weights.retention import plan_retention
from rollwire.ops.chaos.weights.judge import CellFailed
from rollwire.ops.chaos.weights.roles import COLLECTOR, events_of, links_of
from rollwire.ops.chaos.weights.states import LAST, same_bits, state_of
from rollwire.schemas.errors import RollwireError, WeightError
from rollwire.streams.seams.clock import SystemClock
from rollwire.streams.seams.log import Log
from rollwire.streams.seams.store import ObjectStore


def judge_collected(log: Log, store: ObjectStore, lineage: str) -> None:
    """The newest version can be read, and so can every other one that there is a way to. Raises `CellFailed`."""
    events, links = events_of(log, lineage), links_of(log, lineage)
    for version in range(LAST + 1):
        try:
            path = plan_path(events, links, None, version)
        except WeightError as gone:
            if version == LAST:
                raise CellFailed(f"there is no way to the newest version: {gone}") from gone
            continue
        try:
            state = load_version(store, path, None)
        except RollwireError as error:
            way = ", ".join(map(str, path))
            raise CellFailed(f"version {version} is offered by {way} and cannot be read: {error}") from error
        if not same_bits(state, state_of(version)):
            raise CellFailed(f"version {version} came out as another one")


def judge_clean(log: Log, store: ObjectStore) -> None:
    """Nothing is left that could go. Raises `CellFailed`."""
    plan = plan_retention(take_census(store, read_books(log)), COLLECTOR, SystemClock().now_us() + 1)
    if plan.deletions or plan.broken:
        left = [verdict.info.key for verdict in plan.deletions]
        raise CellFailed(f"the next run left {left}; broken: {list(plan.broken)}")
