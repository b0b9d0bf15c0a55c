"""The archive on the real broker and store: what retention took reads as before, and an archiver may be killed."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import pytest
from confluent_kafka import TopicPartition as WirePartition
from confluent_kafka.admin import AdminClient

from rollwire.ops.stack import StackInfo
from rollwire.streams.archive.heads import LocalSigner, new_signing_key, trusted_keys
from rollwire.streams.archive.log import ArchivedLog
from rollwire.streams.archive.run_archive import archive_round
from rollwire.streams.archive.stretches import Archive, listed
from rollwire.streams.archive.verify import verify
from rollwire.streams.seams.clock import SystemClock
from rollwire.streams.seams.log import Outgoing, Record, TopicPartition
from rollwire.streams.seams.log_kafka import KafkaLog
from rollwire.streams.seams.scan import scan
from rollwire.streams.seams.store_s3 import S3Store

pytestmark = pytest.mark.system

READ = ["rollouts", "rewards", "weight-versions", "fleet-status"]


def fill(log: KafkaLog, unique: str) -> None:
    """Transactions, one of them aborted, over several topics: control records and holes everywhere."""
    writer = log.transactional_writer(unique)
    for turn in range(30):
        writer.begin()
        writer.write(
            [
                Outgoing(
                    topic, b"%d" % (i % 7), b"%d.%d" % (turn, i) * 20, (("ce_id", b"%d" % i), ("none", None))
                )
                for topic in READ
                for i in range(20)
            ]
        )
        if turn == 10:
            writer.abort()
        else:
            writer.commit(f"{unique}.g", {})
    writer.close()


def by_place(records: Sequence[Record]) -> list[Record]:
    return sorted(records, key=lambda r: (r.topic, r.partition, r.offset))


def delete_beginnings(stack: StackInfo, prefix: str, upto: dict[TopicPartition, int]) -> None:
    """What retention does, now."""
    admin = AdminClient({"bootstrap.servers": stack.bootstrap, "broker.address.family": "v4"})
    wire = [WirePartition(prefix + p.topic, p.partition, offset) for p, offset in upto.items()]
    for future in admin.delete_records(wire).values():
        future.result(30)


def test_after_retention_took_everything_it_reads_as_before(
    log: KafkaLog, store: S3Store, stack: StackInfo, prefix: str
) -> None:
    fill(log, prefix + "w")
    every = by_place(list(scan(log, READ, hidden=True)))
    assert len(every) == 29 * 20 * len(READ)
    name = prefix.rstrip(".")
    signer = LocalSigner(new_signing_key())
    stop = threading.Event()
    one = archive_round(log, store, signer, name=name, clock=SystemClock(), stop=stop)
    assert one.copied.findings == ()
    assert one.copied.records == len(every)
    partitions = [TopicPartition(topic, p) for topic in READ for p in range(log.partitions(topic))]
    ends = log.written_offsets(partitions)
    # Of one topic all, the markers at its end too; of the others a part, compacted ones cannot be cut.
    cut = {
        p: end if p.topic == "rollouts" else end // 2 for p, end in ends.items() if p.topic != "fleet-status"
    }
    delete_beginnings(stack, prefix, cut)
    assert log.beginning_offsets(list(cut)) == cut
    with closing(ArchivedLog(log, store, name)) as across:
        assert across.beginning_offsets(partitions) == dict.fromkeys(partitions, 0)
        assert by_place(list(scan(across, READ))) == every
        log.writer().write([Outgoing("rollouts", b"k", b"later", ())])
        later = next(r for r in scan(across, ["rollouts"], hidden=True) if r.value == b"later")
        assert later.offset == ends[TopicPartition("rollouts", later.partition)]
    report = verify(
        log,
        store,
        name=name,
        trusted=trusted_keys(signer.public),
        archive=Archive(store, name),
        now_us=SystemClock().now_us(),
    ).report
    assert report.findings == ()
    assert report.checked["segments verified"] == report.checked["segments"] > 0
    again = archive_round(log, store, signer, name=name, clock=SystemClock(), stop=stop, known=one.sealed)
    assert again.copied.records == 1
    admin = AdminClient({"bootstrap.servers": stack.bootstrap, "broker.address.family": "v4"})
    for future in admin.delete_topics([prefix + "rewards"], operation_timeout=30).values():
        future.result(30)
    with closing(ArchivedLog(log, store, name)) as across:
        assert by_place(list(scan(across, ["rewards"]))) == [r for r in every if r.topic == "rewards"]


def test_killed_in_mid_copy_the_next_one_goes_on_and_copies_nothing_twice(
    log: KafkaLog,
    store: S3Store,
    stack: StackInfo,
    prefix: str,
    wait_for: Callable[[Callable[[], bool], float], None],
    tmp_path: Path,
) -> None:
    body = bytes(range(256)) * 1_000
    log.writer().write([Outgoing("rollouts", None, b"%d" % i + body, (), i % 4) for i in range(400)])
    every = by_place(list(scan(log, ["rollouts"], hidden=True)))
    name = prefix.rstrip(".")

    def stretches() -> int:
        return sum(len(those) for those in listed(store, name, "rollouts").values())

    command = [str(Path(sys.executable).with_name("rollwire"))]
    command += ["archive", "--once", "--dir", str(stack.dir), "--prefix", prefix]
    with (tmp_path / "archive.log").open("wb") as out:
        killed = subprocess.Popen(command, stdout=out, stderr=out)
        try:
            wait_for(lambda: stretches() >= 1 or killed.poll() is not None, 60)
        finally:
            killed.send_signal(signal.SIGKILL)
            killed.wait(10)
    assert stretches() >= 1
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for those in listed(store, name, "rollouts").values():
        assert [a.next for a in those[:-1]] == [b.first for b in those[1:]]
    partitions = [TopicPartition("rollouts", p) for p in range(4)]
    delete_beginnings(stack, prefix, log.written_offsets(partitions))
    with closing(ArchivedLog(log, store, name)) as across:
        assert by_place(list(scan(across, ["rollouts"]))) == every
