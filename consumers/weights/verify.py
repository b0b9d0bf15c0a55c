"""Checks a published version against its event, along every way that leads to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rollwire.consumers.weights.reader import PathStep, anchor_claim, load_path, plan_path
from rollwire.schemas.errors import WeightError
from rollwire.schemas.records import WeightVersion
from rollwire.streams.seams.store import ObjectStore


class Way(NamedTuple):
    """A way from nothing to the version that gave the published bits."""

    kind: str  # "anchor" | "delta"
    steps: tuple[str, ...]  # "anchor 25", "delta 26", ...
    bytes: int  # read, about


def verify_version(store: ObjectStore, events: Sequence[WeightVersion], version: int) -> list[Way]:
    """Builds `version` from nothing by its own snapshot, if it has one, and by its delta, if it has one.

    Every object on the way is checked by SHA-256 and every result by digest. Raises what `load_path` raises, and
    `WeightError` where the version is not known or no way leads to it.
    """
    event = next((e for e in events if e.version == version), None)
    if event is None:
        known = sorted(e.version for e in events)
        span = f"{known[0]} to {known[-1]}" if known else "none"
        raise WeightError(f"version {version} is not known; known are {span}")
    ways: list[Way] = []
    if anchor_claim(event) is not None:
        ways.append(_go(store, "anchor", [PathStep(event, True)]))
    if event.base_version is not None:
        path = plan_path(events, None, version, avoid={(version, True)})
        ways.append(_go(store, "delta", path))
    return ways


def _go(store: ObjectStore, kind: str, path: list[PathStep]) -> Way:
    load_path(store, path, None)
    names = tuple(f"{'anchor' if step.full else step.event.kind} {step.event.version}" for step in path)
    return Way(kind, names, sum(step.bytes for step in path))
