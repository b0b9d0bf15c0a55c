"""What the archiver copies, and what it does not."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import closing

import pytest

from rollwire.schemas.errors import StoreUnavailable
from rollwire.streams.archive.archiver import Copied, Thinned, archive_sealed
from rollwire.streams.archive.chain import SEGMENT_RECORDS, Segment
from rollwire.streams.archive.expiry import Due, delete_due, find_due
from rollwire.streams.archive.heads import Expired, LocalSigner, new_signing_key
from rollwire.streams.archive.log import ArchivedLog
from rollwire.streams.archive.objects import STRETCH_BYTES
from rollwire.streams.archive.plan_copy import Todo, to_copy
from rollwire.streams.archive.sealed import sealed
from rollwire.streams.archive.sealer import seal_epoch
from rollwire.streams.archive.stretches import Archive, Stretch, listed
from rollwire.streams.findings import Kind
from rollwire.streams.seams.clock import ManualClock
from rollwire.streams.seams.log import Outgoing, Reader, Record, TopicPartition
from rollwire.streams.seams.log_memory import MemoryLog
from rollwire.streams.seams.scan import scan
from rollwire.streams.seams.store import ObjectInfo
from rollwire.streams.seams.store_memory import MemoryStore

NAME = "rollwire"
ONE = TopicPartition("weight-versions", 0)
TOPICS = {"rollouts": 2, "weight-versions": 1, "fleet-status": 1, "dead-letters": 1, "groups-closed": 1}
DAY_S = 86_400.0


class World:
    """A log, a store and a sealer."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.log = MemoryLog(TOPICS, self.clock)
        self.store = MemoryStore(self.clock)
        self.signer = LocalSigner(new_signing_key())

    def write(self, topic: str, count: int, body: bytes = b"") -> None:
        """In transactions of ten, a millisecond apart."""
        for start in range(0, count, 10):
            self.clock.advance(0.001)
            writer = self.log.transactional_writer("w")
            writer.begin()
            some = range(start, min(start + 10, count))
            writer.write(
                [Outgoing(topic, b"%d" % i, b"%d" % i + body, (("ce_id", b"%d" % i),)) for i in some]
            )
            writer.commit("g", {})
            writer.close()

    def seal(self, expired: Sequence[Expired] = ()) -> None:
        seal_epoch(self.log, self.store, self.signer, name=NAME, clock=self.clock, expired=expired)

    def due(self) -> Due:
        return find_due(self.store, NAME, sealed(self.store, NAME), self.clock.now_us())

    def archive(
        self, wait_s: float = 0.0, store: MemoryStore | None = None, thinned: Thinned | None = None
    ) -> Copied:
        return archive_sealed(
            self.log,
            store or self.store,
            name=NAME,
            sealed=sealed(self.store, NAME),
            clock=self.clock,
            stop=threading.Event(),
            wait_s=wait_s,
            thinned=thinned,
        )

    def across(self) -> closing[ArchivedLog]:
        return closing(ArchivedLog(self.log, self.store, NAME))

    def stretches(self, topic: str) -> list[Stretch]:
        return [s for those in listed(self.store, NAME, topic).values() for s in those]

    def trim_all(self) -> None:
        """What retention does in the end, behind the last control record as well."""
        for topic, count in TOPICS.items():
            for p in range(count):
                at = TopicPartition(topic, p)
                self.log.trim(at, self.log.end_offsets([at])[at])


@pytest.fixture
def world() -> World:
    return World()


def by_place(records: Sequence[Record]) -> list[Record]:
    return sorted(records, key=lambda r: (r.topic, r.partition, r.offset))


def test_after_retention_everything_is_as_before(world: World) -> None:
    read = ["rollouts", "weight-versions", "fleet-status", "dead-letters"]
    for topic in (*read, "groups-closed"):
        world.write(topic, 600)
    every = by_place(list(scan(world.log, read)))
    ends = world.log.end_offsets([ONE])
    world.seal()
    copied = world.archive()
    assert (copied.records, copied.findings, copied.notes) == (len(every), (), ())
    assert world.stretches("groups-closed") == []  # its archive_ms is 0
    world.trim_all()
    with world.across() as log:
        assert by_place(list(scan(log, read))) == every
        assert log.end_offsets([ONE]) == ends
    assert world.archive() == Copied()


def test_it_goes_on_where_it_was(world: World) -> None:
    for _ in range(3):
        world.write("weight-versions", 300)
        world.seal()
        assert world.archive().records == 300
    spans = [(s.first, s.next) for s in world.stretches("weight-versions")]
    assert len(spans) == 3
    assert [a[1] for a in spans[:-1]] == [b[0] for b in spans[1:]]  # they meet: control records belong to one
    assert spans[-1][1] == world.log.end_offsets([ONE])[ONE]


def test_what_is_not_sealed_is_not_copied_and_no_stretch_reaches_over_it(world: World) -> None:
    world.write("weight-versions", 20)
    world.seal()
    world.write("weight-versions", 20)
    world.archive()
    (stretch,) = world.stretches("weight-versions")
    every = list(scan(world.log, ["weight-versions"]))
    assert stretch.next == every[20].offset
    with world.across() as log:
        assert list(log.archive.records(ONE, 0, 10_000)) == every[:20]
        world.log.trim(ONE, every[20].offset - 1)
        assert list(scan(log, ["weight-versions"])) == every


def test_small_stretches_wait(world: World) -> None:
    world.write("weight-versions", 10)
    world.seal()
    assert world.archive(wait_s=60) == Copied(waiting_ms=world.clock.now_us() // 1_000)
    world.clock.advance(61)
    assert world.archive(wait_s=60).records == 10


def test_stretches_are_bounded_whatever_a_segment_weighs(world: World) -> None:
    """Segments of records that are large are cut, and small ones are gathered."""
    world.write("weight-versions", 60, bytes(range(256)) * 4_000)  # 60 MB in one segment
    world.write("weight-versions", 3 * SEGMENT_RECORDS)
    world.seal()
    every = list(scan(world.log, ["weight-versions"]))
    assert world.archive().records == len(every)
    stretches = world.stretches("weight-versions")
    assert 4 <= len(stretches) <= 6
    with world.across() as log:
        for stretch in stretches:
            plain = sum(p.frame.plain for p in log.archive.packed(ONE, stretch.first) if p.stretch == stretch)
            assert plain <= STRETCH_BYTES + 4 * len(every)
    world.trim_all()
    with world.across() as log:
        assert list(scan(log, ["weight-versions"])) == every


class FailingStore(MemoryStore):
    """The store of a world; the object after `good` is not written, the process is dead then."""

    def __init__(self, world: World, good: int) -> None:
        super().__init__(world.clock)
        self._of = world.store
        self.good = good

    def create(self, key: str, data: bytes) -> bool:
        if self.good == 0:
            raise StoreUnavailable("killed")
        self.good -= 1
        return self._of.create(key, data)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        return self._of.list(prefix)


@pytest.mark.parametrize("good", [0, 1, 2, 3])
def test_killed_in_mid_copy_it_resumes_and_copies_nothing_twice(world: World, good: int) -> None:
    world.write("weight-versions", 60, bytes(range(256)) * 4_000)
    world.write("rollouts", 900)
    world.seal()
    every = by_place(list(scan(world.log, ["rollouts", "weight-versions"])))
    with pytest.raises(StoreUnavailable):
        world.archive(store=FailingStore(world, good))
    assert sum(len(world.stretches(t)) for t in TOPICS) == good
    world.archive()
    for topic in ("rollouts", "weight-versions"):
        for those in listed(world.store, NAME, topic).values():
            assert [a.next for a in those[:-1]] == [b.first for b in those[1:]]  # none overlaps another
    world.trim_all()
    with world.across() as log:
        assert by_place(list(scan(log, ["rollouts", "weight-versions"]))) == every


def test_what_is_not_what_was_sealed_is_named_and_left_out(world: World) -> None:
    world.write("weight-versions", 4 * SEGMENT_RECORDS)
    world.seal()
    segments = sealed(world.store, NAME).segments[ONE]
    every = list(scan(world.log, ["weight-versions"]))
    entries = world.log._partitions[ONE].entries
    entries[every[300].offset] = every[300]._replace(value=b"forged")
    copied = world.archive()
    (found,) = copied.findings
    assert found.kind == Kind.RECORD_CHANGED
    assert found.position is not None
    assert found.position.offset == segments[1].first
    with world.across() as log:
        assert [r.offset for r in log.archive.records(ONE, 0, segments[1].first)] == [
            r.offset for r in every[:256]
        ]
        assert log.archive.covering(ONE, segments[1].first) is None
        assert list(log.archive.records(ONE, segments[2].first, 100_000)) == every[512:]
    assert world.archive() == copied._replace(stretches=0, records=0, stored_bytes=0)


def test_a_record_that_is_gone_is_named(world: World) -> None:
    world.write("weight-versions", SEGMENT_RECORDS)
    world.seal()
    world.log._partitions[ONE].entries[5] = None
    (found,) = world.archive().findings
    assert (found.kind, world.stretches("weight-versions")) == (Kind.RECORDS_MISSING, [])


def test_a_log_that_ends_before_what_was_sealed_keeps_no_other_topic_from_the_archive(world: World) -> None:
    """Cut, or made anew: nothing will ever come where the sealed records stood."""
    world.write("rollouts", 2 * SEGMENT_RECORDS)
    world.write("weight-versions", 2 * SEGMENT_RECORDS)
    world.seal()
    at = TopicPartition("rollouts", 0)
    entries = world.log._partitions[at].entries
    left = len(entries) // 2
    first_cut = next(s for s in sealed(world.store, NAME).segments[at] if s.next > left)
    del entries[left:]
    copied = world.archive()
    assert [(f.kind, f.position and f.position.offset) for f in copied.findings] == [
        (Kind.RECORDS_MISSING, first_cut.first)
    ]
    assert len(world.stretches("weight-versions")) == 1
    archived = {s.partition for s in world.stretches("rollouts")}
    assert archived >= {TopicPartition("rollouts", p) for p in range(1, TOPICS["rollouts"])}


def test_what_compaction_or_retention_took_before_is_a_note(world: World) -> None:
    world.write("fleet-status", 2 * SEGMENT_RECORDS)
    world.write("weight-versions", 2 * SEGMENT_RECORDS)
    world.seal()
    world.log._partitions[TopicPartition("fleet-status", 0)].entries[0] = None
    world.log.trim(ONE, 10)
    copied = world.archive()
    assert copied.findings == ()
    assert copied.records == 2 * SEGMENT_RECORDS
    assert len(copied.notes) == 2
    assert "compacted" in copied.notes[0]
    assert "gone from the log" in copied.notes[1]


def test_what_compaction_took_is_read_in_one_round_and_not_in_each(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sealer that ran for days before the archiver came leaves thousands of such segments."""
    place = TopicPartition("fleet-status", 0)
    world.write("fleet-status", 4 * SEGMENT_RECORDS)
    world.seal()
    for segment in sealed(world.store, NAME).segments[place][:3]:
        world.log._partitions[place].entries[segment.first] = None
    readers: list[Reader] = []
    reader = world.log.reader

    def counted() -> Reader:
        readers.append(reader())
        return readers[-1]

    monkeypatch.setattr(world.log, "reader", counted)
    thinned: Thinned = {}
    first = world.archive(thinned=thinned)
    assert (len(first.notes), first.records) == (3, SEGMENT_RECORDS)
    assert len(thinned[place]) == 3
    assert readers
    readers.clear()
    assert world.archive(thinned=thinned) == Copied()
    assert readers == []
    # What differs for no such reason is a finding of every round.
    world.write("weight-versions", SEGMENT_RECORDS)
    world.seal()
    world.log._partitions[ONE].entries[5] = None
    for _ in range(2):
        assert [f.kind for f in world.archive(thinned=thinned).findings] == [Kind.RECORDS_MISSING]


def test_stretches_of_a_topic_that_is_archived_for_a_time_hold_a_part_of_it(world: World) -> None:
    for _ in range(4):
        world.write("dead-letters", 10)
        world.seal()
        world.clock.advance(0.6 * DAY_S)
    world.archive()
    archive = Archive(world.store, NAME)
    letters = TopicPartition("dead-letters", 0)
    for stretch in archive.stretches(letters):
        times = [r.timestamp_ms for r in archive.records(letters, stretch.first, stretch.next)]
        assert max(times) - min(times) < DAY_S * 1_000
    assert len(archive.stretches(letters)) == 2
    world.write("dead-letters", 10)
    world.clock.advance(40 * DAY_S)
    world.seal()
    assert world.archive().records == 0  # over its time already


def test_what_is_over_its_time_is_named_by_a_head_and_deleted(world: World) -> None:
    letters = TopicPartition("dead-letters", 0)
    for _ in range(3):
        world.write("dead-letters", 10)
        world.write("rollouts", 10)
        world.seal()
        world.clock.advance(1.5 * DAY_S)
        world.archive()
    ends = [s.next for s in world.stretches("dead-letters")]
    assert len(ends) == 3
    assert world.due() == Due((), ())

    world.clock.advance(25.6 * DAY_S)  # the first ones are 30.1 days old
    first = world.due()
    assert [(e.topic, e.first, e.next, e.policy) for e in first.expired] == [
        ("dead-letters", 0, ends[0], "archive_ms of dead-letters: 30 d")
    ]
    # Named, and then the process died: it is deleted by the next one, and not named twice.
    world.seal(first.expired)
    again = world.due()
    assert (again.stretches, again.expired) == (first.stretches, ())
    assert delete_due(world.store, again) == 1
    assert world.due() == Due((), ())

    world.clock.advance(1.5 * DAY_S)
    second = world.due()
    assert [(e.first, e.next) for e in second.expired] == [(0, ends[1])]  # with what was named before
    world.seal(second.expired)
    delete_due(world.store, second)
    assert [s.next for s in world.stretches("dead-letters")] == ends[2:]
    assert len(world.stretches("rollouts")) > 3  # kept for ever
    with world.across() as log:
        world.log.trim(letters, ends[2])
        assert log.beginning_offsets([letters]) == {letters: ends[1]}
        assert len(list(scan(log, ["dead-letters"]))) == 10
    assert world.archive().records == 0  # and it does not come back


def segment(first: int, next: int) -> Segment:
    return Segment("rollouts", 0, first, next, 1, first, first, b"", b"", b"")


def test_what_is_to_be_copied() -> None:
    segments = [segment(i, i + 10) for i in range(0, 60, 10)]
    nothing = list(to_copy(segments, lambda at: at))
    assert nothing == [Todo(tuple(segments), 0)]
    middle = list(to_copy(segments, lambda at: 30 if 10 <= at < 30 else at))
    assert middle == [Todo((segments[0],), 0), Todo(tuple(segments[3:]), 30)]
    partly = list(to_copy(segments, lambda at: max(at, 24)))
    assert partly == [Todo(tuple(segments[2:]), 24)]
    without = list(to_copy(segments, lambda at: at, oldest_ms=20, without={40}))
    assert without == [Todo(tuple(segments[2:4]), 20), Todo((segments[5],), 50)]
    assert list(to_copy(segments, lambda at: 60)) == []
