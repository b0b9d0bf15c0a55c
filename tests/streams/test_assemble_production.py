"""The instance of assemble that joins live traffic: alone, and beside the other one over the same rewards, through crashes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from pydantic import ValidationError

from rollwire.schemas import records as r
from rollwire.schemas.errors import LogUnavailable, TransactionUnknown
from rollwire.streams import synthetic
from rollwire.streams.assemble import Assembler
from rollwire.streams.assemble_config import LIVE, SAMPLED, AssembleConfig, JoinConfig, ProductionConfig
from rollwire.streams.emit import decode_record, outgoing, take
from rollwire.streams.run_assemble import drive
from rollwire.streams.runtime import RuntimeConfig, Session
from rollwire.streams.seams.clock import ManualClock
from rollwire.streams.seams.forwarding import ForwardingTransactions
from rollwire.streams.seams.log import Outgoing, Record, TopicPartition, TransactionalWriter
from rollwire.streams.seams.log_memory import MemoryLog
from rollwire.streams.seams.scan import scan

NOW_US = 1_767_225_600_000_000
SECOND_US = 1_000_000
G = synthetic.group_id(NOW_US, 1)
CONFIG = ProductionConfig(group_deadline_s=30, late_horizon_s=90, grace_s=1)


class Bench:
    """One partition's step, event by event."""

    def __init__(self, config: JoinConfig = CONFIG) -> None:
        self.step = Assembler(0, config)
        self.step.start(dict.fromkeys(self.step.inputs, 0), {})
        self.offsets = dict.fromkeys(self.step.inputs, 0)
        self.now_us = NOW_US
        self.outputs: list[Outgoing] = []

    def put(self, *events: r.Event) -> None:
        for event in events:
            self.put_raw(outgoing(event, source="test", time_us=self.now_us))

    def put_raw(self, record: Outgoing) -> None:
        partition = TopicPartition(record.topic, 0)
        offset = self.offsets[partition]
        self.offsets[partition] += 1
        made = Record(record.topic, 0, offset, self.now_us // 1_000, record.key, record.value, record.headers)
        self.outputs += self.step.feed([take(made)], self.now_us)

    def wait(self, seconds: float) -> None:
        self.now_us += round(seconds * SECOND_US)
        self.outputs += self.step.tick(self.now_us, self.step.inputs)

    def taken(self) -> list[r.Event]:
        outputs, self.outputs = self.outputs, []
        return [decode_record(Record(o.topic, 0, 0, 0, o.key, o.value, o.headers)) for o in outputs]


def the_group(events: list[r.Event]) -> r.Group:
    group, mark = events
    assert isinstance(group, r.Group)
    assert isinstance(mark, r.ProductionGroupClosed)
    assert (mark.group_id, mark.fate) == (group.group_id, "kept")
    return group


def the_fate(events: list[r.Event]) -> r.GroupFate:
    fate, mark = events
    assert isinstance(fate, r.GroupFate)
    assert isinstance(mark, r.ProductionGroupClosed)
    return fate


def test_an_answer_and_its_reward_are_a_group_without_an_advantage() -> None:
    bench = Bench()
    answer = synthetic.answer(G, at_us=NOW_US, outcome="tool_error")
    bench.put(answer)
    assert bench.taken() == []
    bench.put(synthetic.said(G, 0.25, at_us=NOW_US, signals=3))
    group = the_group(bench.taken())
    (member,) = group.members
    assert (member.reward, member.advantage, member.signals, member.trace) == (0.25, None, 3, None)
    assert (group.baseline, group.group_size, group.environment) == ("cohort", 1, "chat")
    assert type(member.rollout) is r.Rollout
    assert all(getattr(member.rollout, name) == getattr(answer, name) for name in r.Rollout.__struct_fields__)
    assert group.cut.inputs == tuple(
        r.Position(topic=t, partition=0, offset=1) for t in ("production-rollouts", "rewards")
    )


def test_the_value_of_the_answer_stands_in_the_group_as_it_came() -> None:
    bench = Bench()
    came = outgoing(synthetic.answer(G, at_us=NOW_US), source="test", time_us=NOW_US)
    bench.put_raw(came)
    bench.put(synthetic.said(G, None, at_us=NOW_US, signals=0))
    assert came.value is not None
    assert came.value[10:] in (bench.outputs[0].value or b"")


def test_c78_silence_is_a_member_of_the_cohort() -> None:
    """C78: a reward event without a reward closes the window; the answer goes on, to be counted."""
    bench = Bench()
    bench.put(synthetic.said(G, None, at_us=NOW_US, signals=0), synthetic.answer(G, at_us=NOW_US))
    (member,) = the_group(bench.taken()).members
    assert (member.reward, member.signals) == (None, 0)


def test_what_silence_is_worth_by_a_rule_is_no_signal() -> None:
    bench = Bench()
    bench.put(synthetic.answer(G, at_us=NOW_US), synthetic.said(G, -1.0, at_us=NOW_US, signals=0))
    (member,) = the_group(bench.taken()).members
    assert (member.reward, member.signals) == (-1.0, 0)


@pytest.mark.parametrize("unjudged", ["drop", "silent"])
def test_an_answer_whose_feedback_nobody_judged(unjudged: Any) -> None:
    bench = Bench(CONFIG.model_copy(update={"unjudged": unjudged}))
    bench.put(synthetic.answer(G, at_us=NOW_US))
    bench.wait(30.9)
    assert bench.taken() == []
    bench.wait(0.2)
    if unjudged == "silent":
        (member,) = the_group(bench.taken()).members
        assert (member.reward, member.signals) == (None, 0)
    else:
        fate = the_fate(bench.taken())
        assert (fate.fate, fate.reason, fate.decided_by) == ("dropped", "incomplete", "assemble-production")
        assert (fate.fleet, fate.members) == ("fleet", (f"{G}.0",))


def test_an_answer_that_was_cut_off_waits_for_its_feedback_too() -> None:
    bench = Bench()
    bench.put(msgspec.structs.replace(synthetic.answer(G, at_us=NOW_US), finish_reason="abort"))
    assert bench.taken() == []
    bench.put(synthetic.said(G, -1.0, at_us=NOW_US))
    assert the_group(bench.taken()).members[0].reward == -1.0


def test_feedback_on_no_answer_ends_at_the_deadline() -> None:
    bench = Bench()
    bench.put(synthetic.said(G, 1.0, at_us=NOW_US))
    bench.wait(31.1)
    fate = the_fate(bench.taken())
    assert (fate.reason, fate.members, fate.fleet) == ("incomplete", (), "unknown")


def test_a_second_reward_of_other_content_is_refused() -> None:
    bench = Bench()
    bench.put(synthetic.said(G, 1.0, at_us=NOW_US), synthetic.said(G, 1.0, at_us=NOW_US + 5))
    bench.put(synthetic.said(G, 0.0, at_us=NOW_US), synthetic.answer(G, at_us=NOW_US))
    letter = next(e for e in bench.taken() if isinstance(e, r.DeadLetter))
    assert (letter.reason, letter.refused_by) == ("conflicting_repeat", "assemble-production")


@pytest.mark.parametrize("live", [True, False])
@pytest.mark.parametrize("of_user", [True, False])
def test_a_bad_reward_is_refused_by_the_one_whose_it_says_it_is(live: bool, of_user: bool) -> None:
    """Also where somebody died of it, whose it is not: it is not refused there, since the other one may take it."""
    bench = Bench(CONFIG if live else AssembleConfig(group_deadline_s=30))
    good = synthetic.said(G, 1.0, at_us=NOW_US) if of_user else synthetic.reward(G, 0, 1.0, at_us=NOW_US)
    record = outgoing(good, source="test", time_us=NOW_US)
    bench.put_raw(record._replace(value=(record.value or b"") + b"junk"))
    letters = [e for e in bench.taken() if isinstance(e, r.DeadLetter)]
    assert [letter.reason for letter in letters] == (["trailing_bytes"] if of_user is live else [])


@pytest.mark.parametrize("live", [True, False])
def test_each_instance_passes_the_others_rewards_by(live: bool) -> None:
    """What does not decode is refused once: by the instance of what was sampled for training."""
    bench = Bench(CONFIG if live else AssembleConfig(group_deadline_s=30))
    theirs = synthetic.reward(G, 0, 1.0, at_us=NOW_US) if live else synthetic.said(G, 1.0, at_us=NOW_US)
    bench.put(theirs)
    assert bench.step.open_groups == 0
    bench.put_raw(Outgoing("rewards", b"k", b"poison", ()))
    letters = [e for e in bench.taken() if isinstance(e, r.DeadLetter)]
    assert [letter.reason for letter in letters] == ([] if live else ["not_framed"])
    assert bench.step.committable() == bench.step.read()
    bench.wait(60)
    assert bench.taken() == []


def test_poison_among_the_answers_is_refused_here() -> None:
    bench = Bench()
    bench.put_raw(Outgoing("production-rollouts", b"k", b"poison", ()))
    (letter,) = bench.taken()
    assert isinstance(letter, r.DeadLetter)
    assert (letter.reason, letter.refused_by) == ("not_framed", "assemble-production")


def test_its_ids_on_the_broker_are_its_own() -> None:
    ours, theirs = drive(CONFIG, "p.", 2), drive(AssembleConfig(), "p.", 2)
    assert (ours.transactional_id, ours.group) == ("p.assemble-production.2", "p.assemble-production")
    assert (theirs.transactional_id, theirs.group) == ("p.assemble.2", "p.assemble")


def test_its_marks_are_kept_for_longer_than_its_horizon() -> None:
    assert ProductionConfig().late_horizon_s > ProductionConfig().group_deadline_s
    with pytest.raises(ValidationError, match="production-groups-closed"):
        ProductionConfig(late_horizon_s=10 * 86_400)


TOPICS: dict[str, int] = dict.fromkeys(
    (*SAMPLED.joined, *LIVE.joined, SAMPLED.closed, LIVE.closed, "groups", "group-fates", "dead-letters"), 1
)
POINTS = ("begin", "write", "commit", "committed")
CONFIGS: tuple[JoinConfig, ...] = (
    AssembleConfig(group_deadline_s=10, late_horizon_s=40, grace_s=1, require_traces=False),
    ProductionConfig(group_deadline_s=30, late_horizon_s=90, grace_s=1),
)


class CrashingWriter(ForwardingTransactions):
    """Dies at one of its effects; "committed" = the commit held, its answer was lost."""

    def __init__(self, inner: TransactionalWriter, crashes: list[str]) -> None:
        super().__init__(inner)
        self._crashes = crashes

    def _maybe(self, point: str) -> None:
        if self._crashes and self._crashes[0] == point:
            self._crashes.pop(0)
            raise TransactionUnknown(f"crash at {point}")

    def begin(self) -> None:
        self._maybe("begin")
        self._inner.begin()

    def write(self, records: Sequence[Outgoing]) -> None:
        self._inner.write(records)
        self._maybe("write")

    def commit(self, group: str, offsets: Any, timeout_s: float = 30.0, *, also: Any = None) -> None:
        self._maybe("commit")
        self._inner.commit(group, offsets, timeout_s, also=also)
        self._maybe("committed")


class CrashingLog(MemoryLog):
    def __init__(self, clock: ManualClock) -> None:
        super().__init__(TOPICS, clock)
        self.crashes: list[str] = []

    def transactional_writer(self, transactional_id: str, timeout_s: float = 60.0) -> TransactionalWriter:
        return CrashingWriter(super().transactional_writer(transactional_id, timeout_s), self.crashes)


def events_of(records: Sequence[Record | Outgoing]) -> list[r.Event]:
    return [decode_record(Record(x.topic, 0, 0, 0, x.key, x.value, x.headers)) for x in records]


def outcomes(records: Sequence[Record | Outgoing]) -> dict[str, list[Any]]:
    """group -> what was said of it, without what depends on when it was said."""
    found: dict[str, list[Any]] = {}
    for event in events_of(records):
        if isinstance(event, r.Group):
            found.setdefault(event.group_id, []).append((event.baseline, event.members))
        elif isinstance(event, r.GroupFate):
            fate = (event.fate, event.reason, event.members, event.decided_by)
            found.setdefault(event.group_id, []).append(fate)
    return found


class SideBySide(RuleBasedStateMachine):
    """Both instances over one topic of rewards. Odd groups are live traffic, even ones pairs sampled for training."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.log = CrashingLog(self.clock)
        self.writer = self.log.writer()
        self.sessions: list[Session | None] = [None, None]
        self.groups: list[str] = []
        self.poison = 0

    def write(self, event: r.Event) -> None:
        record = outgoing(event, source="test", time_us=self.clock.now_us())
        self.writer.write([record._replace(partition=0)])

    @rule()
    def open_group(self) -> None:
        self.groups.append(synthetic.group_id(self.clock.now_us(), len(self.groups)))

    @rule(
        which=st.integers(0, 3),
        value=st.sampled_from([0.0, 1.0, None]),
        kinds=st.sets(st.sampled_from(["rollout", "reward"]), min_size=1),
        index=st.integers(0, 1),
        signals=st.integers(0, 2),
    )
    def event(self, which: int, value: float | None, kinds: set[str], index: int, signals: int) -> None:
        if which >= len(self.groups):
            return
        number = len(self.groups) - 1 - which
        group, at_us = self.groups[number], 1_767_225_600_000_000
        for kind in sorted(kinds):
            if number % 2:
                answer = kind == "rollout"
                self.write(
                    synthetic.answer(group, at_us=at_us)
                    if answer
                    else synthetic.said(group, value, at_us=at_us, signals=signals)
                )
            else:
                sampled = kind == "rollout"
                self.write(
                    synthetic.rollout(group, index, 2, at_us=at_us)
                    if sampled
                    else synthetic.reward(group, index, value, at_us=at_us)
                )

    @rule(topic=st.sampled_from(["rollouts", "rewards", "production-rollouts"]))
    def write_poison(self, topic: str) -> None:
        self.writer.write([Outgoing(topic, b"k", b"poison", (), 0)])
        self.poison += 1

    @rule(seconds=st.sampled_from([0.001, 0.5, 4.0, 12.0, 60.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule(which=st.integers(0, 1), records=st.integers(1, 5))
    def turn(self, which: int, records: int) -> None:
        config = RuntimeConfig(linger_ms=0, idle_s=0, end_check_s=0, offsets_only_s=0, max_records=records)
        session = self.sessions[which]
        try:
            if session is None:
                session = Session(self.log, drive(CONFIGS[which], "t.", 0), config, self.clock)
                self.sessions[which] = session
            session.turn()
        except (TransactionUnknown, LogUnavailable):
            self.kill(which)

    @rule(which=st.integers(0, 1))
    def kill(self, which: int) -> None:
        session, self.sessions[which] = self.sessions[which], None
        if session is not None:
            session.close()

    @rule(point=st.sampled_from(POINTS))
    def crash_soon(self, point: str) -> None:
        self.log.crashes.append(point)

    @invariant()
    def one_fate_a_group_and_one_letter_a_record(self) -> None:
        said = outcomes(list(scan(self.log, ["groups", "group-fates"])))
        assert all(len(what) == 1 for what in said.values()), said
        letters = Counter(
            (event.source.topic, event.source.offset)
            for event in events_of(list(scan(self.log, ["dead-letters"])))
            if isinstance(event, r.DeadLetter)
        )
        assert all(count == 1 for count in letters.values()), letters

    def teardown(self) -> None:
        self.log.crashes.clear()
        self.clock.advance(60)
        for _ in range(400):
            for which in (0, 1):
                self.turn(which, 5)
            if not any(self.left(which) for which in (0, 1)):
                break
        for which in (0, 1):
            assert not self.left(which)
        self.one_fate_a_group_and_one_letter_a_record()
        live = outcomes(list(scan(self.log, ["groups", "group-fates"])))
        assert live == outcomes([x for config in CONFIGS for x in self.undisturbed(config)])
        assert {
            group for group, what in live.items() if "assemble-production" in what[0] or "cohort" in what[0]
        } <= set(self.groups[1::2])
        reasons = Counter(
            event.reason
            for event in events_of(list(scan(self.log, ["dead-letters"])))
            if isinstance(event, r.DeadLetter)
        )
        assert reasons["not_framed"] == self.poison
        for which in (0, 1):
            self.kill(which)

    def left(self, which: int) -> bool:
        session = self.sessions[which]
        if session is None:
            return True
        step = session.step
        assert isinstance(step, Assembler)
        return step.open_groups > 0 or step.read() != self.log.end_offsets(step.inputs)

    def undisturbed(self, config: JoinConfig) -> list[Outgoing]:
        step = Assembler(0, config)
        step.start(dict.fromkeys(step.inputs, 0), {})
        said: list[Outgoing] = []
        for partition in reversed(step.inputs):
            said += step.feed([take(x) for x in scan(self.log, [partition.topic])], self.clock.now_us())
        said += step.tick(self.clock.now_us(), step.inputs)
        return said


TestSideBySide = SideBySide.TestCase
TestSideBySide.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
