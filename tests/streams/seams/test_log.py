"""One behaviour of the log seam, for the twin in memory, for Apache Kafka, and for a log with an archive behind it."""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing

import pytest

from rollwire.schemas.errors import Fenced, LogError, OffsetLost, Refused, TopicMismatch, TransactionUnknown
from rollwire.schemas.partitioner import partition_for
from rollwire.streams.archive.log import ArchivedLog
from rollwire.streams.seams.limits import DEAD_LETTER_BYTES, limit_bytes, record_bytes
from rollwire.streams.seams.log import Log, Outgoing, Record, TopicPartition
from rollwire.streams.seams.log_kafka import KafkaLog
from rollwire.streams.seams.log_memory import MemoryLog
from rollwire.streams.seams.scan import scan
from rollwire.streams.seams.store_memory import MemoryStore

ONE = TopicPartition("weight-versions", 0)
Poll = Callable[[int, float], list[Record]]
IN = [TopicPartition("rollouts", p) for p in range(4)]


@pytest.fixture(params=["memory", "archived", pytest.param("kafka", marks=pytest.mark.system)])
def log(request: pytest.FixtureRequest) -> Iterator[Log]:
    memory = MemoryLog({"rollouts": 4, "rewards": 4, "weight-versions": 1, "dead-letters": 1})
    if request.param == "memory":
        yield memory
        return
    if request.param == "archived":
        with closing(ArchivedLog(memory, MemoryStore(), "rollwire")) as archived:
            yield archived
        return
    prefix = request.getfixturevalue("prefix")
    made = KafkaLog(request.getfixturevalue("stack").bootstrap, prefix)
    yield made
    made.close()


@pytest.fixture
def unique() -> str:
    """For groups and transactional ids, which have no prefix of their own."""
    return uuid.uuid4().hex


def note(value: bytes, topic: str = "weight-versions", key: bytes = b"k") -> Outgoing:
    return Outgoing(topic, key, value, (("ce_id", b"1"), ("empty", None)))


def read(log: Log, partition: TopicPartition, count: int) -> list[Record]:
    """All records of a partition, once `count` are there: the stable end trails an acknowledged commit (C40)."""
    deadline = time.monotonic() + 10
    while len(records := read_now(log, partition)) < count and time.monotonic() < deadline:
        continue
    return records


def read_now(log: Log, partition: TopicPartition) -> list[Record]:
    positions = {TopicPartition(partition.topic, p): 0 for p in range(log.partitions(partition.topic))}
    ends = log.end_offsets(list(positions))
    return list(scan(log, [partition.topic], start={**ends, partition: 0}))


def values(records: Sequence[Record]) -> list[bytes | None]:
    return [r.value for r in records]


def test_a_record_comes_back_as_it_was(log: Log) -> None:
    writer = log.writer()
    before_ms = time.time() * 1_000 - 5_000
    writer.write(
        [note(b"v"), Outgoing("weight-versions", b"", None, ()), Outgoing("weight-versions", None, b"")]
    )
    writer.close()
    first, second, third = read(log, ONE, 3)
    assert (first.topic, first.partition, first.offset) == ("weight-versions", 0, 0)
    assert (first.key, first.value) == (b"k", b"v")
    assert first.headers == (("ce_id", b"1"), ("empty", None))
    assert before_ms < first.timestamp_ms < time.time() * 1_000 + 5_000
    assert (second.key, second.value, second.headers) == (b"", None, ())
    assert (third.key, third.value) == (None, b"")


def test_keys_go_where_murmur2_says(log: Log) -> None:
    keys = [os.urandom(1 + i % 40) for i in range(64)]
    log.writer().write([Outgoing("rollouts", key, b"x") for key in keys])
    found = {r.key: r.partition for r in scan(log, ["rollouts"])}
    assert found == {key: partition_for(key, 4) for key in keys}


def test_an_explicit_partition_wins(log: Log) -> None:
    log.writer().write([Outgoing("rollouts", b"k", b"%d" % p, (), p) for p in range(4)])
    assert sorted((r.partition, r.value) for r in scan(log, ["rollouts"])) == [
        (p, b"%d" % p) for p in range(4)
    ]


def test_readers_see_a_transaction_whole_or_not_at_all(log: Log, unique: str) -> None:
    writer = log.transactional_writer(unique)
    writer.begin()
    writer.write([note(b"a"), note(b"x", "rollouts")])
    assert log.end_offsets([ONE, *IN]) == dict.fromkeys([ONE, *IN], 0)
    deadline = time.monotonic() + 10
    while log.written_offsets([ONE]) != {ONE: 1} and time.monotonic() < deadline:
        continue  # until the client has sent it
    assert log.written_offsets([ONE]) == {ONE: 1}
    writer.commit(f"{unique}.g", {IN[1]: 7}, also={f"{unique}.h": {IN[2]: 9}})
    assert values(read(log, ONE, 1)) == [b"a"]
    assert log.committed(f"{unique}.g", IN) == {IN[1]: 7}
    assert log.committed(f"{unique}.h", IN) == {IN[2]: 9}
    writer.close()


def test_c40_an_aborted_transaction_leaves_a_hole_and_nothing_else(log: Log, unique: str) -> None:
    writer = log.transactional_writer(unique)
    writer.begin()
    writer.write([note(b"a")])
    writer.commit(f"{unique}.g", {IN[0]: 1})
    writer.begin()
    writer.write([note(b"b"), note(b"c")])
    writer.abort()
    writer.begin()
    writer.write([note(b"d")])
    writer.commit(f"{unique}.g", {IN[0]: 2})
    writer.close()
    records = read(log, ONE, 2)
    assert values(records) == [b"a", b"d"]
    # The marker of the first transaction took offset 1 (C40); what was aborted took more, as far as it was sent.
    assert records[0].offset == 0
    assert records[1].offset >= 2
    assert log.end_offsets([ONE])[ONE] == records[1].offset + 2
    assert log.committed(f"{unique}.g", IN) == {IN[0]: 2}


def test_c40_positions_reach_the_end_behind_control_records(log: Log, unique: str) -> None:
    writer = log.transactional_writer(unique)
    writer.begin()
    writer.write([note(b"a")])
    writer.commit(f"{unique}.g", {})
    reader = log.reader()
    reader.assign({ONE: 0})
    deadline = time.monotonic() + 5
    while reader.positions() != log.end_offsets([ONE]):
        assert time.monotonic() < deadline
        reader.poll(10, 0.5)
    assert reader.positions() == {ONE: 2}
    reader.close()
    writer.close()


def test_c41_an_open_transaction_holds_readers_until_its_id_is_taken_over(log: Log, unique: str) -> None:
    dead = log.transactional_writer(unique)
    dead.begin()
    dead.write([note(b"never")])
    dead.close()
    log.writer().write([note(b"good")])
    log.transactional_writer(unique).close()
    assert values(read(log, ONE, 1)) == [b"good"]


def test_c38_the_older_owner_of_an_id_is_fenced(log: Log, unique: str) -> None:
    old = log.transactional_writer(unique)
    old.begin()
    old.write([note(b"old")])
    new = log.transactional_writer(unique)
    with pytest.raises(Fenced, match=unique):
        old.commit(f"{unique}.g", {IN[0]: 99})
    new.begin()
    new.write([note(b"new")])
    new.commit(f"{unique}.g", {IN[0]: 1})
    assert values(read(log, ONE, 1)) == [b"new"]
    assert log.committed(f"{unique}.g", IN) == {IN[0]: 1}
    old.close()
    new.close()


def test_c38_other_ids_do_not_fence(log: Log, unique: str) -> None:
    writers = [log.transactional_writer(f"{unique}.{i}") for i in range(2)]
    for i, writer in enumerate(writers):
        writer.begin()
        writer.write([note(b"%d" % i)])
    for writer in writers:
        writer.commit(f"{unique}.g", {})
        writer.close()
    assert sorted(values(read(log, ONE, 2)), key=repr) == [b"0", b"1"]


def test_a_closed_transactional_writer_is_unusable(log: Log, unique: str) -> None:
    writer = log.transactional_writer(unique)
    writer.close()
    with pytest.raises(TransactionUnknown, match="make a new one"):
        writer.begin()


def test_calls_out_of_order_are_refused(log: Log, unique: str) -> None:
    writer = log.transactional_writer(unique)
    with pytest.raises(LogError, match="begin"):
        writer.write([note(b"a")])
    with pytest.raises(LogError, match="begin"):
        writer.commit(f"{unique}.g", {})
    writer.begin()
    with pytest.raises(LogError, match="open transaction"):
        writer.begin()
    writer.abort()
    writer.close()


def test_seek_pause_and_resume(log: Log) -> None:
    log.writer().write([Outgoing("rollouts", None, b"%d" % i, (), p) for i in range(3) for p in range(2)])
    reader = log.reader()
    reader.assign({IN[0]: 1, IN[1]: 0})
    reader.pause([IN[1]])
    assert values(take(reader.poll, 2)) == [b"1", b"2"]
    assert reader.positions()[IN[1]] == 0
    reader.seek(IN[0], 0)
    assert values(take(reader.poll, 3)) == [b"0", b"1", b"2"]
    reader.resume([IN[1]])
    assert [(r.partition, r.value) for r in take(reader.poll, 3)] == [(1, b"0"), (1, b"1"), (1, b"2")]
    assert reader.positions() == {IN[0]: 3, IN[1]: 3}
    reader.close()


def take(poll: Poll, count: int) -> list[Record]:
    """Polls until `count` records came; more than that is an error of the reader."""
    records: list[Record] = []
    deadline = time.monotonic() + 10
    while len(records) < count:
        assert time.monotonic() < deadline
        records += poll(count - len(records), 0.5)
    return records


def test_a_poll_takes_no_more_than_it_was_asked_for(log: Log) -> None:
    log.writer().write([note(b"%d" % i) for i in range(10)])
    reader = log.reader()
    reader.assign({ONE: 0})
    polled = [reader.poll(3, 5.0) for _ in range(2)]
    assert all(1 <= len(p) <= 3 for p in polled)
    assert values([r for p in polled for r in p]) == [b"%d" % i for i in range(sum(map(len, polled)))]
    reader.close()


def test_a_poll_wakes_up_for_the_first_record(log: Log) -> None:
    reader = log.reader()
    reader.assign({ONE: 0})
    assert reader.poll(10, 0.1) == []
    late = threading.Thread(target=lambda: log.writer().write([note(b"v")]))
    late.start()
    began = time.monotonic()
    assert values(take(reader.poll, 1)) == [b"v"]
    assert time.monotonic() - began < 5
    late.join()
    reader.close()


def test_a_position_that_is_not_in_the_log_is_an_error(log: Log) -> None:
    log.writer().write([note(b"a")])
    reader = log.reader()
    reader.assign({ONE: 1_000})
    with pytest.raises(OffsetLost, match="weight-versions"):
        poll_for(reader.poll, 10.0)
    reader.close()


def poll_for(poll: Poll, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        poll(10, 0.5)


def test_a_negative_position_is_an_error(log: Log) -> None:
    reader = log.reader()
    with pytest.raises(LogError, match="not an offset"):
        reader.assign({ONE: -1})
    with pytest.raises(LogError, match="not assigned"):
        reader.seek(ONE, 0)
    reader.close()


def test_topics_that_are_not_there(log: Log) -> None:
    with pytest.raises(TopicMismatch, match="topics apply"):
        log.partitions("nothing")
    with pytest.raises(TopicMismatch):
        log.end_offsets([TopicPartition("nothing", 0)])
    assert log.partitions("rollouts") == 4


def test_offsets_of_a_group_that_never_committed(log: Log, unique: str) -> None:
    assert log.committed(unique, IN) == {}
    assert log.beginning_offsets(IN) == dict.fromkeys(IN, 0)
    assert log.end_offsets([]) == {}


def test_c42_records_of_every_size_up_to_the_limit(log: Log) -> None:
    """Just below the limit all arrive; just above it is refused at once, with its size (C42)."""
    writer = log.writer()
    limit = limit_bytes("weight-versions")
    empty = record_bytes(Outgoing("weight-versions", b"k", b"", (("h", b"x"),)))
    body = os.urandom(limit)
    for size in (limit - 200, limit - 1, limit):
        writer.write([Outgoing("weight-versions", b"k", body[: size - empty], (("h", b"x"),))], 30.0)
    began = time.monotonic()
    with pytest.raises(Refused, match="too_large"):
        writer.write([Outgoing("weight-versions", b"k", body[: limit + 1 - empty], (("h", b"x"),))])
    assert time.monotonic() - began < 1
    assert [len(r.value or b"") for r in read(log, ONE, 3)] == [
        limit - 200 - empty,
        limit - 1 - empty,
        limit - empty,
    ]
    writer.close()


def test_c42_a_dead_letter_holds_the_largest_record_whole(log: Log) -> None:
    assert limit_bytes("dead-letters") > limit_bytes("rollouts") + 1024 * 1024
    body = os.urandom(DEAD_LETTER_BYTES - 8 * 1024)
    log.writer().write([Outgoing("dead-letters", b"k", body)])
    assert values(read(log, TopicPartition("dead-letters", 0), 1)) == [body]


def test_writers_are_shared_by_threads(log: Log) -> None:
    writer = log.writer()

    def write_many(n: int) -> None:
        for i in range(20):
            writer.write([note(b"%d.%d" % (n, i))])

    threads = [threading.Thread(target=write_many, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    found = values(read(log, ONE, 80))
    assert len(found) == 80
    for n in range(4):  # each thread's own order is kept
        assert [v for v in found if v is not None and v.startswith(b"%d." % n)] == [
            b"%d.%d" % (n, i) for i in range(20)
        ]
