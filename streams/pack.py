"""The decisions of `pack` as a pure state machine: groups and versions in, step plans and fates out (law 6).

Every group meets exactly one fate. A drop is announced at once, so that its slot goes back to the fleet even while the
plan still waits for groups (C06). Groups that wait stay below the committed offset's partition prefix: the position of
a partition is its first undecided record. Drops above that position are known after a restart from `group-fates`
(`decided`), so no group is given a second fate.

Plans take the waiting groups in order of arrival: merged over partitions by (timestamp, partition, offset), a prefix of
each partition, whole groups, exactly `groups_per_step` of them. There are no partial plans.

Groups that are compared within themselves and answers of live traffic wait in separate queues (`pack_queue`); a plan has so many
of each as `CohortConfig.production_share` says, and its answers are one cohort (`pack_cohort`). Neither kind can hold up the
other for good: answers give way when they are too old or too many, and where a whole plan of one kind waited long enough for the
other, or fills the buffer, it is made alone.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

import msgspec
from pydantic import BaseModel, ConfigDict, Field, model_validator

from rollwire.kernels.cost import CostModel, cost_model
from rollwire.kernels.packing import MAX_BUDGET
from rollwire.kernels.packing_search import Objective
from rollwire.kernels.policy.config import PolicyConfig, hf_config
from rollwire.schemas.errors import PlanViolation, Refused
from rollwire.schemas.records import (
    Cut,
    Event,
    Fate,
    Group,
    GroupFate,
    Position,
    WeightVersion,
)
from rollwire.streams.pack_cohort import Cohort, CohortConfig, Spoilt, coverage_notice, judge_cohort
from rollwire.streams.pack_judge import Bad, examine, judge_age, judge_at, judge_line, judge_once
from rollwire.streams.pack_layout import PlanFrame, lay_out
from rollwire.streams.pack_mix import Mix, choose, next_due_us
from rollwire.streams.pack_queue import Entry, Waiting
from rollwire.streams.reverts import NO_REVERTS, Reverts
from rollwire.streams.seams.log import Record

# How many decided group ids are remembered, so that a repeated record meets no second fate (law 4).
REMEMBERED: Final = 100_000


class PackConfig(BaseModel):
    """Settings of `pack`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    ranks: int = Field(
        default=1, ge=1, description="data-parallel ranks; one partition of packed-batches each"
    )
    objective: Objective = Field(
        default="sum",
        description="what a layout evens out: the cost of a step (sum: ranks meet once a step) or of every microbatch "
        "(lockstep: ranks meet at each, as expert parallelism across them demands)",
    )
    groups_per_step: int = Field(default=48, ge=1, description="groups of one plan; a plan is never smaller")
    token_budget: int = Field(
        default=4096, ge=1, description="tokens of one microbatch on one device, at most"
    )
    context_parallel: int = Field(
        default=1,
        ge=1,
        description="devices among which the trainer splits every sequence; they form one rank and share its microbatches",
    )
    max_lag_versions: int = Field(
        default=3,
        ge=0,
        description="policy versions between the oldest span and the version of use, limit included",
    )
    max_steps_ahead: int = Field(
        default=1, ge=0, description="plans that may be out beyond the one that applies to the latest version"
    )
    max_buffered_groups: int = Field(
        default=1024, ge=1, description="groups held in memory; above it reading pauses until a plan is made"
    )
    cohort: CohortConfig = Field(default=CohortConfig(), description="live traffic in plans")
    cost_per_token: float | None = Field(
        default=None, gt=0, description="a of the cost a*L + b*L^2; none: from the policy's config"
    )
    cost_per_token_squared: float | None = Field(
        default=None, ge=0, description="b of the cost a*L + b*L^2; none: from the policy's config"
    )

    @model_validator(mode="after")
    def _room_for_a_plan(self) -> PackConfig:
        if self.max_buffered_groups < self.groups_per_step:
            raise ValueError("max_buffered_groups must be at least groups_per_step, or no plan is ever made")
        self._room_for_a_cohort()
        if (self.cost_per_token is None) != (self.cost_per_token_squared is None):
            raise ValueError(
                "cost_per_token and cost_per_token_squared decide together: set both, or neither for the policy's config"
            )
        if not 1 <= self.microbatch_tokens <= MAX_BUDGET:
            raise ValueError(
                f"a microbatch of token_budget {self.token_budget} on {self.context_parallel} devices has "
                f"{self.microbatch_tokens} tokens: from 1 to {MAX_BUDGET} are possible"
            )
        return self

    def _room_for_a_cohort(self) -> None:
        cohort, live = self.cohort, self.live_groups
        if cohort.production_share == 0:
            return
        if live < 2:
            raise ValueError(
                f"production_share {cohort.production_share:g} of {self.groups_per_step} groups_per_step is {live} answers: at "
                "least 2 are compared with one another"
            )
        if cohort.production_share < 1 and live == self.groups_per_step:
            raise ValueError(
                f"production_share {cohort.production_share:g} of {self.groups_per_step} groups_per_step leaves no other group: "
                "set 1, or more groups_per_step"
            )
        if cohort.max_waiting < self.groups_per_step:
            raise ValueError(
                "cohort.max_waiting must be at least groups_per_step, or no cohort is ever whole"
            )
        if self.max_buffered_groups < cohort.max_waiting + self.groups_per_step:
            raise ValueError(
                f"max_buffered_groups {self.max_buffered_groups} must hold cohort.max_waiting {cohort.max_waiting} and a "
                f"whole plan of {self.groups_per_step} groups"
            )

    @property
    def live_groups(self) -> int:
        """Groups of one plan that are answers of live traffic."""
        return self.cohort.live_of(self.groups_per_step)

    @property
    def mix(self) -> Mix:
        cohort = self.cohort
        ages = round(cohort.max_age_s * 1e6), round(cohort.max_wait_s * 1e6)
        return Mix(self.groups_per_step, self.live_groups, *ages)

    @property
    def microbatch_tokens(self) -> int:
        """Tokens of one microbatch of a rank. Context parallelism pads every sequence to two chunks a device."""
        devices = self.context_parallel
        return self.token_budget if devices == 1 else self.token_budget // 2 * 2 * devices

    @property
    def cost(self) -> CostModel:
        """What is set, else that of the built-in policy's default shape."""
        if self.cost_per_token is None or self.cost_per_token_squared is None:
            return cost_model(hf_config(PolicyConfig()))
        return CostModel(self.cost_per_token, self.cost_per_token_squared)

    def for_policy(self, policy: PolicyConfig) -> PackConfig:
        """With the cost of this policy, unless the cost is set."""
        if self.cost_per_token is not None:
            return self
        cost = cost_model(hf_config(policy))
        return self.model_copy(
            update={"cost_per_token": cost.linear, "cost_per_token_squared": cost.quadratic}
        )


class Refusal(NamedTuple):
    """A record that goes to `dead-letters`, raw."""

    record: Record
    refused: Refused


class Decision(NamedTuple):
    """`events`, `refusals` and `positions` belong into one transaction; nothing to commit where `changed` is False."""

    events: tuple[Event, ...]
    refusals: tuple[Refusal, ...]
    positions: dict[int, int]  # partition of `groups` -> next offset, of all partitions
    changed: bool
    step: int | None  # the step that was planned
    catch_up: bool  # read `weight-versions` to its end and ask again, before anything else


class Packer:
    """`next_step`: the first step without a plan. `positions`: where each partition of `groups` is read from.
    `decided`: ids of groups that have their fate already, and `decided_below`: offsets below which all of them lie.
    `reverts`: those that `next_step` is after."""

    def __init__(
        self,
        config: PackConfig,
        *,
        model: str,
        lineage: str,
        next_step: int,
        positions: Mapping[int, int],
        decided: Iterable[str] = (),
        decided_below: Mapping[int, int] | None = None,
        reverts: Reverts = NO_REVERTS,
    ) -> None:
        self._config = config
        self._mix = config.mix
        self._model = model
        self._lineage = lineage
        self._next_step = next_step
        self._reverts = reverts
        self._latest_version = -1
        self._versions_offset = 0
        self._waiting = Waiting(positions, decided_below or {})
        self._new: list[Entry] = []
        # What was decided in earlier lives and is read again; and the last ones of this life (law 4).
        self._decided = set(decided)
        self._decided_below = dict(decided_below or {})
        self._seen: OrderedDict[str, None] = OrderedDict()
        self._judged_for: tuple[int, Reverts] | None = None
        self._due_us: int | None = None
        self._noticed_us = 0

    # -- what it knows ----------------------------------------------------------------------------------------

    @property
    def next_step(self) -> int:
        return self._next_step

    @property
    def latest_version(self) -> int:
        return self._latest_version

    @property
    def positions(self) -> dict[int, int]:
        """The first undecided offset of every partition of `groups`."""
        return dict(self._waiting.positions)

    @property
    def read_to(self) -> dict[int, int]:
        """The next offset of every partition of `groups`."""
        return dict(self._waiting.read_to)

    @property
    def buffered(self) -> int:
        """Groups that wait or are not judged yet."""
        return len(self._waiting)

    @property
    def full(self) -> bool:
        return self.buffered >= self._config.max_buffered_groups

    @property
    def decided_above(self) -> dict[int, int]:
        """See `Waiting.decided_above`."""
        return self._waiting.decided_above

    @property
    def due_us(self) -> int | None:
        """When time alone decides something next: an answer is too old, or one kind has waited for the other."""
        return self._due_us

    # -- events in --------------------------------------------------------------------------------------------

    def learn(self, version: WeightVersion, offset: int) -> None:
        """A record of `weight-versions`. A revert took its step without a plan: plans begin anew after it, and those that
        were made for its step and later ones are passed over by whoever trains.

        Raises `PlanViolation` for a version that no plan of ours led to.
        """
        self._versions_offset = max(self._versions_offset, offset + 1)
        if version.lineage != self._lineage or version.model != self._model:
            return
        self._latest_version = max(self._latest_version, version.version)
        reverts = self._reverts.add(version)
        if reverts != self._reverts:
            self._reverts = reverts
            self._next_step = version.version + 1
        if self._latest_version >= self._next_step:
            raise PlanViolation(
                f"version {self._latest_version} of lineage {self._lineage} was published, but the last planned step "
                f"is {self._next_step - 1}: is another pack or trainer running on this prefix?"
            )

    def pass_over(self, step: int) -> None:
        """Plans go on with `step`: a replay with other settings makes fewer than the versions that it reads tell of."""
        self._next_step = max(self._next_step, step)

    def read_on(self, partition: int, offset: int) -> None:
        """Everything below an offset of `groups` was received; no record need stand right before it."""
        self._waiting.read_to[partition] = max(self._waiting.read_to[partition], offset)

    def receive(self, record: Record, group: Group | Refused) -> None:
        """A record of `groups`, in order within its partition; `Refused` where it did not decode."""
        self._waiting.read(record)
        if isinstance(group, Refused):
            self._waiting.add_unreadable(record, group)
        elif group.group_id in self._seen or group.group_id in self._decided:
            self._waiting.decided(record.partition, record.offset)
        else:
            self._remember(group.group_id)
            facts = examine(group, token_budget=self._config.microbatch_tokens)
            entry = Entry(record, group, facts)
            self._waiting.add(entry)
            self._new.append(entry)
        read_to = self._waiting.read_to
        if self._decided and all(read_to.get(p, below) >= below for p, below in self._decided_below.items()):
            for group_id in self._decided:
                self._remember(group_id)
            self._decided.clear()

    # -- decisions out ----------------------------------------------------------------------------------------

    def decide(self, now_us: int, *, caught_up: bool, at_end: bool = False) -> Decision:
        """What follows from all that was received. `caught_up`: `weight-versions` was read to its end after the last
        `receive`. An empty decision with `catch_up` changes nothing; call again with `caught_up=True`. `at_end`: every
        partition of `groups` was read to its end after the clock showed `now_us`, so what is missing has not come.

        At most one plan a call: call until nothing changed. What is returned is counted as done: when the
        transaction with it fails, build a new `Packer`.
        """
        if not caught_up and any(e.facts.newest_version > self._latest_version for e in self._new):
            return Decision((), (), self.positions, changed=False, step=None, catch_up=True)
        before = self.positions
        cut = self._cut(now_us)
        base_version = self._next_step - 1
        events = self._judge_new(base_version, cut)
        if self._judged_for != (base_version, self._reverts):
            self._judged_for = base_version, self._reverts
            events += self._drop_bad(self._waiting, base_version, cut)
        events += self._drop_answers(base_version, cut)
        step = self._plan(events, cut, at_end=at_end)
        events += [Refusal(one.record, one.refused) for one in self._waiting.advance()]
        self._due_us = next_due_us(self._waiting, self._mix, may_plan=self._may_plan())
        return Decision(
            events=tuple(event for event in events if not isinstance(event, Refusal)),
            refusals=tuple(event for event in events if isinstance(event, Refusal)),
            positions=self.positions,
            changed=bool(events) or self.positions != before,
            step=step,
            catch_up=False,
        )

    def _judge_new(self, base_version: int, cut: Cut) -> list[Event | Refusal]:
        """What holds for ever, and for the version of use as it is now."""
        events: list[Event | Refusal] = []
        kept: list[Entry] = []
        for entry in self._new:
            bad = judge_once(
                entry.group,
                entry.facts,
                model=self._model,
                lineage=self._lineage,
                latest_version=self._latest_version,
                reverts=self._reverts,
            )
            if bad is None and self._mix.quota(live=entry.live) == 0:
                share = self._config.cohort.production_share
                bad = Bad("no_place", f"no plan takes it: production_share is {share:g}", quarantine=False)
            if bad is not None:
                events += self._drop(entry, bad, base_version, cut)
            else:
                kept.append(entry)
            entry.record = None
        self._new.clear()
        return events + self._drop_bad(kept, base_version, cut)

    def _drop_bad(self, entries: Iterable[Entry], base_version: int, cut: Cut) -> list[Event | Refusal]:
        """What is decided anew whenever the version of use is another, or a revert was learnt."""
        events: list[Event | Refusal] = []
        for entry in entries:
            bad = judge_line(entry.facts, base_version=base_version, reverts=self._reverts) or judge_at(
                entry.facts, base_version=base_version, max_lag_versions=self._config.max_lag_versions
            )
            if bad is not None:
                events += self._drop(entry, bad, base_version, cut)
        return events

    def _drop_answers(self, base_version: int, cut: Cut) -> list[Event | Refusal]:
        """Answers that became too old, and the oldest of too many."""
        count = self._waiting.count(live=True)
        if not count:
            return []
        most, max_age_us = self._config.cohort.max_waiting, self._mix.max_age_us
        events: list[Event | Refusal] = []
        for entry in self._waiting:
            if entry.live and (bad := judge_age(entry.opened_us, cut.clock_us, max_age_us)) is not None:
                events += self._drop(entry, bad, base_version, cut)
        crowded = Bad("crowded_out", f"more than {most} answers wait", quarantine=False)
        for entry in self._waiting.oldest(max(0, self._waiting.count(live=True) - most), live=True):
            events += self._drop(entry, crowded, base_version, cut)
        return events

    def _plan(self, events: list[Event | Refusal], cut: Cut, *, at_end: bool) -> int | None:
        step, config = self._next_step, self._config
        if not self._may_plan():
            return None
        chosen = choose(self._waiting, self._mix, now_us=cut.clock_us, at_end=at_end, full=self.full)
        if chosen is None:
            return None
        sampled, live = chosen
        groups = [entry.group for entry in sampled]
        cohort: Cohort | None = None
        if live:
            judged = judge_cohort([entry.group for entry in live], config.cohort)
            if isinstance(judged, Spoilt):
                events += self._spoil(live, judged, step - 1, cut)
                return None
            cohort = judged
            groups += judged.groups
        frame = PlanFrame(
            model=self._model,
            lineage=self._lineage,
            step=step,
            base_version=step - 1,
            ranks=config.ranks,
            token_budget=config.microbatch_tokens,
            max_lag_versions=config.max_lag_versions,
            cost=config.cost,
            cut=cut,
            objective=config.objective,
            newest_revert=self._reverts.newest,
            context_parallel=config.context_parallel,
            cohort=cohort,
        )
        events += lay_out(groups, frame)
        # The fates of a plan stand in several partitions: the place tells a later reader the order that the plan has.
        for place, entry in enumerate((*sampled, *live)):
            fate = self._settle(entry, "kept", "trained", f"step {step}", step - 1, cut)
            events.append(msgspec.structs.replace(fate, place=place))
        self._next_step = step + 1
        return step

    def _may_plan(self) -> bool:
        """Nothing is planned before version 0, the anchor, can be read, nor too far before the trainer."""
        return self._latest_version >= max(0, self._next_step - 1 - self._config.max_steps_ahead)

    def _spoil(self, live: list[Entry], spoilt: Spoilt, base_version: int, cut: Cut) -> list[Event | Refusal]:
        """A cohort of which nothing is trained on: its groups go, the next cohort comes."""
        events: list[Event | Refusal] = [
            self._settle(entry, spoilt.fate, spoilt.reason, spoilt.detail, base_version, cut)
            for entry in live
        ]
        if spoilt.reason == "coverage":
            # An event's id has its time in it: several of one moment are a microsecond apart.
            self._noticed_us = max(cut.clock_us, self._noticed_us + 1)
            events.append(
                coverage_notice(
                    spoilt,
                    model=self._model,
                    for_version=base_version,
                    config=self._config.cohort,
                    at_us=self._noticed_us,
                )
            )
        return events

    def _drop(self, entry: Entry, bad: Bad, base_version: int, cut: Cut) -> list[Event | Refusal]:
        events: list[Event | Refusal] = []
        if bad.quarantine and entry.record is not None:
            events.append(Refusal(entry.record, Refused(bad.reason, bad.detail)))
        events.append(self._settle(entry, "dropped", bad.reason, bad.detail, base_version, cut))
        return events

    def _settle(
        self, entry: Entry, fate: Fate, reason: str, detail: str, base_version: int, cut: Cut
    ) -> GroupFate:
        """Gives an entry its one fate, and with it the slot back to the replica that opened the group."""
        group = entry.group
        rewards = [member.reward for member in group.members if member.reward is not None]
        self._waiting.remove(entry)
        return GroupFate(
            group_id=group.group_id,
            fate=fate,
            reason=reason,
            detail=detail,
            decided_by="pack",
            fleet=group.members[0].rollout.fleet,
            replica=group.members[0].rollout.replica,
            members=tuple(member.rollout.rollout_id for member in group.members),
            reward_mean=math.fsum(rewards) / len(rewards) if rewards else None,
            group_size=group.group_size,
            for_version=base_version,
            oldest_version=entry.facts.oldest_version,
            cut=cut,
        )

    def _cut(self, now_us: int) -> Cut:
        inputs = [
            Position(topic="groups", partition=p, offset=o) for p, o in sorted(self._waiting.read_to.items())
        ]
        inputs.append(Position(topic="weight-versions", partition=0, offset=self._versions_offset))
        return Cut(inputs=tuple(inputs), clock_us=now_us)

    def _remember(self, group_id: str) -> None:
        self._seen[group_id] = None
        while len(self._seen) > REMEMBERED + self._config.max_buffered_groups:
            self._seen.popitem(last=False)
