"""The fold of one rollout's feedback: pure. What is decided follows from the records of the log alone, from their offsets and
their times on the broker; never from the order in which the two topics are read, how often, or by whom.

    opened      in the group's id                          end0 = opened + window     limit = opened + horizon
    end         of a rollout's window: end0, or its own time + grace where it came later; never after limit
    deadline    until when feedback waits for its rollout: end0, or its own time + grace; never after limit

Feedback is judged once its rollout is known, in the order of its offsets: an id that was taken before is a repeat, or in
conflict; at or after `end` it is late. A rollout closes when everything before `end` was read.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from rollwire.schemas.records import Component, Reward
from rollwire.schemas.rules import Given, Rules, score
from rollwire.streams.attribution.facts import Answered, Closed, Said, id_digest


class Refusal(NamedTuple):
    """Why a feedback record is not taken."""

    offset: int
    reason: str
    detail: str
    at_us: int  # when that was certain, by the broker's clock: the same whenever it is found out


class Closing(NamedTuple):
    """The end of a rollout's window."""

    reward: Reward
    mark: Closed


@dataclass(slots=True)
class Case:
    """What is known of one rollout. Exactly one of: waiting (no rollout yet), open, closed."""

    opened_us: int
    rules: Rules
    answered: Answered | None = None
    closed: Closed | None = None
    waiting: dict[int, Said] = field(default_factory=dict)  # by offset, while the rollout is not known
    taken: dict[str, Said] = field(default_factory=dict)  # by id, of an open one

    @property
    def limit_us(self) -> int:
        return self.opened_us + self.rules.horizon_us

    @property
    def due_us(self) -> int:
        """When something is to be done, once everything before then was read."""
        if self.closed is not None:
            return max(self.limit_us, self.closed.end_us)
        if self.answered is not None:
            return self.end_us(self.answered)
        # They stand in the order of their offsets, so of their times: a look at all, at each of many, would take its square.
        first = next(iter(self.waiting.values()), None)
        return self.opened_us if first is None else self.deadline_us(first)

    def end_us(self, answered: Answered) -> int:
        return self._at_most(answered.at_us)

    def deadline_us(self, said: Said) -> int:
        return self._at_most(said.at_us)

    def _at_most(self, at_us: int) -> int:
        rules = self.rules
        return min(max(self.opened_us + rules.window_us, at_us + rules.grace_us), self.limit_us)


def take_said(case: Case, said: Said) -> Refusal | None:
    """Takes a feedback record into a case: kept, dropped as a repeat (`kept` tells), or refused (given back)."""
    if case.closed is not None:
        return _judge_closed(case.closed, said)
    if case.answered is not None:
        return _judge(case, case.answered, said)
    if said.offset in case.waiting:
        return None
    # However many: a bound here would depend on whether the rollout was read already, and the reward on that.
    case.waiting[said.offset] = said
    return None


def kept(case: Case, said: Said) -> bool:
    """Whether this very record is part of the case: it is to be written to the table."""
    return said.offset in case.waiting or case.taken.get(said.feedback_id) is said


def take_answered(case: Case, answered: Answered) -> list[Refusal]:
    """Takes a rollout into a case, with what waited for it; the first record of a rollout counts."""
    if case.answered is not None or case.closed is not None:
        return []
    case.answered = answered
    refusals = [_judge(case, answered, case.waiting[offset]) for offset in sorted(case.waiting)]
    case.waiting.clear()
    return [refusal for refusal in refusals if refusal is not None]


def expire(case: Case, watermark_us: int) -> list[Refusal]:
    """Feedback whose rollout did not come in time, no longer waiting. Of a case without a rollout."""
    gone = [said for said in case.waiting.values() if case.deadline_us(said) <= watermark_us]
    for said in gone:
        del case.waiting[said.offset]
    return [_unknown(case, said) for said in sorted(gone)]


def close(case: Case, rollout_id: str, seen: int) -> Closing:
    """The reward of an open rollout; afterwards it is closed. `seen`: the next offset of its partition of `user-feedback`.

    Raises `ValueError` for a case that is not open."""
    answered = case.answered
    if answered is None or case.closed is not None:
        raise ValueError(f"{rollout_id} is not open")
    rules, end_us = case.rules, case.end_us(answered)
    found = score(
        rules,
        answered.outcome,
        [Given(s.happened_us, s.feedback_id, s.signal, s.value) for s in case.taken.values()],
    )
    reward = Reward(
        rollout_id=rollout_id,
        group_id=rollout_id.rpartition(".")[0],
        reward=found.reward,
        components=tuple(Component(name=name, value=value) for name, value in found.components),
        outcome=answered.outcome,
        source="user",
        verifier=rules.name,
        verifier_version=rules.verifier_version,
        evidence=found.evidence,
        scored_us=end_us,
    )
    case.closed = Closed(
        end_us,
        seen,
        answered.tenant,
        answered.outcome,
        answered.version,
        found.reward is not None,
        summed(case.taken.values()),
        tuple(sorted((id_digest(s.feedback_id), s.content) for s in case.taken.values())),
    )
    case.answered = None
    case.taken.clear()
    return Closing(reward, case.closed)


def summed(said: Iterable[Said]) -> tuple[tuple[str, int, float], ...]:
    """(signal, events, sum of values) by signal."""
    sums: dict[str, tuple[int, float]] = {}
    for one in sorted(said, key=lambda s: s.offset):
        count, total = sums.get(one.signal, (0, 0.0))
        sums[one.signal] = (count + 1, total + (one.value or 0.0))
    return tuple((signal, count, total) for signal, (count, total) in sorted(sums.items()))


def _judge(case: Case, answered: Answered, said: Said) -> Refusal | None:
    if answered.at_us >= case.deadline_us(said):
        return _unknown(case, said)  # as it was, had nobody read the rollout yet
    if said.tenant != answered.tenant:
        return _mismatch(said)
    before = case.taken.get(said.feedback_id)
    if before is not None:
        return None if before.content == said.content else _conflict(said)
    end_us = case.end_us(answered)
    if said.at_us >= end_us:
        return _late(said, end_us)
    if len(case.taken) >= case.rules.max_events:
        detail = f"the rollout has {case.rules.max_events} feedback events already"
        return Refusal(said.offset, "limit_exceeded", detail, said.at_us)
    case.taken[said.feedback_id] = said
    return None


def _judge_closed(closed: Closed, said: Said) -> Refusal | None:
    if said.offset < closed.seen:
        return None  # read again after a crash: what became of it was written before the mark
    if said.tenant != closed.tenant:
        return _mismatch(said)
    name = id_digest(said.feedback_id)
    for known, content in closed.ids:
        if known == name:
            return None if content == said.content else _conflict(said)
    return _late(said, closed.end_us)


def _mismatch(said: Said) -> Refusal:
    detail = f"tenant {said.tenant!r} on another tenant's rollout"
    return Refusal(said.offset, "tenant_mismatch", detail, said.at_us)


def _conflict(said: Said) -> Refusal:
    detail = f"feedback {said.feedback_id!r} of {said.tenant!r} came before with other content"
    return Refusal(said.offset, "conflicting_repeat", detail, said.at_us)


def _late(said: Said, end_us: int) -> Refusal:
    return Refusal(said.offset, "late", f"the rollout's window closed at {end_us} us", said.at_us)


def _unknown(case: Case, said: Said) -> Refusal:
    deadline_us = case.deadline_us(said)
    detail = f"no rollout of this id came until {deadline_us} us"
    return Refusal(said.offset, "unknown_rollout", detail, deadline_us)
