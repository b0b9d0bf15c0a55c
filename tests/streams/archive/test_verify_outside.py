"""What was never sealed and stands in the archive is named: readers would take it for history."""

from __future__ import annotations

import threading
from typing import NamedTuple

import pytest

from rollwire.schemas.records import OffsetRange
from rollwire.streams.archive.heads import Expired, LocalSigner, new_signing_key, trusted_keys
from rollwire.streams.archive.layout import archived_folder, stretch_key
from rollwire.streams.archive.leaves import encode_record
from rollwire.streams.archive.log import ArchivedLog
from rollwire.streams.archive.objects import StretchWriter, content_digest, records_of
from rollwire.streams.archive.policies import Policy
from rollwire.streams.archive.run_archive import archive_round
from rollwire.streams.archive.sealer import seal_epoch
from rollwire.streams.archive.stretches import Archive
from rollwire.streams.archive.verify import verify
from rollwire.streams.findings import Kind, Report
from rollwire.streams.seams.clock import ManualClock
from rollwire.streams.seams.log import Outgoing, Record, TopicPartition
from rollwire.streams.seams.log_memory import MemoryLog
from rollwire.streams.seams.store_memory import MemoryStore

SIGNER = LocalSigner(new_signing_key())
AT = TopicPartition("rollouts", 0)
FOR_EVER = {"rollouts": Policy(-1, False)}


class Past(NamedTuple):
    log: MemoryLog
    store: MemoryStore
    clock: ManualClock

    def check(self, *, after_us: int = 0, policies: dict[str, Policy] | None = None) -> Report:
        return verify(
            self.log,
            self.store,
            name="run",
            trusted=trusted_keys(SIGNER.public),
            now_us=self.clock.now_us() + after_us,
            archive=Archive(self.store, "run"),
            policies=policies or FOR_EVER,
            clock=self.clock,
        ).report

    def keys(self) -> list[str]:
        return [info.key for info in self.store.list(archived_folder("run"))]

    def put(self, records: list[Record], first: int, next: int, at: TopicPartition = AT) -> str:
        """An object as an archiver makes it."""
        writer = StretchWriter(at, first)
        for record in records:
            writer.add(record.offset, record.timestamp_ms, encode_record(record))
        data = writer.finish(next)
        key = stretch_key("run", at, first, next, content_digest(data))
        self.store.create(key, data)
        return key


@pytest.fixture
def past() -> Past:
    """Two rounds of 300 events and a control record behind them, a stretch each."""
    clock = ManualClock()
    log, store = MemoryLog({"rollouts": 2}, clock), MemoryStore(clock)
    for part in range(2):
        writer = log.transactional_writer("w")
        writer.begin()
        writer.write([Outgoing("rollouts", b"k", b"%d.%d" % (part, i), (), 0) for i in range(300)])
        writer.commit("g", {})
        archive_round(log, store, SIGNER, name="run", clock=clock, stop=threading.Event())
        clock.advance(1.0)
    made = Past(log, store, clock)
    assert len(made.keys()) == 2
    assert made.check().findings == ()
    return made


def forged(at: TopicPartition, *offsets: int) -> list[Record]:
    return [Record(at.topic, at.partition, offset, 1, b"k", b"forged", ()) for offset in offsets]


@pytest.mark.parametrize(("partition", "first"), [(0, 1_000_000), (0, 602), (1, 0), (7, 0)])
@pytest.mark.parametrize("empty", [False, True])
def test_t8_a_stretch_where_nothing_was_sealed_is_named(
    past: Past, partition: int, first: int, empty: bool
) -> None:
    at = TopicPartition("rollouts", partition)
    key = past.put([] if empty else forged(at, first, first + 1), first, first + 2, at)
    [one] = past.check().findings
    assert (one.kind, one.where) == (Kind.RECORDS_ADDED, key)
    assert one.position is not None
    assert (one.position.partition, one.position.offset) == (partition, first)


def test_t8_a_stretch_of_a_topic_that_was_never_sealed_is_named(past: Past) -> None:
    at = TopicPartition("rewards", 0)
    key = past.put(forged(at, 0), 0, 1, at)
    assert [(f.kind, f.where) for f in past.check().findings] == [(Kind.RECORDS_ADDED, key)]


def test_t8_a_record_behind_what_was_sealed_is_named(past: Past) -> None:
    """It stands where the log has a control record."""
    [_, last] = past.keys()
    records = list(records_of(past.store.get(last), last))
    past.store.delete(last)
    key = past.put([*records, *forged(AT, 601)], 301, 602)
    [one] = past.check().findings
    assert (one.kind, one.where) == (Kind.RECORDS_ADDED, key)
    assert one.position is not None
    assert one.position.offset == 601


def test_t8_a_stretch_that_hides_what_the_log_has_is_named(past: Past) -> None:
    """A log that ends before its archive does is read from the archive alone."""
    [_, last] = past.keys()
    records = list(records_of(past.store.get(last), last))
    past.store.delete(last)
    key = past.put(records, 301, 10_000)
    assert ArchivedLog(past.log, past.store, "run").end_offsets([AT]) == {AT: 10_000}
    assert [(f.kind, f.where) for f in past.check().findings] == [(Kind.RECORDS_ADDED, key)]


def test_what_is_sealed_and_copied_meanwhile_is_no_finding(past: Past) -> None:
    class Meanwhile(MemoryStore):
        """Another process archives once the heads are read."""

        def get(self, key: str, *, sha256: str | None = None) -> bytes:
            if "/tables/" in key and not self.done:
                self.done = True
                past.log.writer().write([Outgoing("rollouts", b"k", b"new", (), p) for p in (0, 1)])
                archive_round(past.log, self, SIGNER, name="run", clock=past.clock, stop=threading.Event())
            return super().get(key, sha256=sha256)

        done = False

    store = Meanwhile(past.clock)
    store._objects = past.store._objects
    report = past._replace(store=store).check()
    assert store.done
    assert report.findings == ()
    assert len(past.keys()) == 4


def test_a_damaged_stretch_is_named_and_not_the_one_before_it(past: Past) -> None:
    """The control record behind the first stretch's last record is no part of the damage."""
    [_, key] = past.keys()
    data = bytearray(past.store.get(key))
    data[20] ^= 1
    past.store.delete(key)
    past.store.create(key, bytes(data))
    found = [(f.kind, f.where) for f in past.check().findings]
    assert found[0] == (Kind.SEGMENT_CORRUPT, key)
    assert [kind for kind, _ in found].count(Kind.SEGMENT_CORRUPT) == 1


def test_a_partition_that_nothing_of_is_sealed_is_told(past: Past) -> None:
    past.log.writer().write([Outgoing("rollouts", b"k", b"new", (), 1) for _ in range(7)])
    report = past.check()
    assert report.findings == ()
    assert any(note.startswith("8 offsets behind the newest head") for note in report.notes)


def test_a_segment_whose_beginning_is_over_its_time_is_no_finding(past: Past) -> None:
    """Stretches end where they are full, be it in the middle of a segment; each is let go of at its time."""
    [first, _] = past.keys()
    records = list(records_of(past.store.get(first), first))
    past.store.delete(first)
    past.put(records[:100], 0, 100)
    past.put(records[100:], 100, 301)
    gone = Expired(topic="rollouts", partition=0, first=0, next=100, policy="archive_ms: 1 h", at_us=1)
    past.log.writer().write([Outgoing("rollouts", b"k", b"new", (), 0)])
    holds = [OffsetRange(topic="rollouts", partition=0, start=100, end=602)]
    assert seal_epoch(
        past.log, past.store, SIGNER, name="run", clock=past.clock, expired=[gone], archived=holds
    )
    past.store.delete(past.keys()[0])
    past.log.trim(AT, 602)
    late = past.check(after_us=3_600_000_000, policies={"rollouts": Policy(60_000, False)})
    assert late.findings == ()

    assert any(note.startswith("rollouts[0] 0 to ") and "archive_ms: 1 h" in note for note in late.notes)
    # Of what is left nothing may be missing.
    past.store.delete(past.keys()[0])
    past.put(records[101:], 101, 301)
    late = past.check(after_us=3_600_000_000, policies={"rollouts": Policy(60_000, False)})
    assert [(f.kind, f.position and f.position.offset) for f in late.findings] == [
        (Kind.RECORDS_MISSING, 100)
    ]


def test_t8_a_compacted_topic_that_is_gone_is_named() -> None:
    """Compaction takes records from between others; it takes no partition, and moves no beginning."""
    clock = ManualClock()
    log, store = MemoryLog({"rollouts": 2}, clock), MemoryStore(clock)
    log.writer().write([Outgoing("rollouts", b"k", b"%d" % i, (), 0) for i in range(300)])
    assert seal_epoch(log, store, SIGNER, name="run", clock=clock)
    compacted = {"rollouts": Policy(-1, True)}
    gone = Past(MemoryLog({"rewards": 1}, clock), store, clock)
    assert [f.kind for f in gone.check(policies=compacted).findings] == [Kind.PARTITION_MISSING]
    log.trim(AT, 256)
    assert [f.kind for f in Past(log, store, clock).check(policies=compacted).findings] == [
        Kind.RECORDS_MISSING
    ]
    # Its retention is a policy like any other's.
    old = Past(log, store, clock).check(after_us=3_600_000_000, policies={"rollouts": Policy(60_000, True)})
    assert old.findings == ()
