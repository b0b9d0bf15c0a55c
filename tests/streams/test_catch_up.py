"""A join's new owner: it takes nothing new before it has again what earlier owners had read together."""

from __future__ import annotations

from collections.abc import Mapping

from rollwire.schemas import records as r
from rollwire.streams import synthetic
from rollwire.streams.assemble import Assembler
from rollwire.streams.assemble_config import AssembleConfig
from rollwire.streams.catch_up import CatchUp
from rollwire.streams.emit import decode_record, outgoing, take
from rollwire.streams.seams.log import Outgoing, Record, TopicPartition
from rollwire.streams.step import Taken

NOW_US = 1_767_225_600_000_000
A, B = TopicPartition("a", 0), TopicPartition("b", 0)
ROLLOUTS, REWARDS = TopicPartition("rollouts", 0), TopicPartition("rewards", 0)
GROUP = synthetic.group_id(NOW_US, 1)


def at(partition: TopicPartition, offset: int) -> Taken:
    return Taken(Record(partition.topic, partition.partition, offset, 0, None, None, ()), None)


def test_without_marks_everything_is_new_and_taken() -> None:
    catch_up = CatchUp({A: 3, B: 0}, {})
    records = [at(B, 0), at(A, 3)]
    assert not catch_up
    assert (list(catch_up.admit(records)), list(catch_up.paused())) == (records, [])


def test_new_records_wait_for_the_known_ones_of_every_input() -> None:
    catch_up = CatchUp({A: 0, B: 5}, {A: 2, B: 6})
    assert catch_up
    assert list(catch_up.admit([at(A, 0), at(A, 1), at(A, 2)])) == [at(A, 0), at(A, 1)]
    assert list(catch_up.paused()) == [A]
    assert catch_up.holds(A)
    assert not catch_up.holds(B)
    assert list(catch_up.admit([at(B, 5), at(B, 7)])) == [at(B, 5), at(A, 2), at(B, 7)]
    assert not catch_up
    assert list(catch_up.paused()) == []


def test_records_that_are_gone_from_between_are_not_waited_for() -> None:
    """Control records take offsets (C40): the last known record is the one below the mark."""
    catch_up = CatchUp({A: 0, B: 0}, {A: 4, B: 0})
    assert list(catch_up.admit([at(A, 0), at(A, 3)])) == [at(A, 0), at(A, 3)]
    assert not catch_up


class Life:
    """One owner of the partition: what it committed is what the next one starts with."""

    def __init__(self, committed: Mapping[TopicPartition, int], read: Mapping[TopicPartition, int]) -> None:
        self.step = Assembler(0, AssembleConfig(group_deadline_s=30, require_traces=False))
        self.step.start(committed, read)

    def feed(self, *records: Record) -> list[r.Event]:
        out: list[Outgoing] = self.step.feed([take(record) for record in records], NOW_US)
        return [decode_record(Record(o.topic, 0, 0, 0, o.key, o.value, o.headers)) for o in out]


def record(event: r.Event, offset: int) -> Record:
    made = outgoing(event, source="test", time_us=NOW_US)
    return Record(made.topic, 0, offset, NOW_US // 1_000, made.key, made.value, made.headers)


def test_a_group_whose_halves_were_read_by_two_owners_is_closed_by_the_third() -> None:
    rollouts = [record(synthetic.rollout(GROUP, i, 2, at_us=NOW_US, top_k=0), i) for i in range(2)]
    rewards = [record(synthetic.reward(GROUP, i, float(i), at_us=NOW_US), i) for i in range(2)]
    nothing = {ROLLOUTS: 0, REWARDS: 0}
    first = Life(nothing, {})
    assert first.feed(*rollouts) == []
    second = Life(first.step.committable(), first.step.read())
    assert second.step.committable() == nothing  # the group is open
    assert second.feed(*rewards) == []  # of `rewards` it had something new, of `rollouts` nothing yet
    assert second.step.paused() == [REWARDS]
    third = Life(second.step.committable(), second.step.read())
    said = third.feed(*rewards) + third.feed(*rollouts)
    assert [type(event) for event in said] == [r.Group, r.GroupClosed]


def test_a_deadline_does_not_strike_over_records_that_wait() -> None:
    rollout = record(synthetic.rollout(GROUP, 0, 2, at_us=NOW_US, top_k=0), 0)
    other = record(synthetic.rollout(GROUP, 1, 2, at_us=NOW_US, top_k=0), 1)
    known = record(synthetic.reward(GROUP, 0, 1.0, at_us=NOW_US), 0)
    new = record(synthetic.reward(GROUP, 1, 0.0, at_us=NOW_US), 1)
    life = Life({ROLLOUTS: 0, REWARDS: 0}, {ROLLOUTS: 2, REWARDS: 1})
    assert life.feed(rollout, known, new) == []  # `other` was read before and did not come again yet
    assert life.step.tick(NOW_US + 100_000_000, [ROLLOUTS, REWARDS]) == []
    assert [type(event) for event in life.feed(other)] == [r.Group, r.GroupClosed]
