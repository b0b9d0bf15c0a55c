"""Versions, their steps and who served them, folded from the log: what lineage and erasure both stand on. Pure.

Legend: a version *carries* data if the step that made it was trained on them, or if it was made from a version that does.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import reduce
from typing import Final, NamedTuple

import msgspec

from rollwire.consumers.weights.links import Links
from rollwire.schemas.records import (
    Erasure,
    Event,
    FleetStatus,
    GroupFate,
    Notice,
    Position,
    TrainStep,
    WeightLink,
    WeightVersion,
)
from rollwire.streams.reverts import NO_REVERTS, Reverts
from rollwire.streams.seams.log import Record
from rollwire.streams.settings_notice import Told, told_in

TOPICS: Final = ("weight-versions", "train-steps", "weight-links", "fleet-status", "erasures", "notices")
"""What `VersionBook` is made from, in any order."""


class Published(NamedTuple):
    event: WeightVersion
    at: Position


class Taken(NamedTuple):
    event: TrainStep
    at: Position


class Spoken(NamedTuple):
    told: Told
    at: Position


class Said(NamedTuple):
    """What a replica said it serves, from one moment on."""

    fleet: str
    replica: str
    version: int  # -1 = nothing
    state_digest: str
    from_us: int
    at: Position


class Served(NamedTuple):
    said: Said
    until_us: int | None  # None = it said nothing since


class VersionBook:
    """All lineages of a log. Repeats are dropped by their natural keys: the first counts (law 4)."""

    def __init__(self) -> None:
        self.versions: dict[str, dict[int, Published]] = {}  # by lineage, in the order they began
        self.steps: dict[str, dict[int, Taken]] = {}  # by lineage, by the version made
        self.links = Links()
        self.erased: dict[str, Erasure] = {}  # by pseudonym, the last one
        self._told: dict[str, list[Spoken]] = {}  # by processor
        self._served: dict[tuple[str, str], list[Said]] = {}
        self._reverts: dict[str, Reverts] = {}
        self._settings: dict[tuple[tuple[str, str], ...], dict[str, str]] = {}

    def add(self, record: Record, event: Event) -> None:
        at = position_of(record)
        match event:
            case WeightVersion():
                self.versions.setdefault(event.lineage, {}).setdefault(event.version, Published(event, at))
                self._reverts.pop(event.lineage, None)
            case TrainStep():
                self.steps.setdefault(event.lineage, {}).setdefault(
                    event.version, Taken(self._lean(event), at)
                )
            case WeightLink():
                self.links.add(event)
            case FleetStatus():
                self._say(event, at)
            case Notice():
                told = told_in(event)
                if told is not None:
                    self._told.setdefault(told.processor, []).append(Spoken(told, at))
            case Erasure():
                self.erased[event.subject] = event
            case _:
                pass

    def of(self, lineage: str) -> dict[int, WeightVersion]:
        """The versions of a lineage; empty where it is not known."""
        return {number: one.event for number, one in self.versions.get(lineage, {}).items()}

    def reverts(self, lineage: str) -> Reverts:
        known = self._reverts.get(lineage)
        if known is None:
            versions = self.of(lineage)
            known = reduce(Reverts.add, (versions[number] for number in sorted(versions)), NO_REVERTS)
            self._reverts[lineage] = known
        return known

    def newest_lineage(self) -> str | None:
        """The lineage that was started last; None where nothing was ever published."""
        return next(reversed(self.versions), None)

    def made_by(self, lineage: str, fate: GroupFate) -> int | None:
        """The version that a group's tokens were trained into, by its fate; None where they were not, or not yet.

        A plan that was laid out ahead of a revert it knew nothing of was never taken, and a revert's step trained on nothing.
        """
        if fate.fate != "kept" or fate.for_version is None:
            return None
        made = fate.for_version + 1
        step = self.steps.get(lineage, {}).get(made)
        if step is None or "revert_to" in step.event.settings:
            return None
        read_to = next((one.offset for one in fate.cut.inputs if one.topic == "weight-versions"), None)
        reverts = self.reverts(lineage)
        published = self.versions.get(lineage, {})
        known = [
            one.version
            for one in reverts.known
            if read_to is None or (one.version in published and published[one.version].at.offset < read_to)
        ]
        return None if reverts.passes_over(made, known[-1] if known else None) else made

    def decided_by(self, lineage: str, at_us: int) -> tuple[Spoken, ...]:
        """The settings that each processor had said last by a moment, for `lineage` or for any; by processor."""
        found: list[Spoken] = []
        for _, spoken in sorted(self._told.items()):
            fitting = [one for one in spoken if one.told.at_us <= at_us and one.told.lineage in ("", lineage)]
            found += fitting[-1:]
        return tuple(found)

    def served(self, wanted: Mapping[int, Collection[str]]) -> tuple[Served, ...]:
        """Who served one of `wanted`, version -> state digests, and when; by fleet, replica and time.

        A status names no lineage: its digest says which version of that number it means."""
        found: list[Served] = []
        for _, reports in sorted(self._served.items()):
            reports.sort(key=lambda one: one.from_us)
            for one, after in zip(reports, [*reports[1:], None], strict=True):
                if one.state_digest in wanted.get(one.version, ()):
                    found.append(Served(one, None if after is None else after.from_us))
        return tuple(found)

    def _say(self, event: FleetStatus, at: Position) -> None:
        """Only changes are kept: a replica says what it serves also when it stages something else."""
        version = -1 if event.state == "stopped" else event.version
        reports = self._served.setdefault((event.fleet, event.replica), [])
        last = reports[-1] if reports else None
        if last is None or (last.version, last.state_digest) != (version, event.state_digest):
            reports.append(Said(event.fleet, event.replica, version, event.state_digest, event.at_us, at))

    def _lean(self, step: TrainStep) -> TrainStep:
        """Without the tables that lineage does not show, and with the settings that all steps of a run share held once."""
        settings = self._settings.setdefault(tuple(sorted(step.settings.items())), step.settings)
        return msgspec.structs.replace(step, mismatch_by=(), lag_histogram=(), settings=settings)


def carried_by(trained: Sequence[int], versions: Mapping[int, WeightVersion]) -> tuple[int, ...]:
    """`trained` and all versions built on one of them, ascending. A revert has the weights of the version it goes back to."""
    reached: set[int] = set()
    for number in sorted(versions):
        back = versions[number].reverts_to
        if number in trained or (number - 1 if back is None else back) in reached:
            reached.add(number)
    return tuple(sorted(reached))


def left_by(carried: Sequence[int], versions: Mapping[int, WeightVersion]) -> tuple[tuple[int, int], ...]:
    """The reverts (version, the one it went back to) behind which what was carried is carried no more."""
    held = set(carried)
    return tuple(
        (number, back)
        for number in sorted(versions)
        if (back := versions[number].reverts_to) is not None and number - 1 in held and number not in held
    )


def line_to(version: int, versions: Mapping[int, WeightVersion]) -> tuple[int, ...]:
    """The versions that `version` was made through and itself, ascending; it ends early where one is not known."""
    found: list[int] = []
    at: int | None = version
    while at is not None and at in versions:
        found.append(at)
        back = versions[at].reverts_to
        at = versions[at].base_version if back is None else back
    return tuple(reversed(found))


def ranges(numbers: Iterable[int]) -> str:
    """3-5, 9."""
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs(sorted(numbers)))


def runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The stretches without holes of ascending numbers: first and last of each."""
    start = 0
    for at, number in enumerate(numbers):
        if at + 1 == len(numbers) or numbers[at + 1] != number + 1:
            yield numbers[start], number
            start = at + 1


def position_of(record: Record) -> Position:
    return Position(topic=record.topic, partition=record.partition, offset=record.offset)
