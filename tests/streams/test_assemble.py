"""assemble's decisions, event by event: the state machine alone, no log."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from pydantic import ValidationError

from rollwire.schemas import records as r
from rollwire.streams import synthetic
from rollwire.streams.assemble import Assembler
from rollwire.streams.assemble_config import AssembleConfig
from rollwire.streams.emit import decode_record, outgoing, take
from rollwire.streams.seams.log import Outgoing, Record, TopicPartition

NOW_US = 1_767_225_600_000_000
SECOND_US = 1_000_000


class Bench:
    """One partition's step with hand-made records: `put` feeds one event at a time."""

    def __init__(self, config: AssembleConfig | None = None) -> None:
        self.step = Assembler(0, config or AssembleConfig(group_deadline_s=30, grace_s=1))
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
        """The outputs since the last call, decoded."""
        outputs, self.outputs = self.outputs, []
        return [decode_record(Record(o.topic, 0, 0, 0, o.key, o.value, o.headers)) for o in outputs]

    def whole(self, group: str, rewards: list[float | None]) -> None:
        for i, value in enumerate(rewards):
            self.put(synthetic.rollout(group, i, len(rewards), at_us=self.now_us))
            self.put(synthetic.reward(group, i, value, at_us=self.now_us))
            self.put(synthetic.trace(group, i, at_us=self.now_us))


@pytest.fixture
def bench() -> Bench:
    return Bench()


G = synthetic.group_id(NOW_US, 1)


def one(events: list[r.Event], kind: type[r.Event]) -> r.Event:
    found = [e for e in events if isinstance(e, kind)]
    assert len(found) == 1, events
    return found[0]


def fate_of(events: list[r.Event]) -> r.GroupFate:
    fate = one(events, r.GroupFate)
    assert isinstance(fate, r.GroupFate)
    return fate


def letter_of(events: list[r.Event]) -> r.DeadLetter:
    letter = one(events, r.DeadLetter)
    assert isinstance(letter, r.DeadLetter)
    return letter


def test_a_whole_group_is_emitted_once_with_its_cut(bench: Bench) -> None:
    bench.whole(G, [1.0, 0.0, 0.0, 0.0])
    events = bench.taken()
    group = one(events, r.Group)
    assert isinstance(group, r.Group)
    assert [m.rollout.index for m in group.members] == [0, 1, 2, 3]
    assert [m.advantage for m in group.members] == [0.75, -0.25, -0.25, -0.25]
    assert [m.trace for m in group.members] == [
        r.Position(topic="routing-traces", partition=0, offset=i) for i in range(4)
    ]
    assert group.cut == r.Cut(
        inputs=tuple(
            r.Position(topic=t, partition=0, offset=4) for t in ("rollouts", "rewards", "routing-traces")
        ),
        clock_us=NOW_US,
    )
    closed = one(events, r.GroupClosed)
    assert isinstance(closed, r.GroupClosed)
    assert (closed.group_id, closed.fate) == (G, "kept")
    assert len(events) == 2
    assert bench.step.committable() == dict.fromkeys(bench.step.inputs, 4)


def test_leave_one_out() -> None:
    bench = Bench(AssembleConfig(baseline="leave_one_out"))
    bench.whole(G, [1.0, 0.0])
    group = one(bench.taken(), r.Group)
    assert isinstance(group, r.Group)
    assert [m.advantage for m in group.members] == [1.0, -1.0]


def test_traces_are_not_waited_for_where_none_were_recorded(bench: Bench) -> None:
    for i in range(2):
        bench.put(
            synthetic.rollout(G, i, 2, at_us=NOW_US, top_k=0), synthetic.reward(G, i, float(i), at_us=NOW_US)
        )
    group = one(bench.taken(), r.Group)
    assert isinstance(group, r.Group)
    assert [m.trace for m in group.members] == [None, None]


def test_without_require_traces_the_topic_is_not_read() -> None:
    bench = Bench(AssembleConfig(require_traces=False))
    assert [p.topic for p in bench.step.inputs] == ["rollouts", "rewards"]
    for i in range(2):
        bench.put(synthetic.rollout(G, i, 2, at_us=NOW_US), synthetic.reward(G, i, float(i), at_us=NOW_US))
    one(bench.taken(), r.Group)


@pytest.mark.parametrize(
    ("rewards", "fate", "reason"),
    [
        ([0.1] * 7, "filtered", "equal_rewards"),
        ([0.5] * 4, "filtered", "equal_rewards"),
        ([None, None, 1.0], "dropped", "unscorable"),
        ([None, None], "dropped", "unscorable"),
        ([1.0], "dropped", "group_of_one"),
        ([None], "dropped", "group_of_one"),
    ],
)
def test_c07_c08_groups_without_signal(
    bench: Bench, rewards: list[float | None], fate: str, reason: str
) -> None:
    bench.whole(G, rewards)
    events = bench.taken()
    found = fate_of(events)
    assert (found.fate, found.reason, found.decided_by) == (fate, reason, "assemble")
    assert (found.fleet, found.replica, found.group_size) == ("fleet", "replica-0", len(rewards))
    assert not [e for e in events if isinstance(e, r.Group)]
    one(events, r.GroupClosed)


def test_groups_of_equal_rewards_are_kept_where_that_is_asked_for() -> None:
    bench = Bench(AssembleConfig(equal_rewards="keep"))
    bench.whole(G, [0.1] * 7)
    group = one(bench.taken(), r.Group)
    assert isinstance(group, r.Group)
    assert [member.advantage for member in group.members] == [0.0] * 7
    bench.whole(synthetic.group_id(NOW_US, 2), [None, None])
    assert fate_of(bench.taken()).reason == "unscorable"


def test_c09_a_member_without_a_score_stays_out_of_the_mean(bench: Bench) -> None:
    """C09: null is no zero."""
    bench.whole(G, [1.0, 0.0, None, 0.5])
    group = one(bench.taken(), r.Group)
    assert isinstance(group, r.Group)
    assert [m.advantage for m in group.members] == [0.5, -0.5, None, 0.0]


def test_c07_one_loser_among_equals_keeps_all_members(bench: Bench) -> None:
    """C07, second case."""
    bench.whole(G, [0.0, *[0.95] * 7])
    group = one(bench.taken(), r.Group)
    assert isinstance(group, r.Group)
    advantages = [m.advantage for m in group.members if m.advantage is not None]
    assert len(advantages) == 8
    assert sum(advantages) == pytest.approx(0, abs=1e-12)


def test_c10_a_group_that_never_fills_is_closed_at_its_deadline(bench: Bench) -> None:
    """C10: the fourth rollout arrives late, twice."""
    for i in range(3):
        bench.put(synthetic.rollout(G, i, 4, at_us=NOW_US), synthetic.reward(G, i, 1.0, at_us=NOW_US))
    assert bench.step.committable()[bench.step.inputs[0]] == 0
    bench.wait(30.5)
    assert bench.taken() == []
    bench.wait(1)
    events = bench.taken()
    fate = fate_of(events)
    assert (fate.fate, fate.reason) == ("dropped", "incomplete")
    assert fate.members == tuple(f"{G}.{i}" for i in range(3))
    assert "3 of 4 rollouts" in fate.detail
    assert bench.step.open_groups == 0
    for _ in range(2):
        bench.put(synthetic.rollout(G, 3, 4, at_us=NOW_US))
        assert letter_of(bench.taken()).reason == "late"
    assert bench.step.committable()[bench.step.inputs[0]] == 5


def test_a_partial_group_is_closed_with_what_it_has() -> None:
    bench = Bench(AssembleConfig(group_deadline_s=30, incomplete="close_partial"))
    for i in range(3):
        bench.put(synthetic.rollout(G, i, 4, at_us=NOW_US), synthetic.reward(G, i, float(i), at_us=NOW_US))
        bench.put(synthetic.trace(G, i, at_us=NOW_US))
    bench.put(synthetic.rollout(G, 3, 4, at_us=NOW_US))
    bench.wait(32)
    group = one(bench.taken(), r.Group)
    assert isinstance(group, r.Group)
    assert [(m.rollout.index, m.advantage) for m in group.members] == [(0, -1.0), (1, 0.0), (2, 1.0)]
    assert group.group_size == 4


def test_a_partial_group_of_one_member_is_incomplete() -> None:
    bench = Bench(AssembleConfig(group_deadline_s=30, incomplete="close_partial"))
    bench.put(synthetic.rollout(G, 0, 4, at_us=NOW_US, top_k=0), synthetic.reward(G, 0, 1.0, at_us=NOW_US))
    bench.wait(32)
    assert fate_of(bench.taken()).reason == "incomplete"


def test_a_deadline_waits_for_inputs_that_lag_behind(bench: Bench) -> None:
    """A worker that was away reads old records at a late hour: they were in time, and count."""
    bench.put(synthetic.rollout(G, 0, 2, at_us=NOW_US), synthetic.rollout(G, 1, 2, at_us=NOW_US))
    bench.outputs += bench.step.tick(NOW_US + 3_600 * SECOND_US, [bench.step.inputs[0]])
    assert bench.taken() == []
    for i in range(2):
        bench.put(synthetic.reward(G, i, float(i), at_us=NOW_US), synthetic.trace(G, i, at_us=NOW_US))
    one(bench.taken(), r.Group)


def test_rewards_without_any_rollout_end_too(bench: Bench) -> None:
    bench.put(synthetic.reward(G, 0, 1.0, at_us=NOW_US), synthetic.trace(G, 0, at_us=NOW_US))
    bench.wait(32)
    fate = fate_of(bench.taken())
    assert (fate.reason, fate.fleet, fate.group_size) == ("incomplete", "unknown", 0)


def test_a_member_that_was_handed_back_hands_back_the_group(bench: Bench) -> None:
    bench.put(synthetic.rollout(G, 0, 2, at_us=NOW_US), synthetic.reward(G, 0, 1.0, at_us=NOW_US))
    bench.put(synthetic.rollout(G, 1, 2, at_us=NOW_US, finish_reason="abort"))
    fate = fate_of(bench.taken())
    assert (fate.fate, fate.reason) == ("dropped", "abandoned")


def test_a_group_handed_back_in_part_ends_at_its_deadline(bench: Bench) -> None:
    bench.put(synthetic.rollout(G, 1, 2, at_us=NOW_US, finish_reason="abort"))
    bench.wait(32)
    assert fate_of(bench.taken()).reason == "abandoned"


def test_identical_repeats_change_nothing(bench: Bench) -> None:
    for _ in range(3):
        bench.put(synthetic.rollout(G, 0, 2, at_us=NOW_US), synthetic.reward(G, 0, 1.0, at_us=NOW_US))
        bench.put(synthetic.trace(G, 0, at_us=NOW_US))
    # A verifier that starts again scores at another time.
    bench.put(synthetic.reward(G, 0, 1.0, at_us=NOW_US + 5))
    assert bench.taken() == []


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (synthetic.rollout(G, 0, 2, at_us=NOW_US), synthetic.rollout(G, 0, 2, at_us=NOW_US, seed=1)),
        (synthetic.reward(G, 0, 1.0, at_us=NOW_US), synthetic.reward(G, 0, 0.0, at_us=NOW_US)),
        (synthetic.trace(G, 0, at_us=NOW_US), synthetic.trace(G, 0, at_us=NOW_US, shift=1)),
    ],
)
@pytest.mark.parametrize("rollout_first", [True, False])
def test_conflicting_repeats_are_refused(
    bench: Bench, first: r.Event, second: r.Event, rollout_first: bool
) -> None:
    opening = synthetic.rollout(G, 0, 2, at_us=NOW_US)
    if rollout_first:
        bench.put(opening)
    bench.put(first, second, opening)
    letter = letter_of(bench.taken())
    assert letter.reason == "conflicting_repeat"
    wanted = outgoing(second, source="test", time_us=NOW_US)
    assert (letter.value, letter.key, letter.source.topic) == (wanted.value, wanted.key, wanted.topic)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"group_size": 3}, "inconsistent"),
        ({"model": "other"}, "inconsistent"),
        ({"lineage": "0198a5c0-0000-7000-8000-000000000009"}, "inconsistent"),
        ({"task_id": "other"}, "inconsistent"),
    ],
)
def test_members_must_agree(bench: Bench, changed: dict[str, object], reason: str) -> None:
    bench.put(synthetic.rollout(G, 0, 2, at_us=NOW_US))
    bench.put(msgspec.structs.replace(synthetic.rollout(G, 1, 2, at_us=NOW_US), **changed))
    assert letter_of(bench.taken()).reason == reason


@pytest.mark.parametrize("rollout_first", [True, False])
def test_a_reward_for_a_member_that_cannot_be(bench: Bench, rollout_first: bool) -> None:
    events: list[r.Event] = [
        synthetic.rollout(G, 0, 2, at_us=NOW_US),
        synthetic.reward(G, 2, 1.0, at_us=NOW_US),
    ]
    bench.put(*(events if rollout_first else reversed(events)))
    assert letter_of(bench.taken()).reason == "id_invalid"


@pytest.mark.parametrize("rollout_first", [True, False])
@pytest.mark.parametrize(
    "trace", [synthetic.trace(G, 0, at_us=NOW_US, rows=99), synthetic.trace(G, 0, at_us=NOW_US, top_k=3)]
)
def test_a_trace_that_does_not_fit_its_rollout(
    bench: Bench, trace: r.RoutingTrace, rollout_first: bool
) -> None:
    events: list[r.Event] = [synthetic.rollout(G, 0, 2, at_us=NOW_US), trace]
    bench.put(*(events if rollout_first else reversed(events)))
    assert letter_of(bench.taken()).reason == "routing_invalid"


def test_events_long_after_their_group_was_opened_are_late(bench: Bench) -> None:
    bench.now_us += 2 * 3_600 * SECOND_US
    bench.put(synthetic.rollout(G, 0, 2, at_us=NOW_US))
    letter = letter_of(bench.taken())
    assert (letter.reason, letter.refused_by) == ("late", "assemble")
    assert bench.step.open_groups == bench.step.closed_groups == 0


def test_c06_a_group_of_which_nothing_came_in_time_gets_one_fate(bench: Bench) -> None:
    """C06: after an outage that was longer than the deadline the fleet's slots come back."""
    bench.now_us += 90 * SECOND_US
    bench.put(synthetic.rollout(G, 0, 2, at_us=NOW_US))
    assert letter_of(bench.taken()).reason == "late"
    assert bench.step.committable()[bench.step.inputs[0]] == 0  # a restart has to meet it again
    bench.wait(0.001)
    said = bench.taken()
    fate = fate_of(said)
    assert (fate.group_id, fate.fate, fate.reason, fate.members) == (G, "dropped", "incomplete", ())
    assert one(said, r.GroupClosed)
    bench.put(synthetic.rollout(G, 1, 2, at_us=NOW_US))
    assert letter_of(bench.taken()).reason == "late"
    bench.wait(60)
    assert bench.taken() == []
    assert bench.step.committable() == bench.step.read()


def test_a_restart_before_the_fate_of_a_late_group_writes_it_once(bench: Bench) -> None:
    bench.now_us += 90 * SECOND_US
    bench.put(synthetic.rollout(G, 0, 2, at_us=NOW_US))
    again = Bench()
    again.step.start(bench.step.committable(), bench.step.read())
    again.now_us = bench.now_us
    again.put(synthetic.rollout(G, 0, 2, at_us=NOW_US))
    assert again.taken() == []  # its dead letter was written
    again.wait(0.001)
    assert fate_of(again.taken()).reason == "incomplete"


def test_a_group_from_the_future_is_refused(bench: Bench) -> None:
    far = synthetic.group_id(NOW_US + 3_600 * SECOND_US, 1)
    bench.put(synthetic.rollout(far, 0, 2, at_us=NOW_US))
    assert letter_of(bench.taken()).reason == "time_invalid"


def test_a_producer_with_a_wrong_clock_does_not_close_the_groups_of_others(bench: Bench) -> None:
    bench.put(synthetic.rollout(G, 0, 2, at_us=NOW_US))
    for topic in bench.step.inputs:
        record = Record(topic.topic, 0, 10, (NOW_US + 86_400 * SECOND_US) // 1_000, None, b"poison", ())
        bench.outputs += bench.step.feed([take(record)], NOW_US)
    assert {e.reason for e in bench.taken() if isinstance(e, r.DeadLetter)} == {"not_framed"}
    assert bench.step.open_groups == 1


def test_closed_groups_are_forgotten_after_the_late_horizon() -> None:
    bench = Bench(AssembleConfig(group_deadline_s=30, late_horizon_s=60))
    for number in range(50):
        bench.whole(synthetic.group_id(bench.now_us, number), [1.0, 0.0])
        bench.wait(5)
    assert bench.step.open_groups == 0
    assert bench.step.closed_groups <= 14
    bench.wait(120)
    assert bench.step.closed_groups == 0
    assert bench.step.due_us() is None


@pytest.mark.parametrize("value", [None, b"", b"hello", b"\xc3\x01" + b"x" * 100])
@pytest.mark.parametrize("topic", ["rollouts", "rewards", "routing-traces"])
def test_c44_poison_is_kept_whole_and_stops_nothing(bench: Bench, topic: str, value: bytes | None) -> None:
    """C44."""
    headers = (("odd", None), ("ce_id", b"\xff"))
    bench.put_raw(Outgoing(topic, b"key", value, headers))
    letter = letter_of(bench.taken())
    assert (letter.key, letter.value) == (b"key", value)
    assert tuple((h.key, h.value) for h in letter.headers) == headers
    assert letter.source == r.Position(topic=topic, partition=0, offset=0)
    bench.whole(G, [1.0, 0.0])
    one(bench.taken(), r.Group)


NESTED = b"\x02" * 5_000 + b"\x00"
FINGERPRINT = slice(2, 10)  # in a value: between the marker and the body


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        # C56: a self-referencing type's payload, in either framing, and behind a schema of ours.
        (lambda value: b"\xc3\x01" + bytes(8) + NESTED, "unknown_schema"),
        (lambda value: b"\x00\x00\x00\x00\x07" + NESTED, "unknown_schema"),
        (lambda value: value[:10] + NESTED, "malformed"),
        # C59: trailing, truncated or wrong-schema bytes.
        (lambda value: value + b"JUNK", "trailing_bytes"),
        (lambda value: value[:10] + b"\x0a123", "malformed"),
        (lambda value: value[:10] + b"\x80", "malformed"),
        (lambda value: value[:-1], "malformed"),
    ],
)
def test_c56_c59_a_bad_value_in_the_middle_of_good_ones(
    bench: Bench, damage: Callable[[bytes], bytes], reason: str
) -> None:
    """C56, C59: it is a dead letter, whole; the good events before and behind it make their group."""
    rewards = [
        outgoing(synthetic.reward(G, i, float(i % 2), at_us=NOW_US), source="test", time_us=NOW_US)
        for i in range(9)
    ]
    poison = rewards[3]._replace(value=damage(rewards[3].value or b""))
    for record in (*rewards[:3], poison, *rewards[3:]):
        bench.put_raw(record)
    letter = letter_of(bench.taken())
    assert (letter.reason, letter.value, letter.source.offset) == (reason, poison.value, 3)
    for i in range(9):
        bench.put(synthetic.rollout(G, i, 9, at_us=NOW_US), synthetic.trace(G, i, at_us=NOW_US))
    group = one(bench.taken(), r.Group)
    assert isinstance(group, r.Group)
    assert [member.reward for member in group.members] == [float(i % 2) for i in range(9)]


def test_c59_an_event_written_under_another_topics_fingerprint_is_refused(bench: Bench) -> None:
    """C59: whatever the body would say under it."""
    reward = outgoing(synthetic.reward(G, 0, 1.0, at_us=NOW_US), source="test", time_us=NOW_US)
    rollout = outgoing(synthetic.rollout(G, 0, 2, at_us=NOW_US), source="test", time_us=NOW_US)
    value, other = reward.value or b"", rollout.value or b""
    bench.put_raw(reward._replace(value=value[:2] + other[FINGERPRINT] + value[10:]))
    assert letter_of(bench.taken()).reason == "wrong_schema"


def test_a_dead_letter_has_the_headers_that_stock_tools_know(bench: Bench) -> None:
    bench.put_raw(Outgoing("rewards", b"key", b"hello"))
    (letter,) = bench.outputs
    headers = dict(letter.headers)
    assert headers["__streams.errors.topic"] == b"rewards"
    assert headers["__streams.errors.partition"] == b"0"
    assert headers["__streams.errors.offset"] == b"0"
    assert headers["__streams.errors.exception"] == b"not_framed"


def test_an_event_of_another_topic_is_refused(bench: Bench) -> None:
    foreign = outgoing(synthetic.reward(G, 0, 1.0, at_us=NOW_US), source="test", time_us=NOW_US)
    bench.put_raw(foreign._replace(topic="rollouts"))
    assert letter_of(bench.taken()).reason == "wrong_schema"


def test_a_group_too_large_for_one_record_is_dropped_with_the_reason(bench: Bench) -> None:
    size = 12
    for i in range(size):
        bench.put(synthetic.rollout(G, i, size, at_us=NOW_US, sampled=120_000, top_k=0))
        bench.put(synthetic.reward(G, i, float(i), at_us=NOW_US))
    assert fate_of(bench.taken()).reason == "too_large"


def test_the_committed_offset_stays_at_the_oldest_open_group(bench: Bench) -> None:
    other = synthetic.group_id(NOW_US, 2)
    bench.put(synthetic.rollout(G, 0, 2, at_us=NOW_US))
    bench.whole(other, [1.0, 0.0])
    rollouts, rewards, traces = bench.step.inputs
    assert bench.step.committable() == {rollouts: 0, rewards: 2, traces: 2}
    assert bench.step.read() == {rollouts: 3, rewards: 2, traces: 2}
    bench.put(synthetic.reward(G, 0, 1.0, at_us=NOW_US))
    assert bench.step.committable() == {rollouts: 0, rewards: 2, traces: 2}


def test_a_horizon_shorter_than_the_deadline_is_a_wrong_setting() -> None:
    with pytest.raises(ValidationError, match="forgotten"):
        AssembleConfig(group_deadline_s=60, late_horizon_s=30)
    with pytest.raises(ValidationError, match="a restart would open closed groups again"):
        AssembleConfig(late_horizon_s=7_200)
    with pytest.raises(ValidationError, match="extra"):
        AssembleConfig.model_validate({"deadline": 1})
