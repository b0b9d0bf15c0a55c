"""Checks a published version against its event, along every way that leads to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rollwire.consumers.weights.paths import PathStep, every_step, known_versions, plan_path
from rollwire.consumers.weights.reader import load_path
from rollwire.schemas.errors import WeightError
from rollwire.schemas.records import WeightLink, WeightVersion
from rollwire.streams.seams.store import ObjectStore


class Way(NamedTuple):
    """A way from nothing to the version that gave the published bits."""

    kind: str  # of its last step: "anchor" | "delta" | "skip" | "inverse"
    steps: tuple[str, ...]  # "anchor 25", "delta 25>26", ...
    bytes: int  # read, about


def verify_version(
    store: ObjectStore, events: Sequence[WeightVersion], links: Sequence[WeightLink], version: int
) -> list[Way]:
    """Builds `version` from nothing by every way that ends in it: its snapshot, its delta, each link, and backwards.

    Every object on the way is checked by SHA-256 and every result by digest. Raises what `load_path` raises, and
    `WeightError` where the version is not known or no way leads to it.
    """
    known = known_versions(events)
    if version not in known:
        span = f"{min(known)} to {max(known)}" if known else "none"
        raise WeightError(f"version {version} is not known; known are {span}")
    ways: list[Way] = []
    last_steps = [
        step for step in every_step(known, links) if step.event.version == version and step.kind != "same"
    ]
    for step in last_steps:
        path = _before(events, links, step)
        if path is None:
            continue
        steps = [*path, step]
        load_path(store, steps, None)
        ways.append(Way(step.kind, tuple(map(str, steps)), sum(taken.bytes for taken in steps)))
    if not ways:
        load_path(
            store, plan_path(events, links, None, version), None
        )  # raises: no way, or by an equal state
    return ways


def _before(
    events: Sequence[WeightVersion], links: Sequence[WeightLink], step: PathStep
) -> list[PathStep] | None:
    """The way to what a step applies to, not over the version that it gives; None = there is none but over that."""
    if step.base is None:
        return []
    others = [event for event in events if event.version != step.event.version]
    try:
        return plan_path(others, links, None, step.base)
    except WeightError:
        if step.base > step.event.version:  # the only way to the later one leads over it
            return None
        raise
