"""One open group: what has come of it, whether it is whole, and what becomes of it. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import attrgetter
from typing import ClassVar, Final, Literal, NamedTuple

import msgspec

from rollwire.kernels.advantages import Baseline, group_advantages
from rollwire.schemas.errors import Refused
from rollwire.schemas.ids import parse_rollout_id
from rollwire.schemas.records import (
    Cut,
    Event,
    Group,
    GroupFate,
    Member,
    Position,
    Reward,
    Rollout,
    RoutingTrace,
)
from rollwire.streams.seams.log import Record
from rollwire.streams.sharing import check_sharing

# What all members of a group must have in common; the first rollout of the partition sets it.
_SHARED: Final = ("group_size", "model", "lineage", "environment", "task_id")
_shared: Final = attrgetter(*_SHARED)


class Held(NamedTuple):
    """An event that cannot be judged before a rollout has come: kept whole, in case that it is refused."""

    record: Record
    event: Reward | RoutingTrace


class Trace(NamedTuple):
    """A routing trace by reference; its bytes stay in the log."""

    position: Position
    event: RoutingTrace  # without its data: enough to tell a repeat, with the digest
    digest: int


class Refusal(NamedTuple):
    """A held event that turned out bad."""

    record: Record
    event: Reward | RoutingTrace
    refused: Refused


class OpenGroup:
    """The members of one group so far. `take_*` raise `Refused` for the event they are given."""

    decided_by: ClassVar[str] = "assemble"

    __slots__ = (
        "came_at",
        "deadline_us",
        "first",
        "fresh",
        "group_id",
        "held_rewards",
        "held_traces",
        "rewards",
        "rollouts",
        "traces",
        "values",
    )

    def __init__(self, group_id: str, deadline_us: int) -> None:
        self.group_id = group_id
        self.deadline_us = deadline_us
        self.first: Rollout | None = None
        self.fresh = False  # something came that no earlier owner had read
        self.came_at: dict[int, int] = {}  # offsets of the rollouts
        self.rollouts: dict[int, Rollout] = {}
        self.values: dict[int, bytes | None] = {}  # what the rollouts were decoded from
        self.rewards: dict[int, Reward] = {}
        self.traces: dict[int, Trace] = {}
        self.held_rewards: list[Held] = []  # until the first rollout tells the group's size
        self.held_traces: dict[int, list[Held]] = {}  # until their own rollout tells its tokens

    def take_rollout(self, offset: int, rollout: Rollout, value: bytes | None = None) -> list[Refusal]:
        """Adds a rollout, with the value it was decoded from; returns the held events that it proves bad."""
        known = self.rollouts.get(rollout.index)
        if known is not None:
            if known != rollout:
                raise Refused(
                    "conflicting_repeat", f"rollout {rollout.rollout_id} came before with other content"
                )
            return []
        if self.first is not None and _shared(self.first) != _shared(rollout):
            for field, ours, its in zip(_SHARED, _shared(self.first), _shared(rollout), strict=True):
                if ours != its:
                    raise Refused("inconsistent", f"{field} is {its!r}, the group's is {ours!r}")
        self.rollouts[rollout.index] = rollout
        self.came_at[rollout.index] = offset
        self.values[rollout.index] = value
        held: list[Held] = []
        if self.first is None:
            self.first = rollout
            held, self.held_rewards = self.held_rewards, []
            for index in [i for i in self.held_traces if i >= rollout.group_size]:
                held += self.held_traces.pop(index)
        held += self.held_traces.pop(rollout.index, [])
        bad: list[Refusal] = []
        for record, event in held:
            try:
                if isinstance(event, Reward):
                    self.take_reward(record, event)
                else:
                    self.take_trace(record, event)
            except Refused as refused:
                bad.append(Refusal(record, event, refused))
        return bad

    def take_reward(self, record: Record, reward: Reward) -> None:
        index = parse_rollout_id(reward.rollout_id)[1]
        if self.first is None:
            self.held_rewards.append(Held(record, reward))
            return
        self._check_index(index, self.first)
        known = self.rewards.get(index)
        if known is None:
            self.rewards[index] = reward
        # A verifier that starts again scores again: the same verdict at another time is the same reward.
        elif msgspec.structs.replace(known, scored_us=reward.scored_us) != reward:
            raise Refused("conflicting_repeat", f"{reward.rollout_id} was rewarded before with other content")

    def take_trace(self, record: Record, trace: RoutingTrace) -> None:
        index = parse_rollout_id(trace.rollout_id)[1]
        rollout = self.rollouts.get(index)
        if rollout is None:
            if self.first is not None:
                self._check_index(index, self.first)
            self.held_traces.setdefault(index, []).append(Held(record, trace))
            return
        tokens = len(rollout.loss_mask)
        if trace.top_k != rollout.top_k_experts or trace.tokens != tokens:
            raise Refused(
                "routing_invalid",
                f"rows of {trace.tokens} tokens with top {trace.top_k} do not fit "
                f"{rollout.rollout_id}: {tokens} tokens, top {rollout.top_k_experts}",
            )
        new = Trace(
            Position(topic=record.topic, partition=record.partition, offset=record.offset),
            msgspec.structs.replace(trace, data=None),
            hash(trace.data),
        )
        known = self.traces.setdefault(index, new)
        if known is not new and (known.event, known.digest) != (new.event, new.digest):
            raise Refused("conflicting_repeat", f"{trace.rollout_id} had another trace before")

    def judged_by(self, event: Event) -> int:
        """The offset of the rollout without which a reward or a trace could not be judged; -1 = of none."""
        if self.first is None or isinstance(event, Rollout):
            return -1
        if isinstance(event, RoutingTrace):
            own = self.came_at.get(parse_rollout_id(event.rollout_id)[1])
            if own is not None:
                return own
        return self.came_at[self.first.index]

    @property
    def abandoned(self) -> bool:
        return any(rollout.finish_reason == "abort" for rollout in self.rollouts.values())

    def whole(self, *, traces: bool) -> bool:
        """Whether nothing can come any more that would change the outcome."""
        first = self.first
        if first is None or len(self.rollouts) < first.group_size:
            return False
        if self.abandoned:  # what was cut off is not scored by everybody
            return all(i in self.rewards for i, r in self.rollouts.items() if r.finish_reason != "abort")
        return len(self.rewards) == first.group_size and not (traces and self._untraced())

    def decide(
        self, cut: Cut, *, baseline: Baseline, keep_equal: bool, traces: bool, partial: bool
    ) -> Group | GroupFate:
        """What becomes of the group now."""
        first = self.first
        if self.abandoned:
            return self.fate(cut, "dropped", "abandoned", "a member was handed back unfinished")
        if first is None or not self.whole(traces=traces):
            missing = self._missing(traces=traces)
            if first is None or not partial:
                return self.fate(cut, "dropped", "incomplete", missing)
        untraced = self._untraced() if traces else set()
        members = [i for i in sorted(self.rollouts) if i in self.rewards and i not in untraced]
        rewards = [self.rewards[i].reward for i in members]
        try:
            result = group_advantages(rewards, baseline)
        except Refused as refused:
            return self.fate(cut, "dropped", refused.reason, refused.detail)
        if first.group_size == 1:
            return self.fate(cut, "dropped", "group_of_one", "one rollout has nothing to be compared with")
        if len(members) < 2:
            return self.fate(cut, "dropped", "incomplete", self._missing(traces=traces))
        if result.no_signal is not None and not (keep_equal and result.no_signal == "equal_rewards"):
            fate: Literal["filtered", "dropped"] = (
                "filtered" if result.no_signal == "equal_rewards" else "dropped"
            )
            return self.fate(cut, fate, result.no_signal, f"{result.scored} of {len(members)} members scored")
        trained = [
            i for i, advantage in zip(members, result.advantages, strict=True) if advantage is not None
        ]
        try:
            check_sharing({i: self.rollouts[i] for i in trained})
        except Refused as refused:
            return self.fate(cut, "dropped", refused.reason, refused.detail)
        return Group(
            group_id=self.group_id,
            model=first.model,
            lineage=first.lineage,
            environment=first.environment,
            task_id=first.task_id,
            group_size=first.group_size,
            baseline=baseline,
            members=tuple(
                Member(
                    rollout=self.rollouts[i],
                    reward=reward,
                    advantage=advantage,
                    trace=self.traces[i].position if i in self.traces else None,
                )
                for i, reward, advantage in zip(members, rewards, result.advantages, strict=True)
            ),
            cut=cut,
        )

    def values_of(self, group: Group) -> list[bytes | None]:
        """What the rollouts of a group that was made of this one were decoded from."""
        return [self.values[member.rollout.index] for member in group.members]

    def fate(self, cut: Cut, fate: Literal["filtered", "dropped"], reason: str, detail: str) -> GroupFate:
        first = self.first
        # The reward of a member that was cut off may come or not: it is not waited for, so it does not count.
        cut_off = {i for i, rollout in self.rollouts.items() if rollout.finish_reason == "abort"}
        scored = [r.reward for i, r in self.rewards.items() if r.reward is not None and i not in cut_off]
        versions = [span.version for rollout in self.rollouts.values() for span in rollout.spans]
        return GroupFate(
            group_id=self.group_id,
            fate=fate,
            reason=reason,
            detail=detail,
            decided_by=self.decided_by,
            # A group of which no rollout came has no slot to give back that anybody could name.
            fleet=first.fleet if first is not None else "unknown",
            replica=first.replica if first is not None else "unknown",
            members=tuple(self.rollouts[i].rollout_id for i in sorted(self.rollouts)),
            reward_mean=_mean(scored),
            group_size=first.group_size if first is not None else 0,
            for_version=None,
            oldest_version=min(versions, default=None),
            cut=cut,
        )

    def _check_index(self, index: int, first: Rollout) -> None:
        if index >= first.group_size:
            raise Refused("id_invalid", f"index {index} in a group of {first.group_size}")

    def _untraced(self) -> set[int]:
        return {i for i, r in self.rollouts.items() if r.top_k_experts > 0 and i not in self.traces}

    def _missing(self, *, traces: bool) -> str:
        if self.first is None:
            return f"no rollout came; {len(self.held_rewards)} rewards and {len(self.held_traces)} traces did"
        size = self.first.group_size
        text = f"{len(self.rollouts)} of {size} rollouts, {len(self.rewards)} rewards"
        untraced = self._untraced() if traces else set()
        return f"{text}, without trace: {sorted(untraced)}" if untraced else text


def _mean(values: Sequence[float]) -> float | None:
    """None also where the sum is beyond a float: a table's mean is no reason to refuse a fate."""
    try:
        return math.fsum(values) / len(values) if values else None
    except OverflowError:
        return None


def group_of(event: Event) -> str:
    """The group an input event of `assemble` belongs to. Raises `Refused("wrong_schema")` for another event."""
    if isinstance(event, Rollout | Reward | RoutingTrace):
        return event.group_id
    raise Refused("wrong_schema", f"{type(event).__name__} is no input of assemble")
