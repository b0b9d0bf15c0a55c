"""Rounds of the archiver, and what heads say of what it holds."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import closing

import pytest

from rollwire.schemas.errors import KeyUnknown, LogUnavailable
from rollwire.schemas.records import OffsetRange
from rollwire.streams.archive.heads import LocalSigner, new_signing_key
from rollwire.streams.archive.held import held, joined, without
from rollwire.streams.archive.log import ArchivedLog
from rollwire.streams.archive.run_archive import ArchiveConfig, Round, archive_round, run_archive
from rollwire.streams.archive.stretches import Stretch, listed
from rollwire.streams.seams.clock import ManualClock
from rollwire.streams.seams.log import Outgoing, TopicPartition
from rollwire.streams.seams.log_memory import MemoryLog
from rollwire.streams.seams.scan import scan
from rollwire.streams.seams.store_memory import MemoryStore

NAME = "rollwire"
TOPICS = {"rollouts": 2, "dead-letters": 1}
LETTERS = TopicPartition("dead-letters", 0)
ONE = TopicPartition("rollouts", 0)
DAY_S = 86_400.0


class World:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.log = MemoryLog(TOPICS, self.clock)
        self.store = MemoryStore(self.clock)
        self.signer = LocalSigner(new_signing_key())

    def write(self, topic: str, count: int) -> None:
        self.log.writer().write(
            [Outgoing(topic, None, b"%d" % i, (), i % TOPICS[topic]) for i in range(count)]
        )

    def round(self, **more: object) -> Round:
        return archive_round(
            self.log,
            self.store,
            self.signer,
            name=NAME,
            clock=self.clock,
            stop=threading.Event(),
            **more,  # type: ignore[arg-type]
        )


class Watching:
    def __init__(self) -> None:
        self.told: Counter[str] = Counter()

    def sealed(self, records: int) -> None:
        self.told["sealed"] += records

    def planned(self, records: int) -> None:
        self.told["planned"] += records

    def copied(self, records: int) -> None:
        self.told["copied"] += records


@pytest.fixture
def world() -> World:
    return World()


def test_a_round_seals_copies_and_says_what_it_holds(world: World) -> None:
    world.write("rollouts", 600)
    one = world.round()
    assert one.copied.records == 600
    assert [h.epoch for h in one.heads] == [1, 2]  # what is new, and what is archived of it
    assert one.heads[0].archived == ()
    assert one.heads[1].archived == tuple(
        OffsetRange(topic="rollouts", partition=p, start=0, end=300) for p in range(2)
    )
    again = world.round(known=one.sealed)
    assert (again.heads, again.copied.stretches, again.deleted) == ((), 0, 0)
    assert again.sealed == one.sealed


def test_a_long_log_is_sealed_in_several_epochs(world: World) -> None:
    world.write("rollouts", 2_000)
    watch = Watching()
    one = world.round(watch=watch, max_records=400)
    assert watch.told == {"sealed": 2_000, "planned": 2_000, "copied": 2_000}
    assert len(one.heads) > 2
    assert one.sealed.head is not None
    assert sum(p.records for p in one.sealed.head.partitions) == one.copied.records == 2_000


def test_what_is_over_its_time_goes_and_heads_said_so_before(world: World) -> None:
    world.write("dead-letters", 10)
    world.round()
    world.clock.advance(29 * DAY_S)
    world.write("dead-letters", 10)
    assert world.round().deleted == 0
    world.clock.advance(2 * DAY_S)
    one = world.round()
    assert one.deleted == 1
    assert one.sealed.head is not None
    assert [(e.first, e.next) for h in one.heads for e in h.expired] == [(0, 10)]
    assert one.sealed.head.archived == (OffsetRange(topic="dead-letters", partition=0, start=10, end=20),)
    with closing(ArchivedLog(world.log, world.store, NAME)) as log:
        world.log.trim(LETTERS, 20)
        assert [r.offset for r in scan(log, ["dead-letters"])] == list(range(10, 20))


def test_a_head_does_not_make_good_that_an_object_is_missing(world: World) -> None:
    world.write("rollouts", 20)
    one = world.round()
    (stretch,) = listed(world.store, NAME, "rollouts")[ONE]
    world.store.delete(stretch.key)
    world.log.trim(ONE, 5)
    world.write("rollouts", 20)
    again = world.round()
    assert one.sealed.head is not None
    assert again.sealed.head is not None
    assert again.sealed.head.archived == (
        OffsetRange(topic="rollouts", partition=0, start=0, end=20),
        OffsetRange(topic="rollouts", partition=1, start=0, end=20),
    )


class Away(MemoryLog):
    """A broker that is away once."""

    down = True

    def end_offsets(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
        if self.down:
            self.down = False
            raise LogUnavailable("away")
        return super().end_offsets(partitions)


def test_the_loop_waits_for_a_broker_that_is_away_and_ends_when_told(world: World) -> None:
    world.log = Away(TOPICS, world.clock)
    world.write("rollouts", 20)
    stop = threading.Event()
    rounds: list[Round] = []

    def done(one: Round) -> None:
        rounds.append(one)
        stop.set()

    config = ArchiveConfig(every_s=0.01, wait_s=0.0)
    run_archive(
        world.log, world.store, world.signer, config, name=NAME, clock=world.clock, stop=stop, done=done
    )
    assert [one.copied.records for one in rounds] == [20]


def test_it_does_not_go_on_from_a_head_that_another_key_signed(world: World) -> None:
    world.write("rollouts", 20)
    world.round()
    world.signer = LocalSigner(new_signing_key())
    with pytest.raises(KeyUnknown):
        world.round()


def test_ranges() -> None:
    assert joined([(5, 7), (0, 2), (2, 3), (6, 9)]) == [(0, 3), (5, 9)]
    assert without([(0, 10)], [(2, 4), (9, 12)]) == [(0, 2), (4, 9)]
    assert without([(0, 4), (6, 8)], [(0, 7)]) == [(7, 8)]
    assert without([(0, 4)], []) == [(0, 4)]
    before = [OffsetRange(topic="rollouts", partition=0, start=0, end=8)]
    stretches = [Stretch(ONE, 8, 12, "k", 1), Stretch(LETTERS, 3, 5, "l", 1)]
    assert held(before, stretches, [Stretch(ONE, 0, 4, "m", 1)]) == (
        OffsetRange(topic="dead-letters", partition=0, start=3, end=5),
        OffsetRange(topic="rollouts", partition=0, start=4, end=12),
    )
