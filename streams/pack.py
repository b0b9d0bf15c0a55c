"""The decisions of `pack` as a pure state machine: groups and versions in, step plans and fates out (law 6).

Every group meets exactly one fate. A drop is announced at once, so that its slot goes back to the fleet even while the
plan still waits for groups (C06). Groups that wait stay below the committed offset's partition prefix: the position of
a partition is its first undecided record. Drops above that position are known after a restart from `group-fates`
(`decided`), so no group is given a second fate.

Plans take the waiting groups in order of arrival: merged over partitions by (timestamp, partition, offset), a prefix of
each partition, whole groups, exactly `groups_per_step` of them. There are no partial plans.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

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
from rollwire.streams.pack_judge import Bad, Facts, examine, judge_at, judge_line, judge_once
from rollwire.streams.pack_layout import PlanFrame, lay_out
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


class _Entry:
    """One record of `groups` that is not below its partition's position yet."""

    __slots__ = ("decided", "facts", "group", "offset", "record", "refused", "timestamp_ms")

    def __init__(
        self, record: Record, group: Group | None, facts: Facts | None, refused: Refused | None
    ) -> None:
        self.offset = record.offset
        self.timestamp_ms = record.timestamp_ms
        self.record: Record | None = record  # the raw bytes, while a quarantine is possible
        self.group = group
        self.facts = facts
        self.refused = refused
        self.decided = group is None and refused is None


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
        self._model = model
        self._lineage = lineage
        self._next_step = next_step
        self._reverts = reverts
        self._latest_version = -1
        self._versions_offset = 0
        self._positions = dict(positions)
        self._read_to = dict(positions)
        self._decided_below = dict(decided_below or {})
        self._queues: dict[int, deque[_Entry]] = {partition: deque() for partition in positions}
        self._new: list[tuple[int, _Entry]] = []
        self._seen: OrderedDict[str, None] = OrderedDict((group_id, None) for group_id in decided)
        self._waiting = 0

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
        return dict(self._positions)

    @property
    def read_to(self) -> dict[int, int]:
        """The next offset of every partition of `groups`."""
        return dict(self._read_to)

    @property
    def buffered(self) -> int:
        """Groups that wait or are not judged yet."""
        return self._waiting + len(self._new)

    @property
    def full(self) -> bool:
        return self.buffered >= self._config.max_buffered_groups

    @property
    def drops_above(self) -> bool:
        """Whether fates were, or may have been, given to records above a partition's position: a restart must learn
        them. Those of an earlier life count until reading has come by the last of them."""
        return any(
            self._read_to[p] < below for p, below in self._decided_below.items() if p in self._read_to
        ) or any(entry.decided for queue in self._queues.values() for entry in queue)

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

    def receive(self, record: Record, group: Group | Refused) -> None:
        """A record of `groups`, in order within its partition; `Refused` where it did not decode."""
        self._read_to[record.partition] = record.offset + 1
        if isinstance(group, Refused):
            entry = _Entry(record, None, None, group)
        elif group.group_id in self._seen:
            entry = _Entry(record, None, None, None)
        else:
            self._remember(group.group_id)
            entry = _Entry(record, group, examine(group, token_budget=self._config.microbatch_tokens), None)
            self._new.append((record.partition, entry))
        self._queues[record.partition].append(entry)

    # -- decisions out ----------------------------------------------------------------------------------------

    def decide(self, now_us: int, *, caught_up: bool) -> Decision:
        """What follows from all that was received. `caught_up`: `weight-versions` was read to its end after the last
        `receive`. An empty decision with `catch_up` changes nothing; call again with `caught_up=True`.

        At most one plan a call: call until nothing changed. What is returned is counted as done: when the
        transaction with it fails, build a new `Packer`.
        """
        if not caught_up and any(
            e.facts and e.facts.newest_version > self._latest_version for _, e in self._new
        ):
            return Decision((), (), dict(self._positions), changed=False, step=None, catch_up=True)
        before = dict(self._positions)
        cut = self._cut(now_us)
        events: list[Event | Refusal] = []
        base_version = self._next_step - 1
        for _, entry in self._new:
            if entry.group is None or entry.facts is None:
                continue
            bad = judge_once(
                entry.group,
                entry.facts,
                model=self._model,
                lineage=self._lineage,
                latest_version=self._latest_version,
                reverts=self._reverts,
            )
            self._waiting += 1
            if bad is not None:
                events += self._drop(entry, bad, base_version, cut)
            entry.record = None
        self._new.clear()
        for queue in self._queues.values():
            for entry in queue:
                if entry.group is None or entry.facts is None:
                    continue
                bad = judge_line(entry.facts, base_version=base_version, reverts=self._reverts) or judge_at(
                    entry.facts, base_version=base_version, max_lag_versions=self._config.max_lag_versions
                )
                if bad is not None:
                    events += self._drop(entry, bad, base_version, cut)
        step = self._plan(events, cut)
        events += self._advance()
        return Decision(
            events=tuple(event for event in events if not isinstance(event, Refusal)),
            refusals=tuple(event for event in events if isinstance(event, Refusal)),
            positions=dict(self._positions),
            changed=bool(events) or self._positions != before,
            step=step,
            catch_up=False,
        )

    def _plan(self, events: list[Event | Refusal], cut: Cut) -> int | None:
        step, config = self._next_step, self._config
        if self._waiting < config.groups_per_step:
            return None
        # Nothing is planned before version 0, the anchor, can be read.
        if self._latest_version < max(0, step - 1 - config.max_steps_ahead):
            return None
        taken = self._oldest_waiting(config.groups_per_step)
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
        )
        events += lay_out([entry.group for entry in taken if entry.group is not None], frame)
        for entry in taken:
            events.append(self._settle(entry, "kept", "trained", f"step {step}", step - 1, cut))
        self._next_step = step + 1
        return step

    def _oldest_waiting(self, count: int) -> list[_Entry]:
        """The first `count` waiting entries, a prefix of each partition. Timestamps are the producers' and may fall
        within a partition: there the highest so far counts, so that the merge keeps every partition's order."""
        keyed: list[tuple[int, int, int, _Entry]] = []
        for partition, queue in self._queues.items():
            highest, found = 0, 0
            for entry in queue:
                if entry.group is None:
                    continue
                highest = max(highest, entry.timestamp_ms)
                keyed.append((highest, partition, entry.offset, entry))
                found += 1
                if found == count:
                    break
        keyed.sort(key=lambda key: key[:3])
        return [entry for *_, entry in keyed[:count]]

    def _drop(self, entry: _Entry, bad: Bad, base_version: int, cut: Cut) -> list[Event | Refusal]:
        events: list[Event | Refusal] = []
        if bad.quarantine and entry.record is not None:
            events.append(Refusal(entry.record, Refused(bad.reason, bad.detail)))
        events.append(self._settle(entry, "dropped", bad.reason, bad.detail, base_version, cut))
        return events

    def _settle(
        self, entry: _Entry, fate: Fate, reason: str, detail: str, base_version: int, cut: Cut
    ) -> GroupFate:
        """Gives an entry its one fate, and with it the slot back to the replica that opened the group."""
        group, facts = entry.group, entry.facts
        if group is None or facts is None:
            raise PlanViolation(f"record {entry.offset} of groups was to get a second fate")
        rewards = [member.reward for member in group.members if member.reward is not None]
        entry.group = entry.facts = None
        entry.decided = True
        self._waiting -= 1
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
            oldest_version=facts.oldest_version,
            cut=cut,
        )

    def _advance(self) -> list[Refusal]:
        """Moves every position to its first undecided record. Refusals on the way are announced only here: they have
        no slot to give back, and a dead letter above the position would be written again after a restart."""
        refusals: list[Refusal] = []
        for partition, queue in self._queues.items():
            while queue and (queue[0].decided or queue[0].refused is not None):
                entry = queue.popleft()
                if entry.refused is not None and entry.record is not None:
                    refusals.append(Refusal(entry.record, entry.refused))
            self._positions[partition] = queue[0].offset if queue else self._read_to[partition]
        return refusals

    def _cut(self, now_us: int) -> Cut:
        inputs = [Position(topic="groups", partition=p, offset=o) for p, o in sorted(self._read_to.items())]
        inputs.append(Position(topic="weight-versions", partition=0, offset=self._versions_offset))
        return Cut(inputs=tuple(inputs), clock_us=now_us)

    def _remember(self, group_id: str) -> None:
        self._seen[group_id] = None
        while len(self._seen) > REMEMBERED + self._config.max_buffered_groups:
            self._seen.popitem(last=False)
