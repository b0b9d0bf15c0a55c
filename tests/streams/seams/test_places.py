"""What a log is asked for before it is read, and ranges of it."""

from __future__ import annotations

import pytest

from rollwire.schemas.errors import TopicMismatch
from rollwire.streams.seams.log import Outgoing, TopicPartition
from rollwire.streams.seams.log_memory import MemoryLog
from rollwire.streams.seams.places import existing, existing_partitions, exists, partitions_of, size_of
from rollwire.streams.seams.scan import Range, read_ranges

ONE, TWO = TopicPartition("rollouts", 0), TopicPartition("rollouts", 1)


@pytest.fixture
def log() -> MemoryLog:
    """Ten records in each of two partitions; the first four of one are gone."""
    log = MemoryLog({"rollouts": 2, "rewards": 1})
    log.writer().write([Outgoing("rollouts", None, b"%d" % i, (), i % 2) for i in range(20)])
    log.trim(TWO, 4)
    return log


def test_a_topic_that_is_not_there_is_passed_over_where_that_is_asked_for(log: MemoryLog) -> None:
    assert exists(log, "rollouts")
    assert not exists(log, "groups")
    assert existing(log, ("rollouts", "groups", "rewards")) == ["rollouts", "rewards"]
    assert existing_partitions(log, ("groups", "rollouts")) == partitions_of(log, ["rollouts"]) == [ONE, TWO]
    with pytest.raises(TopicMismatch):
        partitions_of(log, ("rollouts", "groups"))


def test_a_size_counts_what_is_left(log: MemoryLog) -> None:
    assert size_of(log, ("rollouts", "groups")) == 16
    assert size_of(log, ("groups",)) == 0


def test_ranges_are_read_to_their_own_ends_and_no_further(log: MemoryLog) -> None:
    ranges = {ONE: Range(2, 5), TWO: Range(4, 10)}
    read = [(r.partition, r.offset) for batch in read_ranges(log, ranges) for r in batch]
    assert sorted(read) == [*((0, at) for at in range(2, 5)), *((1, at) for at in range(4, 10))]
    assert list(read_ranges(log, {ONE: Range(3, 3)})) == []
