"""The layout of a stretch: what comes back, and what damage does."""

from __future__ import annotations

import struct

import msgspec
import pytest
import zstandard
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from rollwire.schemas.errors import ArchiveCorrupt
from rollwire.streams.archive.leaves import encode_record
from rollwire.streams.archive.objects import (
    FRAME_BYTES,
    HEAD_BYTES,
    MAGIC,
    STRETCH_BYTES,
    FrameInfo,
    StretchHeader,
    StretchWriter,
    read_header,
    records_of,
    unpack_frame,
)
from rollwire.streams.seams.log import Record, TopicPartition

AT = TopicPartition("rollouts", 3)
BYTES = st.none() | st.binary(max_size=50)
RECORDS = st.lists(
    st.tuples(
        st.integers(1, 5),  # how far behind the one before
        st.integers(0, 2**45),
        BYTES,
        BYTES,
        st.lists(st.tuples(st.text(max_size=9), BYTES), max_size=4).map(tuple),
    ),
    min_size=1,
    max_size=60,
)
Drawn = list[tuple[int, int, bytes | None, bytes | None, tuple[tuple[str, bytes | None], ...]]]


def made(drawn: Drawn) -> tuple[list[Record], bytes]:
    records: list[Record] = []
    offset = 7
    for step, timestamp_ms, key, value, headers in drawn:
        offset += step
        records.append(Record(AT.topic, AT.partition, offset, timestamp_ms, key, value, headers))
    writer = StretchWriter(AT, 7)
    for record in records:
        body = encode_record(record)
        assert writer.takes(body)
        writer.add(record.offset, record.timestamp_ms, body)
    return records, writer.finish(offset + 3)


@given(drawn=RECORDS)
def test_records_come_back_as_they_were(drawn: Drawn) -> None:
    records, data = made(drawn)
    assert list(records_of(data, "k")) == records
    header, _ = read_header(data[:HEAD_BYTES], "k")
    assert (header.topic, header.partition, header.first) == (AT.topic, AT.partition, 7)
    assert header.next == records[-1].offset + 3
    assert header.records == len(records)
    assert (header.first_ms, header.last_ms) == (
        min(r.timestamp_ms for r in records),
        max(r.timestamp_ms for r in records),
    )


@settings(max_examples=200)
@given(drawn=RECORDS, data=st.data())
def test_damage_is_an_error_of_ours_or_changes_nothing(drawn: Drawn, data: st.DataObject) -> None:
    records, good = made(drawn)
    at = data.draw(st.integers(0, len(good) - 1))
    kind = data.draw(st.sampled_from(["flip", "cut", "insert", "noise"]))
    bad = {
        "flip": good[:at] + bytes([good[at] ^ data.draw(st.integers(1, 255))]) + good[at + 1 :],
        "cut": good[:at],
        "insert": good[:at] + data.draw(st.binary(min_size=1, max_size=9)) + good[at:],
        "noise": data.draw(st.binary(max_size=200)),
    }[kind]
    try:
        found = list(records_of(bad, "k"))
    except ArchiveCorrupt:
        return
    assert found == records


def header_with(*frames: FrameInfo, first: int = 0, next: int = 100, records: int = 1) -> bytes:
    header = StretchHeader(
        format=1,
        topic="rollouts",
        partition=0,
        first=first,
        next=next,
        records=records,
        first_ms=0,
        last_ms=0,
        frames=frames,
    )
    packed = msgspec.msgpack.encode(header)
    return MAGIC + struct.pack("<I", len(packed)) + blake3(packed).digest()[:8] + packed


@pytest.mark.parametrize(
    "data",
    [
        b"",
        MAGIC,
        MAGIC + b"\xff\xff\xff\x7f" + b"x" * 100,
        header_with(FrameInfo(0, 1, 1 << 40, 100, 0)),
        header_with(FrameInfo(0, 1, 10, 1 << 40, 0)),
        header_with(FrameInfo(0, 1 << 40, 10, 100, 0), records=1 << 40),
        header_with(FrameInfo(0, 1, 10, 100, 0), records=2),
        header_with(FrameInfo(0, 1, 10, 100, 0), FrameInfo(0, 1, 10, 100, 0), records=2),
        header_with(FrameInfo(200, 1, 10, 100, 0)),
        header_with(first=5, next=5, records=0),
        header_with(*(FrameInfo(i, 1, 2**24, 2**24, 0) for i in range(9)), records=9),
    ],
)
def test_a_header_that_asks_for_too_much_is_refused_before_anything_is_fetched(data: bytes) -> None:
    with pytest.raises(ArchiveCorrupt):
        read_header(data, "k")


def test_a_frame_that_unpacks_to_more_than_it_says_is_refused_before_it_is_unpacked() -> None:
    bomb = zstandard.ZstdCompressor(write_checksum=True).compress(b"\x00" * 50_000_000)
    with pytest.raises(ArchiveCorrupt, match="another one"):
        unpack_frame(bomb, FrameInfo(0, 1, len(bomb), 100, 0), "k")
    unsaid = zstandard.ZstdCompressor(write_content_size=False).compress(b"\x00" * 50_000_000)
    with pytest.raises(ArchiveCorrupt):
        unpack_frame(unsaid, FrameInfo(0, 1, len(unsaid), 100, 0), "k")


def test_frames_and_stretches_end_where_they_are_full() -> None:
    writer = StretchWriter(AT, 0)
    body = encode_record(Record(AT.topic, AT.partition, 0, 1, None, bytes(300_000), ()))
    count = 0
    while writer.takes(body):
        writer.add(count, 1, body)
        count += 1
    assert writer.plain <= STRETCH_BYTES < writer.plain + len(body)
    header, _ = read_header(writer.finish(count)[:HEAD_BYTES], "k")
    assert all(f.plain <= FRAME_BYTES + len(body) + 4 * f.records for f in header.frames)
    alone = StretchWriter(AT, 0)
    assert alone.takes(
        bytes(STRETCH_BYTES + 1)
    )  # the first always fits: no record is larger than a topic allows
