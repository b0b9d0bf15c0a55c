"""The laws (DESIGN.md, section 4) as checks over the committed log: as it grows, and once it is at rest.

The log is read like a stranger reads it, without faults and without asking the processors. What was really sampled is
known from the workload. Numbers name the law that a violation breaks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Final, NamedTuple

import numpy as np

from rollwire.consumers.audit.hours_facts import ASSEMBLERS
from rollwire.ops.simulate.log import SimulatedLog
from rollwire.ops.simulate.workload import LINEAGE, Truth
from rollwire.ops.simulate.world import Violated
from rollwire.schemas.errors import Refused
from rollwire.schemas.ids import opened_us
from rollwire.schemas.records import (
    Cut,
    DeadLetter,
    Event,
    Group,
    GroupClosed,
    GroupFate,
    PackedBatch,
    Reward,
    Rollout,
    RoutingTrace,
    TrainStep,
    WeightVersion,
)
from rollwire.streams.emit import decode_record, deletes
from rollwire.streams.pack_cohort import CohortConfig
from rollwire.streams.reverts import NO_REVERTS, Reverts
from rollwire.streams.seams.log import Record, TopicPartition

JOINED: Final = ("rollouts", "production-rollouts", "rewards", "routing-traces")
PREFIX: Final = "sim."
LIVE: Final = f"{PREFIX}assemble-production"
CONSUMER: Final[Mapping[str, str]] = {
    **dict.fromkeys(JOINED, f"{PREFIX}assemble"),
    "production-rollouts": LIVE,
    "groups": f"{PREFIX}pack",
    "packed-batches": f"{PREFIX}trainer",
}


class Limits(NamedTuple):
    """What the processors were told."""

    ranks: int
    groups_per_step: int
    max_lag: int
    cohort: CohortConfig = CohortConfig()
    silent: bool = False  # an answer that nobody judged in time counts as one of which nobody said anything

    @property
    def answers(self) -> int:
        """Of live traffic, in one plan of both kinds."""
        return self.cohort.live_of(self.groups_per_step)


def consumer_of(topic: str, event: Event | None) -> str:
    """Who decides a record. What people said is among the rewards, and the other reader passes it by."""
    return LIVE if isinstance(event, Reward) and event.source == "user" else CONSUMER[topic]


class _Input(NamedTuple):
    """A record of an input topic, until its consumer's offset has passed it."""

    offset: int
    group_id: str  # "" = it is no event
    plan: PlanKey | None


class PlanKey(NamedTuple):
    """A step is planned once, and once more after every revert to before it."""

    newest_revert: int  # that the plan knew of; 0 = none
    step: int


def plan_key(batch: PackedBatch) -> PlanKey:
    return PlanKey(batch.newest_revert or 0, batch.step)


class Laws:
    """Reads on in the log at each `observe`; raises `Violated` at the first law that does not hold."""

    def __init__(
        self, log: SimulatedLog, partitions: Mapping[str, int], groups: Mapping[str, Truth], limits: Limits
    ) -> None:
        self._log = log
        self._truth = groups
        self._limits = limits
        self._reader = log.reader()
        self.places = [TopicPartition(topic, p) for topic, count in partitions.items() for p in range(count)]
        self._reader.assign(dict.fromkeys(self.places, 0))
        self._inputs: dict[tuple[TopicPartition, str], deque[_Input]] = {}  # by who decides them
        self.records: dict[str, list[Record]] = {topic: [] for topic in partitions}
        self.groups: dict[str, Group] = {}
        self.assembled: dict[str, Group | GroupFate] = {}
        self.closed: dict[str, GroupClosed] = {}
        self.fates: dict[str, GroupFate] = {}  # by pack
        self.plans: dict[PlanKey, dict[int, PackedBatch]] = {}  # rank -> its slice
        self.planned: dict[str, PlanKey] = {}  # by group
        self._to_judge: list[GroupFate | PackedBatch] = []
        self.steps: list[TrainStep] = []
        self.versions: list[WeightVersion] = []
        self.stands: list[int] = []  # the offset of each version
        self.refused: dict[tuple[str, int, int], DeadLetter] = {}

    @property
    def reverts(self) -> Reverts:
        return reduce(Reverts.add, self.versions, NO_REVERTS)

    def plan_of(self, step: int) -> PlanKey:
        """The plan that `step` was to be taken from."""
        return PlanKey(self.reverts.newest_at(step - 1) or 0, step)

    def observe(self) -> None:
        """Everything that became visible since the last time, then what must hold at any moment."""
        while records := self._reader.poll(10_000, 0.0):
            for record in records:
                self.records[record.topic].append(record)
                try:
                    event = None if deletes(record) else decode_record(record)
                except Refused:
                    event = None
                self._learn(record, event)
        # A fate may be seen before its group: topics are read one after the other.
        unread = [one for one in self._to_judge if not self._judge(one)]
        self._to_judge = unread
        # Markers travel alone: offsets may be seen before what they stand for, and half a transaction before the rest.
        if not self._log.transactions():
            self.check_offsets()
            self.check_whole()

    # -- as the log grows ---------------------------------------------------------------------------------------

    def _learn(self, record: Record, event: Event | None) -> None:
        place = TopicPartition(record.topic, record.partition)
        if place.topic in CONSUMER:
            group_id = event.group_id if isinstance(event, Rollout | Reward | RoutingTrace | Group) else ""
            plan = plan_key(event) if isinstance(event, PackedBatch) else None
            waiting = self._inputs.setdefault((place, consumer_of(place.topic, event)), deque())
            waiting.append(_Input(record.offset, group_id, plan))
        match event:
            case Group():
                self._outcome(event.group_id, event)
                self.groups[event.group_id] = event
                self._nothing_invented(event)
            case GroupFate() if event.decided_by in ASSEMBLERS:
                self._outcome(event.group_id, event)
            case GroupFate():
                _demand(
                    event.group_id not in self.fates, "6", f"group {event.group_id} got a second fate by pack"
                )
                self.fates[event.group_id] = event
                self._to_judge.append(event)
            case GroupClosed():
                self.closed[event.group_id] = event
            case PackedBatch():
                self._plan(event)
            case TrainStep():
                self._step(event)
            case WeightVersion():
                expected = self.versions[-1].version + 1 if self.versions else 0
                _demand(
                    event.version == expected,
                    "3",
                    f"version {event.version} of the log came when {expected} was next",
                )
                self.versions.append(event)
                self.stands.append(record.offset)
            case DeadLetter():
                at = (event.source.topic, event.source.partition, event.source.offset)
                _demand(at not in self.refused, "4", f"the record at {at} was refused twice")
                self.refused[at] = event
            case _:
                pass

    def _outcome(self, group_id: str, outcome: Group | GroupFate) -> None:
        _demand(
            group_id not in self.assembled,
            "4",
            f"assemble gave group {group_id} a second outcome: {_brief(outcome)} after {_brief(self.assembled.get(group_id))}",
        )
        _demand(group_id in self._truth, "10", f"group {group_id} has an outcome and was never opened")
        self.assembled[group_id] = outcome

    def _nothing_invented(self, group: Group) -> None:
        truth = self._truth[group.group_id]
        for member in group.members:
            index = member.rollout.index
            _demand(
                member.rollout.rollout_id in {r.rollout_id for r in truth.rollouts},
                "10",
                f"{member.rollout.rollout_id} was never sampled",
            )
            earned = (truth.rewards[index], truth.signals)
            if truth.live and self._limits.silent and (member.reward, member.signals) == (None, 0):
                earned = (None, 0)
            _demand(
                member.signals == earned[1] and (member.advantage is None or not truth.live),
                "10",
                f"{member.rollout.rollout_id} has {member.signals} signals of {truth.signals}, advantage {member.advantage}",
            )
            if truth.kind != "conflicting":
                _demand(
                    member.rollout == truth.rollouts[index] and member.reward == earned[0],
                    "10",
                    f"{member.rollout.rollout_id} is not what was sampled and rewarded",
                )

    def _judge(self, one: GroupFate | PackedBatch) -> bool:
        """False where a group that it is about was not read yet."""
        groups = (one.group_id,) if isinstance(one, GroupFate) else one.group_ids
        if not self.groups.keys() >= set(groups) or _versions_seen(one.cut) > self._versions_end:
            return False
        if isinstance(one, GroupFate):
            self._judged_rightly(one)
            return True
        for group_id in groups:
            oldest = self._joined(group_id).oldest_version
            _demand(
                0 <= one.base_version - oldest <= self._limits.max_lag,
                "6",
                f"step {one.step} uses group {group_id} with a lag of {one.base_version - oldest} versions by its oldest "
                f"span ({oldest}); {self._limits.max_lag} are allowed",
            )
        judge_cohort_of(one, [self.groups[group_id] for group_id in groups], self._limits)
        reverts = self._reverts_at(one.cut)
        _demand(
            reverts.newest == one.newest_revert,
            "9",
            f"step {one.step} says that the last revert was {one.newest_revert}, its cut has seen {reverts.newest}",
        )
        return True

    @property
    def _versions_end(self) -> int:
        return self.stands[-1] + 1 if self.stands else 0

    def _reverts_at(self, cut: Cut) -> Reverts:
        """Those that pack had seen."""
        seen = _versions_seen(cut)
        known = [event for event, at in zip(self.versions, self.stands, strict=True) if at < seen]
        return reduce(Reverts.add, known, NO_REVERTS)

    def _judged_rightly(self, fate: GroupFate) -> None:
        """By the versions that were really sampled from, and the version of use (law 6)."""
        truth, used = self._joined(fate.group_id), fate.for_version
        _demand(used is not None, "6", f"the fate of group {fate.group_id} names no version of use")
        lag = (used or 0) - truth.oldest_version
        if fate.fate == "kept":
            _demand(
                truth.newest_version <= (used or 0) and truth.rollouts[0].lineage == LINEAGE,
                "6",
                f"group {fate.group_id} was kept for version {used}; it is of version {truth.newest_version}, "
                f"lineage {truth.rollouts[0].lineage}",
            )
        reverts = self._reverts_at(fate.cut)
        sampled = {span.version for rollout in truth.rollouts for span in rollout.spans}
        abandoned = [v for v in sampled if v <= (used or 0) and not reverts.leads(v, used or 0)]
        foreign = truth.rollouts[0].lineage != LINEAGE
        if fate.reason in ("trained", "lineage_abandoned"):
            _demand(
                (bool(abandoned) or foreign) == (fate.reason == "lineage_abandoned"),
                "6",
                f"group {fate.group_id} is {fate.reason} for version {used}; {abandoned} of {sorted(sampled)} were given up",
            )
        if fate.reason in ("trained", "stale"):
            _demand(
                (lag <= self._limits.max_lag) == (fate.fate == "kept"),
                "6",
                f"group {fate.group_id} was {fate.fate} for version {used}: its oldest span is of version "
                f"{truth.oldest_version}, {self._limits.max_lag} may lie between",
            )

    def _joined(self, group_id: str) -> Truth:
        """The truth about the members that `assemble` joined: a group may be closed without some."""
        truth = self._truth[group_id]
        joined = {member.rollout.index for member in self.groups[group_id].members}
        return truth._replace(rollouts=tuple(r for r in truth.rollouts if r.index in joined))

    def _plan(self, batch: PackedBatch) -> None:
        key = plan_key(batch)
        slices = self.plans.setdefault(key, {})
        _demand(batch.rank not in slices, "4", f"step {batch.step} was planned twice for rank {batch.rank}")
        others = list(slices.values())
        slices[batch.rank] = batch
        _demand(
            batch.base_version == batch.step - 1,
            "6",
            f"the plan of step {batch.step} is for version {batch.base_version}",
        )
        _demand(
            all(other.plan_digest == batch.plan_digest for other in others),
            "3",
            f"the ranks were given different plans for step {batch.step}",
        )
        self._to_judge.append(batch)
        for group_id in batch.group_ids:
            before = self.planned.setdefault(group_id, key)
            _demand(
                before == key,
                "4",
                f"group {group_id} is in the plans of steps {before} and {key}",
            )

    def _step(self, step: TrainStep) -> None:
        expected = self.steps[-1].step + 1 if self.steps else 1
        _demand(step.step == expected, "3", f"train-step {step.step} was committed when {expected} was next")
        for one in step.consumed:
            before = (
                [r.end for r in self.steps[-1].consumed if r.partition == one.partition] if self.steps else []
            )
            _demand(
                not before or before == [one.start],
                "3",
                f"step {step.step} consumed {one.topic}[{one.partition}] from {one.start}, the step before it to {before}",
            )
        self.steps.append(step)

    # -- at moments when no transaction is on its way ------------------------------------------------------------

    def check_offsets(self) -> None:
        """Law 2: what lies below a committed offset has left its trace."""
        for (place, consumer), waiting in self._inputs.items():
            committed = self._log.settled(consumer, [place]).get(place, 0)
            while waiting and waiting[0].offset < committed:
                one = waiting.popleft()
                _demand(
                    self._accounted(place, one),
                    "2",
                    f"{place.topic}[{place.partition}] is committed to {committed}, but nothing came of offset "
                    f"{one.offset} (group {one.group_id or 'none'})",
                )

    def _accounted(self, place: TopicPartition, one: _Input) -> bool:
        if (place.topic, place.partition, one.offset) in self.refused:
            return True
        if place.topic == "groups":
            return one.group_id in self.fates
        if place.topic == "packed-batches" and one.plan is not None:
            return self.passed_over(one.plan) or one.plan.step <= len(self.steps)
        return one.group_id in self.assembled

    def passed_over(self, plan: PlanKey) -> bool:
        """Whether a revert that it did not know of came before its step."""
        return self.reverts.passes_over(plan.step, plan.newest_revert)

    def check_whole(self) -> None:
        """No transaction is seen in part: outcome and mark, plan and fates of all ranks, step and version."""
        _demand(
            self.assembled.keys() == self.closed.keys(),
            "4",
            f"outcomes without a mark in groups-closed, or marks without one: "
            f"{sorted(self.assembled.keys() ^ self.closed.keys())}",
        )
        _demand(
            not self._to_judge, "10", f"fates or plans of groups that are not there: {self._to_judge[:1]}"
        )
        for plan, slices in self.plans.items():
            _demand(
                len(slices) == self._limits.ranks,
                "4",
                f"of {self._limits.ranks} ranks only {sorted(slices)} have a plan for {plan}",
            )
        kept = {group_id for group_id, fate in self.fates.items() if fate.fate == "kept"}
        _demand(
            kept == self.planned.keys(),
            "6",
            f"kept but not planned, or planned but not kept: {sorted(kept ^ self.planned.keys())}",
        )
        for revert in {plan.newest_revert for plan in self.plans}:
            steps = sorted(plan.step for plan in self.plans if plan.newest_revert == revert)
            _demand(
                steps == list(range(revert + 1, revert + 1 + len(steps))),
                "3",
                f"the planned steps after version {revert} have a hole: {steps}",
            )
        made = [(v.version, v.state_digest) for v in self.versions if v.step > 0]
        _demand(
            made == [(s.version, s.state_digest) for s in self.steps],
            "3",
            f"versions {[v for v, _ in made]} and train-steps {[s.version for s in self.steps]} are not of one another",
        )


def _versions_seen(cut: Cut) -> int:
    """How far `weight-versions` had been read."""
    return max((at.offset for at in cut.inputs if at.topic == "weight-versions"), default=0)


def judge_cohort_of(batch: PackedBatch, groups: Sequence[Group], limits: Limits) -> None:
    """The answers of a plan: their number, age and coverage, and that each advantage is against the mean of the others."""
    answers = [group for group in groups if group.baseline == "cohort"]
    config, name = limits.cohort, f"the cohort of step {batch.step}"
    numbers = {limits.answers} | ({0, limits.groups_per_step} if 0 < config.production_share < 1 else set())
    _demand(len(answers) in numbers, "6", f"{name} has {len(answers)} answers, not one of {sorted(numbers)}")
    counts: dict[str, list[int]] = {}
    for group in answers:
        age_s = (batch.cut.clock_us - opened_us(group.group_id)) / 1e6
        _demand(
            age_s <= config.max_age_s,
            "6",
            f"{name} has an answer of {age_s} s, {config.max_age_s} are allowed",
        )
        (member,) = group.members
        row = counts.setdefault(member.rollout.outcome, [0, 0, 0])
        row[0] += 1
        row[1] += member.signals > 0
        row[2] += member.reward is not None
    said = {row.outcome: [row.rollouts, row.signalled, row.scored] for row in batch.coverage}
    _demand(said == counts, "10", f"{name} says that it covers {said}, it covers {counts}")
    sums = [sum(row[i] for row in counts.values()) for i in range(3)]
    for outcome, (rollouts, signalled, scored) in (*counts.items(), *([("all", sums)] if answers else [])):
        _demand(
            (rollouts < config.coverage_min_rollouts and outcome != "all")
            or max(signalled, scored) / rollouts >= config.coverage_floor,
            "6",
            f"{name} was trained on with {signalled} signals and {scored} rewards for {rollouts} of {outcome}",
        )
    rewards = {m.rollout.rollout_id: m.reward for g in answers for m in g.members if m.reward is not None}
    for microbatch in batch.microbatches:
        advantages = np.frombuffer(microbatch.advantages, "<f4").tolist()
        for rollout_id, advantage in zip(microbatch.rollout_ids, advantages, strict=True):
            if (reward := rewards.get(rollout_id)) is not None:
                others = [
                    value for other, value in rewards.items() if other != rollout_id and value is not None
                ]
                wanted = reward - sum(others) / len(others)
                _demand(
                    abs(advantage - wanted) < 1e-6,
                    "10",
                    f"{rollout_id} of {name} has the advantage {advantage}, wanted is {wanted}",
                )


def _demand(holds: bool, law: str, text: str) -> None:
    if not holds:
        raise Violated(law, text)


def _brief(outcome: Group | GroupFate | None) -> str:
    return f"{outcome.fate} ({outcome.reason})" if isinstance(outcome, GroupFate) else "a group"
