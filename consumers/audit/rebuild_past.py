"""What the log says of one lineage, as a rebuild needs it: read once, with whatever is wrong in it noted.

`consumers.trainer.history` reads the same topics for a trainer, which must not go on from a history with a hole. An audit
goes on to the end: a version that is missing is a finding, and those around it are rebuilt all the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Final, NamedTuple

from rollwire.consumers.audit.beginnings import cut_beginnings
from rollwire.consumers.weights.versions import Versions
from rollwire.schemas.errors import Refused
from rollwire.schemas.records import TrainStep, WeightLink, WeightVersion
from rollwire.streams.emit import decode_record
from rollwire.streams.findings import Finding, Kind, gap, undecodable
from rollwire.streams.reverts import NO_REVERTS, Reverts
from rollwire.streams.seams.log import Log
from rollwire.streams.seams.places import existing
from rollwire.streams.seams.scan import scan

TOPICS: Final = ("weight-versions", "train-steps", "weight-links")


class Past(NamedTuple):
    """One lineage. Repeats are dropped by their natural keys (law 4): of two events the first counts."""

    model: str
    lineage: str
    versions: dict[int, WeightVersion]  # ascending
    steps: dict[int, TrainStep]  # by the version that the step made, ascending
    links: tuple[WeightLink, ...]  # in the log's order

    @property
    def reverts(self) -> Reverts:
        return reduce(Reverts.add, self.versions.values(), NO_REVERTS)

    @property
    def newest(self) -> int:
        return max(self.versions)

    @property
    def gone(self) -> tuple[WeightLink, ...]:
        """Of the links, those that say which snapshots and deltas were collected."""
        return tuple(link for link in self.links if link.kind == "gone")

    def made_from(self, version: int) -> int | None:
        """The version whose weights `version` began with: its step's base or, of a revert, what it went back to. None: the
        log does not say."""
        event, step = self.versions.get(version), self.steps.get(version)
        if event is None or step is None:
            return None
        return step.base_version if event.reverts_to is None else event.reverts_to


class ReadPast(NamedTuple):
    past: Past | None  # None: the lineage has no version
    findings: tuple[Finding, ...]
    records: int


def read_past(log: Log, lineage: str | None) -> ReadPast:
    """`None`: the lineage that was started last. Raises what the log raises."""
    chosen = Versions(lineage)
    steps: list[TrainStep] = []
    links: list[WeightLink] = []
    findings = cut_beginnings(log, TOPICS)
    records = 0
    for record in scan(
        log,
        existing(log, TOPICS),
        lost=lambda hole: findings.append(gap(*hole.partition, hole.first, hole.next)),
    ):
        records += 1
        try:
            event = decode_record(record)
        except Refused as refused:
            findings.append(undecodable(record, refused, "what it said is missing below"))
            continue
        match event:
            case WeightVersion():
                chosen.add(event)
            case TrainStep():
                steps.append(event)
            case WeightLink():
                links.append(event)
            case _:
                pass
    if chosen.newest is None or chosen.lineage is None:
        return ReadPast(None, tuple(findings), records)
    past = _of_lineage(chosen.newest.model, chosen.lineage, chosen.events, steps, links)
    return ReadPast(past, (*findings, *holes(past)), records)


def holes(past: Past) -> list[Finding]:
    """Versions and steps that others in the lineage follow from, and that the log does not have."""
    found: list[Finding] = []
    for version in range(past.newest + 1):
        if version not in past.versions:
            found.append(
                Finding(
                    kind=Kind.HISTORY_GAP,
                    where=f"version {version}",
                    detail=f"weight-versions has versions up to {past.newest} of lineage {past.lineage}, and not this one: "
                    "restore the topic from the archive",
                )
            )
    if past.steps:  # a lineage that is published without plans has none
        found += [
            Finding(
                kind=Kind.HISTORY_GAP,
                where=f"step of version {version}",
                detail="train-steps does not have the step that made it: it and what follows cannot be trained again",
            )
            for version in past.versions
            if version > 0 and version not in past.steps
        ]
    return found


def _of_lineage(
    model: str,
    lineage: str,
    versions: Sequence[WeightVersion],
    steps: Sequence[TrainStep],
    links: Sequence[WeightLink],
) -> Past:
    taken: dict[int, TrainStep] = {}
    for step in steps:
        if (step.model, step.lineage) == (model, lineage):
            taken.setdefault(step.version, step)
    return Past(
        model,
        lineage,
        {event.version: event for event in sorted(versions, key=lambda event: event.version)},
        dict(sorted(taken.items())),
        tuple(link for link in links if (link.model, link.lineage) == (model, lineage)),
    )
