"""Verifying across log and archive: either may have what the other lost; what neither has, or one has changed, is named."""

from __future__ import annotations

import threading
from typing import NamedTuple

from rollwire.schemas.records import Position
from rollwire.streams.archive.heads import Expired, LocalSigner, new_signing_key, trusted_keys
from rollwire.streams.archive.layout import archived_folder, stretch_key
from rollwire.streams.archive.leaves import encode_record
from rollwire.streams.archive.objects import StretchWriter, content_digest, records_of
from rollwire.streams.archive.policies import Policy
from rollwire.streams.archive.run_archive import archive_round
from rollwire.streams.archive.sealer import seal_epoch
from rollwire.streams.archive.stretches import Archive
from rollwire.streams.archive.verify import verify
from rollwire.streams.findings import Kind, Report
from rollwire.streams.seams.clock import ManualClock
from rollwire.streams.seams.log import Outgoing, TopicPartition
from rollwire.streams.seams.log_memory import MemoryLog
from rollwire.streams.seams.store_memory import MemoryStore

SIGNER = LocalSigner(new_signing_key())
AT = TopicPartition("rollouts", 0)
HOUR_US = 3_600_000_000


class Past(NamedTuple):
    log: MemoryLog
    store: MemoryStore
    clock: ManualClock

    def check(
        self, *, log: MemoryLog | None = None, after_us: int = 0, policies: dict[str, Policy] | None = None
    ) -> Report:
        return verify(
            log or self.log,
            self.store,
            name="run",
            trusted=trusted_keys(SIGNER.public),
            now_us=self.clock.now_us() + after_us,
            archive=Archive(self.store, "run"),
            policies=policies or {"rollouts": Policy(-1, False)},
            clock=self.clock,
        ).report

    def keys(self) -> list[str]:
        return [info.key for info in self.store.list(archived_folder("run"))]


def archived(rounds: int = 3) -> Past:
    """300 events a round, each round a stretch."""
    clock = ManualClock()
    log, store = MemoryLog({"rollouts": 1}, clock), MemoryStore(clock)
    for part in range(rounds):
        log.writer().write([Outgoing("rollouts", b"k", b"%d.%d" % (part, i), (), 0) for i in range(300)])
        archive_round(log, store, SIGNER, name="run", clock=clock, stop=threading.Event())
        clock.advance(1.0)
    past = Past(log, store, clock)
    assert len(past.keys()) == rounds
    return past


def found(report: Report) -> list[tuple[Kind, int | None]]:
    return [(f.kind, f.position.offset if f.position else None) for f in report.findings]


def test_both_are_read_where_both_have_a_record() -> None:
    report = archived().check()
    assert report.findings == ()
    assert report.checked["records of the log"] == report.checked["records of the archive"] == 900


def test_what_the_log_lost_is_verified_from_the_archive() -> None:
    past = archived()
    past.log.trim(AT, 650)
    report = past.check()
    assert (report.findings, report.notes) == ((), ())
    assert report.checked["segments verified"] == report.checked["segments"]
    assert (
        past.check(log=MemoryLog({"rollouts": 1}, past.clock)).findings != ()
    )  # its end is not where it was
    gone = past.check(log=MemoryLog({"other": 1}, past.clock))
    assert gone.findings == ()
    assert gone.checked["segments verified"] == gone.checked["segments"]


def test_a_stretch_taken_out_is_named_though_the_log_has_its_records() -> None:
    past = archived()
    past.store.delete(past.keys()[1])
    assert found(past.check()) == [(Kind.SEGMENT_MISSING, 300)]
    # Retention of the log is no excuse for the archive.
    past.log.trim(AT, 900)
    late = past.check(after_us=HOUR_US, policies={"rollouts": Policy(60_000, False)})
    assert found(late)[0] == (Kind.SEGMENT_MISSING, 300)


def test_a_damaged_stretch_is_named_and_the_others_are_read() -> None:
    past = archived()
    key = past.keys()[1]
    data = bytearray(past.store.get(key))
    data[-5] ^= 1
    past.store.delete(key)
    past.store.create(key, bytes(data))
    report = past.check()
    assert found(report)[0] == (Kind.SEGMENT_CORRUPT, 300)
    assert report.findings[0].where == key
    assert report.checked["records of the archive"] == 600


def test_a_forged_stretch_is_named_by_its_record() -> None:
    past = archived()
    key = past.keys()[1]
    writer = StretchWriter(AT, 300)
    for record in records_of(past.store.get(key), key):
        forged = record._replace(value=b"forged") if record.offset == 420 else record
        writer.add(forged.offset, forged.timestamp_ms, encode_record(forged))
    data = writer.finish(600)
    past.store.delete(key)
    past.store.create(stretch_key("run", AT, 300, 600, content_digest(data)), data)
    report = past.check()
    assert found(report) == [(Kind.RECORD_CHANGED, 420)]
    assert report.findings[0].where.startswith("archive of rollouts[0]")


def test_a_change_in_the_log_is_told_by_the_archive_s_record() -> None:
    past = archived()
    entry = past.log._partitions[AT].entries[420]
    assert entry is not None
    past.log._partitions[AT].entries[420] = entry._replace(key=b"another", timestamp_ms=1)
    report = past.check()
    assert found(report) == [(Kind.RECORD_CHANGED, 420)]
    assert "timestamp and key" in report.findings[0].detail


def test_what_the_archive_let_go_of_by_policy_is_a_note() -> None:
    past = archived()
    writer = past.log.writer()
    writer.write([Outgoing("rollouts", None, b"after", (), 0)])
    gone = Expired(
        topic="rollouts", partition=0, first=0, next=300, policy="archive_ms of rollouts: 1 h", at_us=1
    )
    assert seal_epoch(past.log, past.store, SIGNER, name="run", clock=past.clock, expired=[gone])
    past.store.delete(past.keys()[0])
    past.log.trim(AT, 300)
    report = past.check()
    assert report.findings == ()
    assert report.notes == ("rollouts[0] 0 to 299: expired by policy archive_ms of rollouts: 1 h",)
    # And no further than it says.
    past.store.delete(past.keys()[0])
    past.log.trim(AT, 600)
    assert (Kind.SEGMENT_MISSING, 300) in found(past.check())
    assert past.check().findings[0].position == Position(topic="rollouts", partition=0, offset=300)
