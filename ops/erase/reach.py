"""What one person's data reached: events, training steps and versions, and who serves those. Read from the log, and from
its archive where the run has one.

A person's data are their feedback and the live traffic that is sealed for them. It reaches a version when a group that
holds it, or whose reward derives from it, is trained on; and from there every later version of the lineage, unless a revert
goes back to before. Events that neither has any more are not seen; `group-fates` and the topics about versions are kept
longest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Final

import msgspec

from rollwire.consumers.audit.versions import VersionBook, carried_by
from rollwire.schemas.errors import Refused
from rollwire.schemas.records import (
    Event,
    Feedback,
    FleetStatus,
    GroupFate,
    ProductionRollout,
    Seal,
    TrainStep,
    WeightVersion,
)
from rollwire.streams.emit import decode_record, deletes
from rollwire.streams.seams.log import Log, Record
from rollwire.streams.seams.places import existing, size_of
from rollwire.streams.seams.scan import scan

NAMED: Final = ("user-feedback", "production-rollouts", "groups", "packed-batches", "dead-letters")
"""Topics whose events name the person: the pseudonym stands in them as it is, so most records need no decoding."""
KEYED: Final = ("rewards", "group-fates", "routing-traces")
"""Topics whose events are about a group that the person's data are in."""
VERSIONED: Final = ("train-steps", "weight-versions", "fleet-status")


class Lineage(msgspec.Struct, frozen=True, kw_only=True):
    """What was reached of one lineage of versions."""

    lineage: str
    model: str
    trained: tuple[int, ...]  # versions made by steps that trained on the person's data
    carried: tuple[int, ...]  # these and every later one built on them
    newest: int  # of the lineage


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """A replica that served such a version when it reported last."""

    fleet: str
    replica: str
    version: int


class Reach(msgspec.Struct, frozen=True, kw_only=True):
    subject: str
    topics: dict[str, int]  # events by topic; topics with none are absent
    feedback: tuple[str, ...]  # feedback ids
    rollouts: tuple[str, ...]  # rollout ids of their own live traffic
    generations: int  # the last data key that something of theirs is sealed with; 0 = nothing is
    lineages: tuple[Lineage, ...]
    served: tuple[Served, ...]

    @property
    def nothing(self) -> bool:
        return not self.topics


class Traced:
    """A fold over records, topic by topic in the order of `NAMED`, `KEYED`, `VERSIONED`. No I/O."""

    def __init__(self, subject: str) -> None:
        self.subject = subject
        self._needle = subject.encode()
        self.topics: Counter[str] = Counter()
        self.feedback: dict[str, None] = {}
        self.rollouts: dict[str, None] = {}
        self._generations = 0
        self._judged: set[bytes] = (
            set()
        )  # group ids, as keys, of rollouts that the person said something about
        self._groups: dict[bytes, str | None] = {}  # the lineage that sampled a group, where that is known
        self._kept: list[tuple[str, GroupFate]] = []  # with the group's lineage
        self._book = VersionBook()

    def add(self, record: Record) -> None:
        if record.value is None or deletes(record):
            return
        names = self._needle in record.value
        if record.topic in NAMED and names:
            self.topics[record.topic] += 1
        match _event(record) if self._wanted(record, names) else None:
            case Feedback() as event if event.subject == self.subject:
                self.feedback[event.feedback_id] = None
                self._sealed(event.seal)
                self._judged.add(event.group_id.encode())
                self._groups.setdefault(event.group_id.encode(), None)
            case ProductionRollout() as event:
                if event.sealed is not None and event.sealed.subject == self.subject:
                    self.rollouts[event.rollout_id] = None
                    self._sealed(event.sealed)
                self._groups[event.group_id.encode()] = event.lineage
            case GroupFate() as event:
                lineage = self._groups.get(event.group_id.encode())
                if event.fate == "kept" and lineage is not None:
                    self._kept.append((lineage, event))
            case TrainStep() | WeightVersion() | FleetStatus() as event:
                self._book.add(record, event)
            case _:
                pass
        if record.topic in KEYED and record.key in self._groups:
            self.topics[record.topic] += 1

    def _sealed(self, seal: Seal | None) -> None:
        if seal is not None and seal.subject == self.subject:
            self._generations = max(self._generations, seal.key)

    def _wanted(self, record: Record, names: bool) -> bool:
        """Whether the record has to be decoded."""
        match record.topic:
            case "user-feedback":
                return names
            case "production-rollouts":
                return names or record.key in self._judged
            case "group-fates":
                return record.key in self._groups
            case topic:
                return topic in VERSIONED

    def reach(self) -> Reach:
        lineages: list[Lineage] = []
        wanted: dict[int, set[str]] = {}
        made = {(lineage, self._book.made_by(lineage, fate)) for lineage, fate in self._kept}
        for lineage in sorted(self._book.versions):
            versions = self._book.of(lineage)
            trained = sorted(v for of, v in made if of == lineage and v is not None and v in versions)
            carried = carried_by(trained, versions)
            if carried:
                newest = max(versions)
                model = versions[newest].model
                lineages.append(
                    Lineage(
                        lineage=lineage, model=model, trained=tuple(trained), carried=carried, newest=newest
                    )
                )
                for v in carried:
                    wanted.setdefault(v, set()).add(versions[v].state_digest)
        served = [one.said for one in self._book.served(wanted) if one.until_us is None]
        return Reach(
            subject=self.subject,
            topics=dict(sorted(self.topics.items())),
            feedback=tuple(self.feedback),
            rollouts=tuple(self.rollouts),
            generations=self._generations,
            lineages=tuple(lineages),
            served=tuple(Served(fleet=s.fleet, replica=s.replica, version=s.version) for s in served),
        )


def trace(log: Log, subject: str, progress: Callable[[int, int], None] = lambda done, of: None) -> Reach:
    """Reads the log once. `progress` is told how many records of how many were read, roughly."""
    traced = Traced(subject)
    topics = existing(log, (*NAMED, *KEYED, *VERSIONED))
    total, done = size_of(log, topics), 0
    # One topic after the other: what a group is about is known before its fate is read.
    for topic in topics:
        for record in scan(log, (topic,)):
            traced.add(record)
            done += 1
            if done % 2_000 == 0:
                progress(min(done, total), total)
    progress(total, total)
    return traced.reach()


def _event(record: Record) -> Event | None:
    try:
        return decode_record(record)
    except Refused:
        return None
