"""The fold of feedback: whatever the order of arrival, the repeats, the splits and the crashes, the same rewards and letters.

The reference below is written from the rules' text alone, over the whole log at once, without any state.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollwire.schemas.errors import Refused
from rollwire.schemas.golden import example
from rollwire.schemas.ids import new_group_id
from rollwire.schemas.records import Component, Feedback, ProductionRollout, Reward
from rollwire.schemas.rules import Given, Rules, default_rules, score
from rollwire.streams.attribution.book import Book, Effects, Write
from rollwire.streams.attribution.facts import Said, content_digest
from rollwire.streams.attribution.fold import Case, Refusal, take_said
from rollwire.streams.attribution.rulebook import Rulebook, Since

S = 1_000_000
START = 1_767_225_600 * S
WINDOW, GRACE, HORIZON, MOST = 20, 5, 60, 3
RULES = msgspec.structs.replace(
    default_rules(), window_s=float(WINDOW), grace_s=float(GRACE), horizon_s=float(HORIZON), max_events=MOST
)
_T = TypeVar("_T")
BOOK = Rulebook((Since(0, RULES),))


ROLLOUT, THUMB = example(ProductionRollout, "sealed"), example(Feedback, "thumb")


class Row(NamedTuple):
    """A record of either topic."""

    event: ProductionRollout | Feedback
    offset: int
    at_us: int


class Log(NamedTuple):
    """Both topics of one partition, in the order of their offsets."""

    rollouts: tuple[Row, ...]
    feedback: tuple[Row, ...]


class Outcome(NamedTuple):
    rewards: dict[str, Reward]
    letters: dict[int, tuple[str, int]]  # offset in user-feedback -> (reason, when)


def group(number: int, opened_s: float) -> str:
    return new_group_id(START + round(opened_s * S), number)


def rollout(
    number: int, opened_s: float, at_s: float, *, tenant: str = "acme", outcome: str = "answered"
) -> Row:
    name = group(number, opened_s)
    event = msgspec.structs.replace(
        ROLLOUT, group_id=name, rollout_id=f"{name}.0", tenant=tenant, outcome=outcome
    )
    return Row(event, 0, START + round(at_s * S))


def said(
    number: int,
    opened_s: float,
    at_s: float,
    name: str = "f",
    value: float = 1.0,
    *,
    tenant: str = "acme",
    happened_s: float | None = None,
    signal: str = "thumb",
) -> Row:
    of = group(number, opened_s)
    happened_us = START + round((at_s if happened_s is None else happened_s) * S)
    event = msgspec.structs.replace(
        THUMB,
        group_id=of,
        rollout_id=f"{of}.0",
        feedback_id=name,
        tenant=tenant,
        value=value,
        signal=signal,
        happened_us=happened_us,
        received_us=START + round(at_s * S),
    )
    return Row(event, 0, START + round(at_s * S))


def log_of(rows: Sequence[Row], first: int = 100) -> Log:
    """The rows as two topics, by time; offsets with holes."""

    def topic(kind: type) -> tuple[Row, ...]:
        ordered = sorted((row for row in rows if isinstance(row.event, kind)), key=lambda row: row.at_us)
        return tuple(row._replace(offset=first + 2 * n) for n, row in enumerate(ordered))

    return Log(topic(ProductionRollout), topic(Feedback))


def reference(log: Log, rules: Rules = RULES) -> Outcome:
    """Rewards and letters by the text of `fold`, from the whole log at once."""
    rewards: dict[str, Reward] = {}
    letters: dict[int, tuple[str, int]] = {}
    names = {row.event.rollout_id: row.event.group_id for row in (*log.rollouts, *log.feedback)}
    for name, of in names.items():
        opened = int(of.replace("-", "")[:12], 16) * 1_000
        end0, limit = opened + rules.window_us, opened + rules.horizon_us
        first = next((r for r in log.rollouts if r.event.rollout_id == name and r.at_us < limit), None)
        end = None if first is None else min(max(end0, first.at_us + rules.grace_us), limit)
        taken: dict[str, Row] = {}
        for row in log.feedback:
            event = row.event
            assert isinstance(event, Feedback)
            if event.rollout_id != name:
                continue
            deadline = min(max(end0, row.at_us + rules.grace_us), limit)
            if row.at_us >= limit:
                letters[row.offset] = ("late", row.at_us)
            elif event.happened_us > row.at_us + 300 * S:
                letters[row.offset] = ("time_invalid", row.at_us)
            elif event.value not in (-1.0, 1.0):
                letters[row.offset] = ("value_out_of_range", row.at_us)
            elif first is None or end is None or first.at_us >= deadline:
                letters[row.offset] = ("unknown_rollout", deadline)
            elif event.tenant != first.event.tenant:
                letters[row.offset] = ("tenant_mismatch", row.at_us)
            elif event.feedback_id in taken:
                before = taken[event.feedback_id].event
                assert isinstance(before, Feedback)
                if content_digest(before) != content_digest(event):
                    letters[row.offset] = ("conflicting_repeat", row.at_us)
            elif row.at_us >= end:
                letters[row.offset] = ("late", row.at_us)
            elif len(taken) >= rules.max_events:
                letters[row.offset] = ("limit_exceeded", row.at_us)
            else:
                taken[event.feedback_id] = row
        if first is not None and end is not None:
            answered = first.event
            assert isinstance(answered, ProductionRollout)
            given_ = [
                Given(e.happened_us, e.feedback_id, e.signal, e.value)
                for e in (row.event for row in taken.values())
                if isinstance(e, Feedback)
            ]
            found = score(rules, answered.outcome, given_)
            rewards[name] = Reward(
                rollout_id=name,
                group_id=of,
                reward=found.reward,
                components=tuple(_component(c) for c in found.components),
                outcome=answered.outcome,
                source="user",
                verifier=rules.name,
                verifier_version=rules.verifier_version,
                evidence=found.evidence,
                scored_us=end,
            )
    return Outcome(rewards, letters)


def _component(pair: tuple[str, float]) -> Component:
    return Component(name=pair[0], value=pair[1])


class Worker:
    """A worker over an in-memory table: reads the two topics in any order, may die at any point.

    Durable are: the table (`stored`), rewards, letters and committed offsets. `flush` makes everything so that was done, in the
    two steps of the outbox; a death in between leaves the first.
    """

    def __init__(self, log: Log) -> None:
        self.log = log
        self.stored: dict[bytes, bytes] = {}
        self.rewards: list[Reward] = []
        self.letters: list[tuple[int, str, int]] = []
        self.committed = [0, 0]
        self.start()  # settled: what was read when the last commit succeeded

    def start(self) -> None:
        self.settled_us = 0
        self.book = Book(BOOK)
        restored = self.book.load([0], [(0, key, value) for key, value in self.stored.items()])
        self.next = list(self.committed)
        self.book.start(0, self._offset())
        self.now: list[Write] = []
        self.after: list[Write] = []
        self.given: list[Reward] = []
        self.refused: list[tuple[int, str, int]] = []
        self._take(restored)

    def _offset(self) -> int:
        rows = self.log.feedback
        return rows[self.next[1]].offset if self.next[1] < len(rows) else (rows[-1].offset + 1 if rows else 0)

    def read(self, topic: int) -> None:
        rows = (self.log.rollouts, self.log.feedback)[topic]
        if self.next[topic] >= len(rows):
            return
        row = rows[self.next[topic]]
        self.next[topic] += 1
        if isinstance(row.event, ProductionRollout):
            self._take(self.book.take_rollout(0, row.event, row.offset, row.at_us))
            return
        try:
            found = self.book.take_feedback(0, row.event, row.offset, row.at_us)
            if isinstance(found, Refusal):
                self.refused.append((found.offset, found.reason, found.at_us))
            else:
                self.now.extend(found)
        except Refused as refused:
            self.refused.append((row.offset, refused.reason, row.at_us))

    def watermark_us(self) -> int:
        """By the last records read; where a topic is read to its end, time goes on."""
        ends = []
        for topic, rows in enumerate((self.log.rollouts, self.log.feedback)):
            at = self.next[topic]
            ends.append(rows[at - 1].at_us if at and at < len(rows) else 0 if at < len(rows) else 2**62)
        return min(ends)

    def close(self, most: int = 1_000) -> None:
        self._take(self.book.advance(0, self.watermark_us(), self.settled_us, most))

    def _take(self, effects: Effects) -> None:
        self.now.extend(effects.writes)
        self.given.extend(effects.rewards)
        self.refused.extend((r.offset, r.reason, r.at_us) for _, r in effects.refusals)
        self.after.extend(effects.after)

    def flush(self, chance: random.Random | None = None, *, dies_before_commit: bool = False) -> None:
        """`chance`: it dies within. Each topic then has a part of its records, from the first on."""
        if chance is not None and chance.random() < 0.6:
            self._store(_some(chance, self.now))
            self.rewards.extend(_some(chance, self.given))
            self.letters.extend(_some(chance, self.refused))
            self.start()
            return
        self._store(self.now)
        self.rewards.extend(self.given)
        self.letters.extend(self.refused)
        if chance is not None:
            self._store(_some(chance, self.after))
            self.start()
            return
        self._store(self.after)
        if dies_before_commit:
            self.start()
            return
        self.now, self.given, self.refused, self.after = [], [], [], []
        self.committed = list(self.next)
        self.settled_us = self.watermark_us()

    def _store(self, writes: Sequence[Write]) -> None:
        for write in writes:
            if write.value is None:
                self.stored.pop(write.key, None)
            else:
                self.stored[write.key] = write.value

    def finish(self) -> Outcome:
        while self.next != [len(self.log.rollouts), len(self.log.feedback)]:
            self.read(0)
            self.read(1)
        self.flush()
        while self.book.rollouts:
            self.close()
            self.flush()
        rewards: dict[str, Reward] = {}
        for reward in self.rewards:
            assert rewards.setdefault(reward.rollout_id, reward) == reward, "given twice, with other content"
        letters: dict[int, tuple[str, int]] = {}
        for offset, reason, at_us in self.letters:
            assert letters.setdefault(offset, (reason, at_us)) == (reason, at_us), "refused twice, otherwise"
        assert not self.stored, "something stayed in the table for ever"
        return Outcome(rewards, letters)


def _some(chance: random.Random, done: Sequence[_T]) -> Sequence[_T]:
    return done[: chance.randrange(len(done) + 1)]


@st.composite
def logs(draw: st.DrawFn) -> Log:
    """Few rollouts and ids, so that everything meets everything; times around the ends of windows, grace and horizon."""
    times = st.one_of(
        st.floats(0, 70), st.sampled_from([0.0, WINDOW, WINDOW + GRACE, WINDOW - 0.001, HORIZON, HORIZON - 1])
    )
    rows: list[Row] = []
    for number in range(draw(st.integers(1, 3))):
        opened = draw(st.sampled_from([0.0, 3.0]))
        for _ in range(draw(st.integers(0, 2))):
            outcome = draw(st.sampled_from(["answered", "tool_error"]))
            rows.append(rollout(number, opened, opened + draw(times), outcome=outcome))
        for _ in range(draw(st.integers(0, 6))):
            rows.append(
                said(
                    number,
                    opened,
                    opened + draw(times),
                    draw(st.sampled_from("abcde")),
                    draw(st.sampled_from([1.0, 1.0, -1.0, 0.5])),
                    tenant=draw(st.sampled_from(["acme", "acme", "acme", "other"])),
                    happened_s=opened + draw(st.sampled_from([1.0, 1.0, 2.0, 1_000.0])),
                )
            )
    return log_of(rows)


@settings(max_examples=300, deadline=None)
@given(logs(), st.integers(0, 2**32))
def test_no_order_no_split_and_no_crash_changes_a_reward_or_a_letter(log: Log, seed: int) -> None:
    chance = random.Random(seed)
    worker = Worker(log)
    for _ in range(chance.randrange(120)):
        match chance.randrange(12):
            case 0:
                worker.start()  # killed: what was not flushed is gone
            case 1:
                worker.flush(chance)
            case 2:
                worker.flush(dies_before_commit=True)
            case 3 | 4:
                worker.flush()
            case 5 | 6:
                worker.close(chance.choice([1, 1_000]))
            case 7 | 8:
                worker.read(0)
            case _:
                worker.read(1)
    assert worker.finish() == reference(log)


@given(logs())
def test_read_at_once_or_record_by_record_it_is_the_same(log: Log) -> None:
    assert Worker(log).finish() == reference(log)


def outcome_of(*rows: Row) -> Outcome:
    log = log_of(rows)
    found = Worker(log).finish()
    assert found == reference(log)
    return found


def only(found: Outcome) -> Reward:
    (reward,) = found.rewards.values()
    return reward


@pytest.mark.parametrize("first", [1.0, 3.0])
def test_c68_feedback_and_rollout_meet_whichever_comes_first(first: float) -> None:
    found = outcome_of(rollout(1, 0, 2), said(1, 0, first))
    assert (only(found).reward, only(found).evidence, found.letters) == (1.0, ("f",), {})
    assert only(found).scored_us == START + WINDOW * S


def test_c68_feedback_for_nobody_is_a_dead_letter_after_the_window() -> None:
    found = outcome_of(said(1, 0, 1), rollout(2, 0, 1))
    assert list(found.letters.values()) == [("unknown_rollout", START + WINDOW * S)]


def test_c68_a_replay_finds_the_rollout_that_came_later() -> None:
    found = outcome_of(said(1, 0, 1), rollout(1, 0, WINDOW + 10), said(1, 0, WINDOW + 12, happened_s=1))
    assert only(found).reward == 1.0
    assert list(found.letters.values()) == [("unknown_rollout", START + WINDOW * S)]
    assert only(found).scored_us == START + (WINDOW + 10 + GRACE) * S


def test_c70_the_same_again_is_one_and_other_content_is_kept_for_audit() -> None:
    found = outcome_of(
        rollout(1, 0, 0),
        said(1, 0, 1, happened_s=0.5),
        said(1, 0, 2, happened_s=0.5),
        said(1, 0, 3, value=-1.0, happened_s=0.5),
        said(1, 0, WINDOW + 9, happened_s=0.5),  # long after its window: still a repeat, not late
    )
    assert only(found).evidence == ("f",)
    assert [reason for reason, _ in found.letters.values()] == ["conflicting_repeat"]


def test_c70_the_same_id_of_another_tenant_is_another_event() -> None:
    found = outcome_of(
        rollout(1, 0, 0), rollout(2, 0, 0, tenant="other"), said(1, 0, 1), said(2, 0, 1, tenant="other")
    )
    assert [r.evidence for r in found.rewards.values()] == [("f",), ("f",)]
    assert found.letters == {}


def test_c78_silence_is_a_reward_event_too() -> None:
    found = outcome_of(rollout(1, 0, 0), rollout(2, 0, 0, outcome="tool_error"))
    by_outcome = {r.outcome: (r.reward, r.evidence) for r in found.rewards.values()}
    assert by_outcome == {"answered": (None, ()), "tool_error": (-1.0, ())}


def test_another_tenants_rollout_cannot_be_judged() -> None:
    found = outcome_of(
        rollout(1, 0, 2), said(1, 0, 1, "x", tenant="other"), said(1, 0, 3, "y", tenant="other")
    )
    assert only(found).reward is None
    assert [reason for reason, _ in found.letters.values()] == ["tenant_mismatch"] * 2


def test_more_than_the_rules_allow_is_refused() -> None:
    found = outcome_of(rollout(1, 0, 0), *(said(1, 0, 1 + n, f"f{n}") for n in range(MOST + 2)))
    assert len(only(found).evidence) == MOST
    assert [reason for reason, _ in found.letters.values()] == ["limit_exceeded"] * 2


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("tenant", ["acme", "other"])
def test_a_flood_changes_no_reward_whether_the_rollout_or_the_flood_is_read_first(
    first: int, tenant: str
) -> None:
    flood = (said(1, 0, 1, "same", tenant=tenant) for _ in range(20 * MOST))
    log = log_of([rollout(1, 0, 0), *flood, said(1, 0, 2, "later", -1.0)])
    worker = Worker(log)
    for topic in (first, 1 - first):
        while worker.next[topic] < len(log.feedback if topic else log.rollouts):
            worker.read(topic)
    found = worker.finish()
    assert "later" in only(found).evidence
    assert {reason for reason, _ in found.letters.values()} <= {"tenant_mismatch"}


def test_a_flood_for_nobody_is_given_up_in_time_that_grows_with_its_size_alone() -> None:
    looks = 0

    class Counted(Said):
        @property
        def at_us(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
            nonlocal looks
            looks += 1
            return self[1]

    case = Case(0, RULES)
    for offset in range(1_000):
        assert take_said(case, Counted(offset, 1, f"f{offset}", "acme", "thumb", 1.0, 1, b"")) is None
        assert case.due_us == WINDOW * S
    assert looks <= 2_000


def test_a_lost_table_is_folded_again_from_the_topics() -> None:
    log = log_of(
        [
            rollout(1, 0, 0),
            said(1, 0, 1, "a"),
            said(1, 0, 2, "a", -1.0),
            rollout(2, 0, 30),
            said(2, 0, 31, "b"),
        ]
    )
    worker = Worker(log)
    for topic in (0, 0, 1, 1, 1):
        worker.read(topic)
    worker.close()
    worker.flush()
    assert worker.rewards
    worker.stored.clear()
    worker.committed = [0, 0]  # as set back by hand
    worker.start()
    assert worker.finish() == outcome_of(*log.rollouts, *log.feedback)


def test_the_live_tables_count_each_event_once_and_forget_what_is_over() -> None:
    log = log_of([rollout(1, 0, 0), said(1, 0, 1, "a"), said(1, 0, 2, "b", -1.0), rollout(2, 0, 0)])
    worker = Worker(log)
    for _ in range(4):
        worker.read(0)
        worker.read(1)
    worker.flush()
    for _ in range(2):
        assert worker.book.tally.counts() == [{"version": 4, "signal": "thumb", "events": 2, "mean": 0.0}]
        (row,) = worker.book.tally.coverage()
        assert (row["rollouts"], row["signalled"], row["coverage"]) == (2, 1, 0.5)
        worker.start()  # from the table, the same
    worker.finish()
    assert worker.book.tally.counts() == worker.book.tally.coverage() == []
