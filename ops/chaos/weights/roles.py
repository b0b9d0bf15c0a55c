"""Who dies in the matrix: one publishes versions as a trainer does, others follow and serve them, one collects.

All learn where they stand from log and store alone, so that the next life of each goes on by itself.
"""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import Final, Literal

from rollwire.consumers.weights.census import read_books, take_census
from rollwire.consumers.weights.collect import collect
from rollwire.consumers.weights.follower import Follower, FollowerConfig
from rollwire.consumers.weights.link_builder import link_builder
from rollwire.consumers.weights.paths import plan_path
from rollwire.consumers.weights.publisher import SnapshotPublisher
from rollwire.consumers.weights.reader import load_version
from rollwire.consumers.weights.retention import RetentionConfig, plan_retention
from rollwire.consumers.weights.slices import choose_slices, share_of
from rollwire.consumers.weights.subscriber import SubscriberConfig, WeightSubscriber
from rollwire.consumers.weights.targets.folder import FolderTarget
from rollwire.consumers.weights.targets.numpy_state import NumpyTarget
from rollwire.kernels.tensors import State, Tensor
from rollwire.ops.chaos.weights.effects import Effects
from rollwire.ops.chaos.weights.seams import CrashLog, CrashStore
from rollwire.ops.chaos.weights.states import LAST, PUBLISHER, SLICE, model_of, same_bits, state_of
from rollwire.ops.chaos.weights.targets import CrashFolder, CrashTarget, Failure
from rollwire.schemas.errors import DeadlineExceeded, DigestMismatch, TargetFailed
from rollwire.schemas.records import WeightLink, WeightVersion
from rollwire.streams.emit import decode_record, outgoing
from rollwire.streams.seams.clock import SystemClock
from rollwire.streams.seams.log import Log
from rollwire.streams.seams.scan import scan
from rollwire.streams.seams.store import ObjectStore

WAIT_S: Final = 60.0
Coder = Literal["gap", "context"]
_PUTS: Final[dict[Coder, int]] = {"gap": 1, "context": 3}
"""Shards that are put at once: a death with others on their way, and one without."""
_WAY_S: Final = 3.0
_LOOK_S: Final = 0.05
QUICK: Final = SubscriberConfig(poll_s=0.02, backoff_s=0.05, backoff_max_s=0.5)


def events_of(log: Log, lineage: str, *, hidden: bool = True) -> list[WeightVersion]:
    """The committed versions of a lineage, in order, repeats included. `hidden`: also what somebody else's open transaction
    hides; it is waited for."""
    found = (decode_record(record) for record in scan(log, ["weight-versions"], hidden=hidden))
    return [event for event in found if isinstance(event, WeightVersion) and event.lineage == lineage]


def links_of(log: Log, lineage: str) -> list[WeightLink]:
    """The further ways between versions of a lineage, in the order of the log."""
    found = (decode_record(record) for record in scan(log, ["weight-links"]))
    return [link for link in found if isinstance(link, WeightLink) and link.lineage == lineage]


def publish(
    log: Log, store: ObjectStore, lineage: str, upto: int, effects: Effects, coder: Coder = "gap"
) -> None:
    """Publishes what is missing of versions 0 to `upto`: one is stored while the one before it is committed. The ways
    beside are waited for, so that they are made at the same place each time.

    Raises `Fenced`, `WeightError`, `StoreError`, `LogError`; another life goes on from there.
    """
    log, store = CrashLog(log, effects), CrashStore(store, effects)
    # The id first: when this returns, what the life before it left open is decided.
    writer = log.transactional_writer(f"{lineage}.trainer", WAIT_S)
    events = events_of(log, lineage)
    config = PUBLISHER.model_copy(update={"coder": coder, "puts": _PUTS[coder]})
    links = link_builder(log, store, config, model=model_of(lineage), lineage=lineage)
    publisher = SnapshotPublisher(store, model=model_of(lineage), lineage=lineage, config=config, links=links)
    try:
        begin = 0
        if events:
            last = max(events, key=lambda event: event.version)
            begin = last.version + 1
            publisher.resume(last, load_version(store, plan_path(events, (), None, last.version), None))
        ahead = publisher.publish(begin, state_of(begin)) if begin <= upto else None
        for version in range(begin, upto + 1):
            stored = ahead
            ahead = publisher.publish(version + 1, state_of(version + 1)) if version < upto else None
            if stored is None:
                break
            event = stored.result(WAIT_S)
            effects.check()
            writer.begin()
            writer.write([outgoing(event, source="rollwire/chaos", time_us=event.published_us)])
            writer.commit(f"{lineage}.trainer", {})
            publisher.committed(version)
            if coder == "context" and event.kind == "delta":
                _await_way(log, lineage, version, version - 1, effects)
            elif coder == "gap" and version == LAST:
                _await_way(log, lineage, 0, LAST, effects)
    finally:
        publisher.close(WAIT_S)  # ends its threads; after a death nothing of this reaches store or log
        if not effects.dead.is_set():
            writer.close()


def _await_way(log: Log, lineage: str, base: int, version: int, effects: Effects) -> None:
    """Waits for a link, for a while: one that is passed over is made later or never."""
    deadline = time.monotonic() + _WAY_S
    pause = threading.Event()
    while not any((link.base_version, link.version) == (base, version) for link in links_of(log, lineage)):
        effects.check()
        if time.monotonic() > deadline:
            return
        pause.wait(_LOOK_S)
    pause.wait(_LOOK_S)  # until its builder has let the states go: the next one would be passed over


class Held:
    """A replica's weights in memory: gone with its life."""

    def __init__(self) -> None:
        self._state: dict[str, Tensor] = {}

    def swap(self, state: State) -> None:
        self._state = dict(state)

    def read(self) -> State:
        return self._state


def follow(log: Log, store: ObjectStore, lineage: str, upto: int, effects: Effects) -> None:
    """Follows a lineage and serves each version, until it has served `upto`. After each swap what is served is compared,
    bit by bit, with the version it is said to be: raises `DigestMismatch` where it is not.
    """
    target = Held()
    subscriber = WeightSubscriber(
        CrashLog(log, effects),
        CrashStore(store, effects),
        fleet="chaos",
        replica=replica_of(lineage),
        lineage=lineage,
        config=QUICK,
    )
    served = -1
    try:
        while served < upto:
            effects.check()
            try:
                staged = subscriber.wait(_LOOK_S)
            except DeadlineExceeded:
                continue
            effects.around(f"swap {staged.event.version}", partial(target.swap, staged.state))
            served = staged.event.version
            if not same_bits(target.read(), state_of(served)):
                raise DigestMismatch(f"what is served as version {served} is not that version")
            subscriber.swapped(staged, 0.0, 0)
        subscriber.stopped(0)
    finally:
        subscriber.close()
    effects.check()  # the last report may have been its end


def serve(
    log: Log,
    store: ObjectStore,
    lineage: str,
    upto: int,
    effects: Effects,
    target: NumpyTarget | FolderTarget,
    failure: Failure | None = None,
    *,
    parts: bool = False,
) -> None:
    """As `follow`, by a follower that keeps a target at each version; `parts`: at a slice of it. Raises `TargetFailed`
    where an undo left something else than the version before; a swap that gives anything but its version is refused by
    the probe, and reported.
    """
    crashing = (
        CrashFolder(target, effects, failure)
        if isinstance(target, FolderTarget)
        else CrashTarget(target, effects, failure, parts=parts)
    )
    follower = Follower(
        CrashLog(log, effects),
        CrashStore(store, effects),
        crashing,
        fleet="chaos",
        replica=replica_of(lineage),
        lineage=lineage,
        probe=crashing.probe,
        choose=choose_slices(SLICE) if parts else None,
        share=share_of(SLICE) if parts else 1.0,
        config=FollowerConfig(subscriber=QUICK),
    )
    try:
        served: int | None = None
        while served != upto:
            effects.check()
            try:
                served = follower.wait_served(upto, _LOOK_S).version
            except DeadlineExceeded:
                continue
    finally:
        follower.close()
        target.close()
    effects.check()
    if crashing.torn:
        raise TargetFailed(crashing.torn)
    if not crashing.serves(upto):
        raise TargetFailed(f"what is served as version {upto} is not that version")


COLLECTOR: Final = RetentionConfig(keep_last=1, keep_every=1_000, grace_us=0)


def collect_all(log: Log, store: ObjectStore, effects: Effects) -> None:
    """Deletes what the newest version does not need. It takes all of log and bucket for its own."""
    log, store = CrashLog(log, effects), CrashStore(store, effects)
    clock = SystemClock()
    books = read_books(log)
    plan = plan_retention(take_census(store, books), COLLECTOR, clock.now_us() + 1)
    collect(log, store, books, plan, COLLECTOR, clock)
    effects.check()


def replica_of(lineage: str) -> str:
    return f"replica-{lineage}"
