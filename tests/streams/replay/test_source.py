"""A history read in order: each partition at its own pace, or merged by the broker's time."""

from __future__ import annotations

import random

import pytest

from rollwire.schemas.errors import OffsetLost
from rollwire.streams.replay.source import Source, by_time
from rollwire.streams.seams.clock import ManualClock
from rollwire.streams.seams.log import Outgoing, Record, TopicPartition
from rollwire.streams.seams.log_memory import MemoryLog
from rollwire.streams.seams.places import partitions_of
from rollwire.streams.seams.scan import Lost

COUNTS = {"rollouts": 3, "rewards": 2}


def written(records: int, seed: int = 0) -> MemoryLog:
    """Records of some moments, several a moment, with holes between them."""
    rng, clock = random.Random(seed), ManualClock()
    log = MemoryLog(COUNTS, clock)
    writer = log.transactional_writer("test")
    for number in range(records):
        topic = rng.choice(list(COUNTS))
        writer.begin()
        writer.write([Outgoing(topic, b"k", str(number).encode(), (), rng.randrange(COUNTS[topic]))])
        if rng.random() < 0.2:
            writer.abort()
        else:
            writer.commit("test", {})
        clock.advance(rng.choice((0.0, 0.0, 0.001, 0.5)))
    return log


def place(record: Record) -> tuple[int, str, int, int]:
    return record.timestamp_ms, record.topic, record.partition, record.offset


def test_it_is_merged_by_time_topic_partition_and_offset() -> None:
    log = written(4_000)
    with Source(log, partitions_of(log, list(COUNTS))) as source:
        merged = list(source.merged())
    assert len(merged) > 3_000
    places = [place(timed.record) for timed in merged]
    assert places == sorted(places)
    assert [timed.at_us for timed in merged] == [ms * 1_000 for ms, *_ in places]


def test_a_partition_is_read_up_to_an_offset_and_on() -> None:
    log = written(2_500)
    at = TopicPartition("rollouts", 1)
    with Source(log, partitions_of(log, list(COUNTS))) as source:
        below = [record.offset for record in source.below(at, 300)]
        assert below
        assert max(below) < 300
        following = source.peek(at)
        assert following is not None
        assert following.offset >= 300
        assert source.take(at) == following
        rest = [timed.record.offset for timed in source.merged() if timed.record.topic == "rollouts"]
        assert min(rest) == 0  # of the other partitions
    with Source(log, [at]) as whole:
        assert [t.record.offset for t in whole.merged()][: len(below)] == below


def test_several_sources_are_merged_as_one() -> None:
    log = written(1_000)
    places = partitions_of(log, list(COUNTS))
    with Source(log, places) as all_, Source(log, places[:2]) as one, Source(log, places[2:]) as other:
        assert list(by_time(one.merged(), other.merged())) == list(all_.merged())


def test_what_is_lost_is_told_and_stepped_over() -> None:
    log = written(500)
    at = TopicPartition("rollouts", 0)
    with Source(log, [at], start={at: 0}) as source:
        first = source.peek(at)
        assert first is not None
    log.trim(at, 20)
    with pytest.raises(OffsetLost), Source(log, [at], start={at: 0}) as source:
        source.peek(at)
    told: list[Lost] = []
    with Source(log, [at], start={at: 0}, lost=told.append) as source:
        first = source.peek(at)
    assert first is not None
    assert first.offset >= 20
    assert told == [Lost(at, 0, 20)]
