"""What events say of other events, and what stands twice: the facts by which an account judges records. Pure."""

from __future__ import annotations

from collections import Counter
from typing import Final, NamedTuple

from rollwire.consumers.audit.hours_columns import Marks, packed, unpacked
from rollwire.schemas.records import (
    DeadLetter,
    Event,
    Group,
    GroupFate,
    Notice,
    OffsetRange,
    PackedBatch,
    Reward,
    TrainStep,
    WeightVersion,
)
from rollwire.streams.reverts import NO_REVERTS, Reverts
from rollwire.streams.settlement import settlement_of

ASSEMBLERS: Final = ("assemble", "assemble-production")


class Extra(NamedTuple):
    """A record that is too many, or names what is not there."""

    topic: str
    hour: int
    detail: str
    place: int | None  # packed; None: it is a hole
    event_id: str


class Plan(NamedTuple):
    """One rank's part of a step plan."""

    place: int
    hour: int
    lineage: str
    step: int
    newest_revert: int | None


class Letter(NamedTuple):
    place: int
    hour: int
    source: str  # topic
    at: int  # packed place there


class Step(NamedTuple):
    hour: int
    version: int
    consumed: tuple[OffsetRange, ...]


class Version(NamedTuple):
    hour: int
    step: int
    revert: WeightVersion | None


class Facts:
    """Keys are hashes of ids; see `hours_columns`."""

    def __init__(self) -> None:
        self.extra: list[Extra] = []
        self.members = Marks()  # rollouts in groups
        self.traced = Marks()
        self.groups = Marks()
        self.partial = Marks()  # groups that were closed without all members
        self.shed = Marks()  # rollouts that `assemble` dropped
        self.assembled = Marks()  # groups with a fate by assemble
        self.kept = Marks()  # groups with a fate by pack
        self.dropped = Marks()
        self.fated = Marks()  # members by pack's fates, in step with `fated_groups`
        self.fated_groups = Marks()
        self.planned = Marks()  # groups
        self.judged = Marks()  # rollouts with a reward of what people said
        self.plans: list[Plan] = []
        self.steps: dict[tuple[str, int], Step] = {}
        self.versions: dict[tuple[str, int], Version] = {}
        self.letters: list[Letter] = []
        self.replayed: Counter[int] = Counter()  # letters, by the marks
        self.settled: dict[int, int] = {}  # letter -> hour
        self._once: set[int] = set()

    def only_once(self, topic: str, identity: str, place: int, hour: int, event_id: str) -> None:
        key = hash((topic, identity))
        if key in self._once:
            self.extra.append(Extra(topic, hour, f"{identity} again", place, event_id))
        self._once.add(key)

    def learn(self, event: Event, topic: str, place: int, hour: int, event_id: str, replay_of: str) -> None:
        """`replay_of`: the letter that the record replays, "" for none."""
        match event:
            case Group():
                # A replayed dead letter stands there again on purpose.
                self.only_once(topic, event.group_id + replay_of, place, hour, event_id)
                group = hash(event.group_id)
                self.groups.add(group, hour)
                for member in event.members:
                    rollout = hash(member.rollout.rollout_id)
                    self.members.add(rollout, hour)
                    if member.trace is not None:
                        self.traced.add(rollout, hour)
                if len(event.members) < event.group_size:
                    self.partial.add(group, hour)
            case Reward():
                self.judged.add(hash(event.rollout_id), hour)
            case GroupFate():
                self.only_once(topic, event.group_id, place, hour, event_id)
                self._fate(event, hour)
            case PackedBatch():
                self._plan(event, topic, place, hour, event_id)
            case TrainStep():
                self.only_once(topic, f"{event.lineage}/{event.step}", place, hour, event_id)
                self.steps[event.lineage, event.step] = Step(hour, event.version, event.consumed)
            case WeightVersion():
                self.only_once(topic, f"{event.lineage}/{event.version}", place, hour, event_id)
                revert = None if event.reverts_to is None else event
                self.versions[event.lineage, event.version] = Version(hour, event.step, revert)
            case DeadLetter():
                at = event.source
                refusal = f"{event.refused_by}: {at.topic}[{at.partition}]:{at.offset}"
                self.only_once(topic, refusal, place, hour, event_id)
                self.letters.append(Letter(place, hour, at.topic, packed(at.partition, at.offset)))
            case Notice() if (done := settlement_of(event)) is not None:
                for letter in done.letters:
                    settled = packed(letter.partition, letter.offset)
                    self.settled.setdefault(settled, hour)
                    self.replayed[settled] += done.action == "replayed"
            case _:
                pass

    def _fate(self, event: GroupFate, hour: int) -> None:
        group = hash(event.group_id)
        if event.decided_by in ASSEMBLERS:
            self.assembled.add(group, hour)
            for member in event.members:
                self.shed.add(hash(member), hour)
            return
        (self.kept if event.fate == "kept" else self.dropped).add(group, hour)
        for member in event.members:
            rollout = hash(member)
            self.fated.add(rollout, hour)
            self.fated_groups.add(group, hour)

    def _plan(self, event: PackedBatch, topic: str, place: int, hour: int, event_id: str) -> None:
        plan = f"{event.lineage}/{event.step}/{event.rank}/{event.newest_revert}"
        self.only_once(topic, plan, place, hour, event_id)
        for group_id in event.group_ids:
            if event.rank == 0:
                self.only_once(topic, group_id, place, hour, event_id)
            self.planned.add(hash(group_id), hour)
        self.plans.append(Plan(place, hour, event.lineage, event.step, event.newest_revert))

    def taken(self, plan: Plan) -> bool:
        """Whether the training step of its number consumed it."""
        step = self.steps.get((plan.lineage, plan.step))
        partition, offset = unpacked(plan.place)
        return step is not None and any(
            r.partition == partition and r.start <= offset < r.end for r in step.consumed
        )

    def reverts(self) -> dict[str, Reverts]:
        """By lineage."""
        found: dict[str, Reverts] = {}
        for (lineage, _), version in sorted(self.versions.items(), key=lambda one: one[0]):
            if version.revert is not None:
                found[lineage] = found.get(lineage, NO_REVERTS).add(version.revert)
        return found

    def holes(self) -> list[Extra]:
        """Versions below a lineage's newest that are not there."""
        newest: dict[str, int] = {}
        for lineage, version in self.versions:
            newest[lineage] = max(newest.get(lineage, 0), version)
        return [
            Extra("weight-versions", self.versions[lineage, last].hour, f"{lineage}/{version} is a hole", None, f"{lineage}/{version}")
            for lineage, last in sorted(newest.items())
            for version in range(last)
            if (lineage, version) not in self.versions
        ]  # fmt: skip
