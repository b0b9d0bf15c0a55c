"""Reading across archive and log as one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import closing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollwire.schemas.errors import OffsetLost, TopicMismatch
from rollwire.streams.archive.layout import stretch_key
from rollwire.streams.archive.leaves import encode_record
from rollwire.streams.archive.log import ArchivedLog
from rollwire.streams.archive.objects import StretchWriter, content_digest
from rollwire.streams.seams.log import Log, Outgoing, Record, TopicPartition
from rollwire.streams.seams.log_memory import MemoryLog
from rollwire.streams.seams.scan import Lost, scan
from rollwire.streams.seams.store_memory import MemoryStore

NAME = "rollwire"
ONE = TopicPartition("weight-versions", 0)
IN = [TopicPartition("rollouts", p) for p in range(4)]
TOPICS = {"rollouts": 4, "weight-versions": 1, "fleet-status": 1}


def archive(store: MemoryStore, records: Sequence[Record], first: int, next: int) -> str:
    """Puts records of one partition under [first, next), as an archiver does; the key."""
    at = TopicPartition(records[0].topic, records[0].partition)
    writer = StretchWriter(at, first)
    for record in records:
        writer.add(record.offset, record.timestamp_ms, encode_record(record))
    data = writer.finish(next)
    key = stretch_key(NAME, at, first, next, content_digest(data))
    store.create(key, data)
    return key


def filled(log: MemoryLog, topic: str, count: int) -> list[Record]:
    """`count` records in transactions of three, so that control records stand between them; in order per partition."""
    for start in range(0, count, 3):
        writer = log.transactional_writer("w")
        writer.begin()
        writer.write(
            [
                Outgoing(topic, b"k%d" % i, b"v%d" % i, (("ce_id", b"%d" % i), ("none", None)))
                for i in range(start, min(start + 3, count))
            ]
        )
        writer.commit("g", {})
        writer.close()
    return list(scan(log, [topic]))


def only(records: Sequence[Record], partition: TopicPartition) -> list[Record]:
    return [r for r in records if (r.topic, r.partition) == partition]


def across(live: Log, store: MemoryStore) -> closing[ArchivedLog]:
    return closing(ArchivedLog(live, store, NAME))


def by_place(records: Sequence[Record]) -> list[Record]:
    return sorted(records, key=lambda r: (r.topic, r.partition, r.offset))


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def live() -> MemoryLog:
    return MemoryLog(TOPICS)


def test_what_retention_took_comes_from_the_archive(live: MemoryLog, store: MemoryStore) -> None:
    every = filled(live, "rollouts", 60)
    for at in IN:
        mine = only(every, at)
        half = mine[len(mine) // 2].offset
        archive(store, [r for r in mine if r.offset < half], 0, half)
        live.trim(at, half - 1)  # they overlap
    with across(live, store) as log:
        assert log.beginning_offsets(IN) == dict.fromkeys(IN, 0)
        assert log.end_offsets(IN) == live.end_offsets(IN)
        assert log.partitions("rollouts") == 4
        assert by_place(list(scan(log, ["rollouts"]))) == by_place(every)
        some = {at: live.beginning_offsets([at])[at] - 2 for at in IN}
        found = list(scan(log, ["rollouts"], start=some))
        assert by_place(found) == by_place([r for r in every if r.offset >= some[IN[r.partition]]])


def test_a_log_that_lost_everything_is_read_from_the_archive(live: MemoryLog, store: MemoryStore) -> None:
    every = filled(live, "weight-versions", 10)
    archive(store, every[:4], 0, every[4].offset)
    archive(store, every[4:], every[4].offset, live.end_offsets([ONE])[ONE])
    for after in (MemoryLog({"rollouts": 4}), MemoryLog(TOPICS)):  # without the topic; with a new, empty one
        with across(after, store) as log:
            assert log.partitions("weight-versions") == 1
            assert log.end_offsets([ONE]) == log.written_offsets([ONE]) == live.end_offsets([ONE])
            assert list(scan(log, ["weight-versions"], hidden=True)) == every
    with across(MemoryLog({"rollouts": 4}), store) as log:
        assert log.beginning_offsets([ONE, IN[0]]) == {ONE: 0, IN[0]: 0}
        with pytest.raises(TopicMismatch):
            log.partitions("rewards")
        with pytest.raises(TopicMismatch):
            log.end_offsets([TopicPartition("rewards", 0)])


def test_of_a_compacted_topic_the_archive_has_all(live: MemoryLog, store: MemoryStore) -> None:
    status = TopicPartition("fleet-status", 0)
    every = filled(live, "fleet-status", 9)
    compacted = MemoryLog(TOPICS)
    filled(compacted, "fleet-status", 9)
    for entry in (0, 2, 4):  # as compaction leaves holes
        compacted._partitions[status].entries[entry] = None
    archive(store, every[:6], 0, every[5].offset + 1)
    with across(compacted, store) as log:
        found = list(scan(log, ["fleet-status"]))
        assert [r.offset for r in found] == [r.offset for r in every]
        assert found[0]._replace(timestamp_ms=0) == every[0]._replace(timestamp_ms=0)


def test_a_hole_is_an_error_and_audits_go_on_behind_it(live: MemoryLog, store: MemoryStore) -> None:
    every = filled(live, "weight-versions", 30)
    offsets = [r.offset for r in every]
    archive(store, every[:5], 0, offsets[5])
    archive(store, every[10:15], offsets[10], offsets[15])
    live.trim(ONE, offsets[20])
    with across(live, store) as log:
        with pytest.raises(OffsetLost, match=f"offset {offsets[5]} is neither"):
            list(scan(log, ["weight-versions"]))
        holes: list[Lost] = []
        found = list(scan(log, ["weight-versions"], lost=holes.append))
        assert found == [*every[:5], *every[10:15], *every[20:]]
        assert holes == [Lost(ONE, offsets[5], offsets[10]), Lost(ONE, offsets[15], offsets[20])]
        assert list(scan(log, ["weight-versions"], start={ONE: offsets[20]})) == every[20:]


def test_a_hole_at_the_end_of_all(live: MemoryLog, store: MemoryStore) -> None:
    every = filled(live, "weight-versions", 6)
    archive(store, every[:3], 0, every[3].offset)
    end = live.end_offsets([ONE])[ONE]
    live.trim(ONE, end)
    with across(live, store) as log:
        holes: list[Lost] = []
        assert list(scan(log, ["weight-versions"], lost=holes.append)) == every[:3]
        assert holes == [Lost(ONE, every[3].offset, end)]


@pytest.mark.parametrize("harm", ["cut", "flip", "other", "gone"])
def test_an_object_that_does_not_read_is_a_hole(harm: str, live: MemoryLog, store: MemoryStore) -> None:
    every = filled(live, "weight-versions", 12)
    offsets = [r.offset for r in every]
    keys = [archive(store, every[i : i + 4], offsets[i], offsets[i + 4]) for i in (0, 4)]
    live.trim(ONE, offsets[8])
    good = store.get(keys[1])
    with across(live, store) as log:
        log.archive.stretches(ONE)  # listed before
        store.delete(keys[1])
        bad = {"cut": good[:-3], "flip": good[:-9] + b"!" + good[-8:], "other": store.get(keys[0])}
        if harm in bad:
            store.create(keys[1], bad[harm])
        holes: list[Lost] = []
        found = list(scan(log, ["weight-versions"], lost=holes.append))
        assert found == [*every[:4], *every[8:]]
        assert holes == [Lost(ONE, offsets[4], offsets[8])]
        assert list(log.archive.aside) == [keys[1]]


def test_an_object_that_does_not_read_is_read_from_the_log_where_it_has_it(
    live: MemoryLog, store: MemoryStore
) -> None:
    every = filled(live, "fleet-status", 6)
    key = archive(store, every[:4], 0, every[4].offset)
    data = store.get(key)
    store.delete(key)
    store.create(key, data[:40])
    with across(live, store) as log:
        assert list(scan(log, ["fleet-status"])) == every
        assert list(log.archive.aside) == [key]


def test_retention_that_goes_on_while_somebody_reads(live: MemoryLog, store: MemoryStore) -> None:
    every = filled(live, "weight-versions", 30)
    with across(live, store) as log:
        reader = log.reader()
        reader.assign({ONE: 0})
        assert reader.poll(4, 1.0) == every[:4]
        archive(store, every, 0, live.end_offsets([ONE])[ONE])
        live.trim(ONE, every[25].offset)
        found: list[Record] = []
        while reader.positions() != log.end_offsets([ONE]):
            found += reader.poll(7, 1.0)
        assert found == every[4:]
        reader.close()


def test_stretches_of_two_archivers_may_overlap(live: MemoryLog, store: MemoryStore) -> None:
    every = filled(live, "weight-versions", 30)
    offsets = [r.offset for r in every]
    for first, last in ((0, 20), (0, 5), (5, 9), (9, 12), (12, 25)):
        archive(store, every[first:last], offsets[first], offsets[last])
    live.trim(ONE, offsets[25])
    with across(live, store) as log:
        assert list(scan(log, ["weight-versions"])) == every
        assert list(scan(log, ["weight-versions"], start={ONE: offsets[7]})) == every[7:]
        assert log.archive.end(ONE) == offsets[25]


def test_a_reader_of_both_seeks_pauses_and_follows(live: MemoryLog, store: MemoryStore) -> None:
    live.writer().write([Outgoing("rollouts", None, b"%d" % i, (), p) for i in range(6) for p in range(2)])
    every = list(scan(live, ["rollouts"]))
    for at in IN[:2]:
        archive(store, only(every, at)[:3], 0, 3)
        live.trim(at, 3)
    with across(live, store) as log:
        reader = log.reader()
        reader.assign({IN[0]: 1, IN[1]: 0})
        reader.pause([IN[1]])
        assert drained(reader.poll, 5) == only(every, IN[0])[1:]
        assert reader.positions() == {IN[0]: 6, IN[1]: 0}
        assert reader.poll(10, 0.01) == []
        reader.seek(IN[0], 2)
        assert drained(reader.poll, 4) == only(every, IN[0])[2:]
        reader.seek(IN[0], 4)
        assert drained(reader.poll, 2) == only(every, IN[0])[4:]
        reader.resume([IN[1]])
        assert drained(reader.poll, 6) == only(every, IN[1])
        late = threading.Thread(
            target=lambda: live.writer().write([Outgoing("rollouts", None, b"new", (), 0)])
        )
        late.start()
        assert [r.value for r in drained(reader.poll, 1)] == [b"new"]
        late.join()
        reader.close()


def drained(poll: Callable[[int, float], list[Record]], count: int) -> list[Record]:
    found: list[Record] = []
    for _ in range(1_000):
        found += poll(2, 5.0) if len(found) < count else []
    return found


def test_large_and_many_records_in_small_pieces(live: MemoryLog, store: MemoryStore) -> None:
    """Frames and stretches end where they are full; positions in the middle of them are found."""
    body = bytes(range(256)) * 2_000
    live.writer().write([Outgoing("weight-versions", None, b"%d" % i + body, ()) for i in range(30)])
    every = list(scan(live, ["weight-versions"]))
    archive(store, every, 0, 30)
    live.trim(ONE, 30)
    with across(live, store) as log:
        assert len({p.frame.first for p in log.archive.packed(ONE, 0)}) > 5
        for start in (0, 1, 7, 29):
            assert list(scan(log, ["weight-versions"], start={ONE: start})) == every[start:]
        assert list(log.archive.records(ONE, 5, 9)) == every[5:9]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_whatever_is_archived_and_trimmed_each_record_comes_once_or_is_lost(data: st.DataObject) -> None:
    live, store = MemoryLog(TOPICS), MemoryStore()
    count = data.draw(st.integers(1, 40), label="records")
    every = filled(live, "weight-versions", count)
    end = live.end_offsets([ONE])[ONE]
    spans = data.draw(
        st.lists(st.tuples(st.integers(0, end - 1), st.integers(1, end)).map(lambda s: (s[0], s[0] + s[1]))),
        label="stretches",
    )
    held = {(a, min(b, end)) for a, b in spans}
    for first, next in sorted(held):
        inside = [r for r in every if first <= r.offset < next]
        if inside:
            archive(store, inside, first, next)
        else:
            held.discard((first, next))
    begin = data.draw(st.integers(0, end), label="the log begins")
    live.trim(ONE, begin)
    start = data.draw(st.integers(0, end), label="read from")

    def there(offset: int) -> bool:
        return offset >= begin or any(a <= offset < b for a, b in held)

    with across(live, store) as log:
        lost: list[Lost] = []
        found = list(scan(log, ["weight-versions"], start={ONE: start}, lost=lost.append))
        assert found == [r for r in every if r.offset >= start and there(r.offset)]
        gaps = {o for hole in lost for o in range(hole.first, hole.next)}
        assert gaps == {o for o in range(start, end) if not there(o)}
        reader = log.reader()
        position = data.draw(st.integers(0, end), label="seek to")
        reader.assign({ONE: start if there(start) or start == end else end})
        reader.seek(ONE, position)
        if there(position):
            expected = next_run(every, position, there, end)
            got: list[Record] = []
            while reader.positions()[ONE] < expected[1]:
                got += reader.poll(data.draw(st.integers(1, 7)), 1.0)
            assert [r for r in got if r.offset < expected[1]] == expected[0]
        elif position < end:
            with pytest.raises(OffsetLost):
                reader.poll(10, 0.1)
        reader.close()


def next_run(
    every: Sequence[Record], position: int, there: Callable[[int], bool], end: int
) -> tuple[list[Record], int]:
    """The records from `position` to the first offset that nobody has, and that offset."""
    upto = position
    while upto < end and there(upto):
        upto += 1
    return [r for r in every if position <= r.offset < upto], upto
