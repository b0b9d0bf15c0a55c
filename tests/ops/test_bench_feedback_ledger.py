"""What the load benchmark counts in the topic, and what it writes there as a baseline."""

from __future__ import annotations

import time
from array import array

from rollwire.ops.bench.feedback.bare import records
from rollwire.ops.bench.feedback.bodies import SIGNALS, Bodies
from rollwire.ops.bench.feedback.effects import EffectsOf
from rollwire.ops.bench.feedback.ledger import Acknowledged, Counts, count_topic
from rollwire.ops.bench.feedback.traffic import EVENTS, TENANT, traffic
from rollwire.ops.bench.streams_load import record_of
from rollwire.schemas.codec import decode
from rollwire.schemas.records import Feedback, ProductionRollout
from rollwire.streams.seams.log_memory import MemoryLog

AT_US = 1_790_000_000_000_000


def test_what_was_acknowledged_and_is_not_there_is_lost() -> None:
    # Asks of two events: 0-1, 2-3, 4-5 acknowledged; 6-7 was sent and never answered.
    counts = Counts([Acknowledged("a", array("q", [0, 4, 2]), 2, 8), Acknowledged("b", array("q"), 1, 1)])
    for one in ("a-0", "a-1", "a-1", "a-2", "a-5", "a-7", "b-0", "a-8", "c-0", "nonsense"):
        counts.take(one)
    assert counts.ledger() == (
        10,
        6,
        2,
        3,
        1,
        {"a": 5, "b": 1},
    )  # a-3 and a-4 are lost; a-8, c-0 and "nonsense" nobody sent


def test_the_ledger_is_read_from_the_topic() -> None:
    log = MemoryLog({"user-feedback": 4})
    bodies = Bodies("a", AT_US)
    events = records(bodies, 0, 40, AT_US, TENANT, "")
    log.writer().write([record_of(event, AT_US) for event in (*events, *events[:3])])
    found = count_topic(log, [Acknowledged("a", range(0, 50, 10), 10, 50)])
    assert found == (43, 40, 10, 0, 3, {"a": 40})


def test_behind_the_stream_every_event_counts_once() -> None:
    log = MemoryLog({"user-feedback": 4})
    now_us = time.time_ns() // 1_000  # the log's clock is the system's
    bodies = Bodies("a", now_us)
    events = records(bodies, 0, 40, now_us, TENANT, "")
    log.writer().write([record_of(event, now_us) for event in (*events, *events[10:13])])
    stream = EffectsOf([(bodies, 48)], 4)
    count_topic(log, [Acknowledged("a", range(40), 1, 48)], stream.take)
    assert stream.effects() == (40, 0, 0)


def test_a_baseline_record_says_what_the_line_said() -> None:
    bodies = Bodies("a", AT_US)
    for event, line in zip(
        records(bodies, 0, 9, AT_US, TENANT, "k"), bodies.lines(0, 9).split(b"\n"), strict=True
    ):
        for said in (event.feedback_id, event.rollout_id, event.signal):
            assert f'"{said}"'.encode() in line


def test_traffic_is_an_answer_and_feedback_on_it_that_every_reader_takes() -> None:
    for number, batch in enumerate(traffic(Bodies("a", AT_US), 5, 3), start=5):
        assert len(batch) == EVENTS == 1 + SIGNALS
        events = [decode(one.topic, one.value, one.headers, one.key) for one in batch]
        answer, *feedback = events
        assert isinstance(answer, ProductionRollout)
        assert answer.rollout_id == Bodies("a", AT_US).rollout(number)
        for one in feedback:
            assert isinstance(one, Feedback)
            assert (one.rollout_id, one.tenant) == (answer.rollout_id, answer.tenant)
