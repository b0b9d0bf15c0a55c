"""Checks a published version against its event, along every way that leads to it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rollwire.consumers.weights.paths import PathStep, Ways, known_versions, plan_path
from rollwire.consumers.weights.reader import load_path
from rollwire.schemas.errors import ObjectMissing, WeightError
from rollwire.schemas.records import WeightLink, WeightVersion
from rollwire.streams.seams.store import ObjectStore


class Way(NamedTuple):
    """A way from nothing to the version, and whether it gives the published bits."""

    kind: str  # of its last step: "anchor" | "delta" | "skip" | "inverse"
    steps: tuple[str, ...]  # "anchor 25", "delta 25>26", ...
    bytes: int  # read, about
    error: WeightError | ObjectMissing | None  # None = it does


def verify_version(
    store: ObjectStore, events: Sequence[WeightVersion], links: Sequence[WeightLink], version: int
) -> list[Way]:
    """Every way of `verify_ways`, all of them right. Raises the error of the first that is not."""
    ways: list[Way] = []
    for way in verify_ways(store, events, links, version):
        if way.error is not None:
            raise way.error
        ways.append(way)
    return ways


def verify_ways(
    store: ObjectStore, events: Sequence[WeightVersion], links: Sequence[WeightLink], version: int
) -> Iterator[Way]:
    """Builds `version` from nothing by every way that ends in it: its snapshot, its delta, each link, and backwards.

    Every object on the way is checked by SHA-256 and every result by digest. Raises `WeightError` where the version is
    not known or no way leads to it, `StoreUnavailable`.
    """
    known = known_versions(events)
    if version not in known:
        span = f"{min(known)} to {max(known)}" if known else "none"
        raise WeightError(f"version {version} is not known; known are {span}")
    found = False
    for step in Ways(known, links).into(version):
        if step.kind == "same":
            continue
        path = _before(events, links, step)
        if path is not None:
            found = True
            yield _go(store, [*path, step])
    if not found:  # by a version of the same state, or not at all
        yield _go(store, plan_path(events, links, None, version))


def _go(store: ObjectStore, path: Sequence[PathStep]) -> Way:
    error: WeightError | ObjectMissing | None = None
    try:
        load_path(store, path, None)
    except (WeightError, ObjectMissing) as failure:
        error = failure
    return Way(path[-1].kind, tuple(map(str, path)), sum(step.bytes for step in path), error)


def _before(
    events: Sequence[WeightVersion], links: Sequence[WeightLink], step: PathStep
) -> list[PathStep] | None:
    """The way to what a step applies to, not over the version that it gives; None = there is none."""
    if step.base is None:
        return []
    others = [event for event in events if event.version != step.event.version]
    try:
        return plan_path(others, links, None, step.base)
    except WeightError:  # the base is gone, or the only way to it leads over this version
        return None
