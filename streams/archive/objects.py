"""A stretch: records of one partition, end to end, as one object in the store. Pure.

    magic      8 bytes
    header     u32 length (little-endian), the first 8 bytes of its blake3, then MessagePack: a `StretchHeader`
    frames     zstd, each with its content size and checksum; a range of the object serves a position
                   u32 length of each record (little-endian)
                   the records, exactly as they were sealed (`leaves.encode_record`)

A stretch covers the offsets [first, next): what is in there and in no frame never was a record (control records, what was
aborted, what the broker compacted away). Sizes are checked before anything is decoded.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Final

import msgspec
import numpy as np
import zstandard
from blake3 import blake3

from rollwire.schemas.errors import ArchiveCorrupt
from rollwire.streams.seams.log import Record, TopicPartition

MAGIC: Final = b"RWARCH1\n"
STRETCH_BYTES: Final = 16 * 1024 * 1024
"""Plain bytes of the records of one stretch, at most."""
FRAME_BYTES: Final = 1024 * 1024
"""A frame that has reached this ends; so one is at most this and one record."""
HEAD_BYTES: Final = 64 * 1024
"""More than magic and header of any stretch take: one read gives them."""

_FORMAT: Final = 1
_SUM: Final = 8
_PREFIX: Final = len(MAGIC) + 4 + _SUM
_LENGTH: Final = struct.Struct("<I")
_MAX_FRAME: Final = 2 * STRETCH_BYTES
_LEVEL: Final = 3

Bytes = bytes | memoryview


class FrameInfo(msgspec.Struct, frozen=True, array_like=True):
    first: int  # offset of its first record
    records: int
    stored: int  # bytes in the object
    plain: int  # bytes unpacked, the lengths included
    last_ms: int  # the newest timestamp in it


class StretchHeader(msgspec.Struct, frozen=True, kw_only=True):
    format: int
    topic: str
    partition: int
    first: int  # the offsets covered: [first, next)
    next: int
    records: int
    first_ms: int  # the oldest timestamp
    last_ms: int  # the newest
    frames: tuple[FrameInfo, ...]


class _Taken(msgspec.Struct, array_like=True):
    """A record as `leaves.encode_record` writes it."""

    offset: int
    timestamp_ms: int
    key: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]
    value: bytes | None


_records = msgspec.msgpack.Decoder(_Taken)
_headers = msgspec.msgpack.Decoder(StretchHeader)


class StretchWriter:
    """Gathers the encoded records of one stretch. Frames are packed as they fill, so that memory stays bounded."""

    def __init__(self, partition: TopicPartition, first: int) -> None:
        self._partition = partition
        self._first = first
        self._frames: list[FrameInfo] = []
        self._packed: list[bytes] = []
        self._bodies: list[bytes] = []
        self._frame_first = first
        self._frame_ms = 0
        self._frame_bytes = 0
        self._ms = (0, 0)
        self._pack = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True).compress
        self.plain = 0  # bytes of the records so far
        self.records = 0

    def takes(self, body: bytes) -> bool:
        """Whether `body` still fits; the first record always does."""
        return not self.records or self.plain + len(body) <= STRETCH_BYTES

    def add(self, offset: int, timestamp_ms: int, body: bytes) -> None:
        if not self._bodies:
            self._frame_first, self._frame_ms = offset, timestamp_ms
        low, high = self._ms if self.records else (timestamp_ms, timestamp_ms)
        self._ms = min(low, timestamp_ms), max(high, timestamp_ms)
        self._frame_ms = max(self._frame_ms, timestamp_ms)
        self._bodies.append(body)
        self._frame_bytes += len(body)
        self.plain += len(body)
        self.records += 1
        if self._frame_bytes >= FRAME_BYTES:
            self._end_frame()

    @property
    def oldest_ms(self) -> int:
        return self._ms[0]

    def finish(self, next: int) -> bytes:
        """The object; it covers the offsets up to `next`."""
        self._end_frame()
        header = StretchHeader(
            format=_FORMAT,
            topic=self._partition.topic,
            partition=self._partition.partition,
            first=self._first,
            next=next,
            records=self.records,
            first_ms=self._ms[0],
            last_ms=self._ms[1],
            frames=tuple(self._frames),
        )
        packed = msgspec.msgpack.encode(header)
        return b"".join((MAGIC, _LENGTH.pack(len(packed)), _sum(packed), packed, *self._packed))

    def _end_frame(self) -> None:
        if not self._bodies:
            return
        lengths = np.fromiter(map(len, self._bodies), "<u4", len(self._bodies))
        plain = b"".join((lengths.tobytes(), *self._bodies))
        stored = self._pack(plain)
        self._frames.append(
            FrameInfo(self._frame_first, len(self._bodies), len(stored), len(plain), self._frame_ms)
        )
        self._packed.append(stored)
        self._bodies, self._frame_bytes = [], 0


def content_digest(data: bytes) -> str:
    """What stands in the object's key, of the whole object."""
    return hashlib.sha256(data).hexdigest()[:16]


def read_header(data: Bytes, where: str) -> tuple[StretchHeader, int]:
    """The header, and where the frames begin, from the first `HEAD_BYTES` of an object (all of it, where it is
    smaller). Raises `ArchiveCorrupt`."""
    if len(data) < _PREFIX or bytes(data[: len(MAGIC)]) != MAGIC:
        raise corrupt(where, "this is no stretch of an archive")
    (length,) = _LENGTH.unpack(data[len(MAGIC) : len(MAGIC) + 4])
    if length > HEAD_BYTES - _PREFIX or length > len(data) - _PREFIX:
        raise corrupt(where, f"a header of {length:,} bytes; the object is damaged, or cut off")
    packed = data[_PREFIX : _PREFIX + length]
    if _sum(packed) != data[_PREFIX - _SUM : _PREFIX]:
        raise corrupt(where, "the header is damaged")
    try:
        header = _headers.decode(packed)
    except msgspec.DecodeError as error:
        raise corrupt(where, f"the header does not read: {error}") from error
    if header.format != _FORMAT:
        raise corrupt(where, f"format {header.format} is not known here: upgrade, and read it then")
    _check(header, where)
    return header, _PREFIX + length


def _sum(packed: Bytes) -> bytes:
    return blake3(packed).digest()[:_SUM]


def _check(header: StretchHeader, where: str) -> None:
    """Sizes and offsets that a stretch may have; so whoever reads it needs no more memory than one of ours takes."""
    frames = header.frames
    starts = [frame.first for frame in frames]
    right = (
        0 <= header.first < header.next
        and header.records == sum(frame.records for frame in frames)
        and all(a < b for a, b in pairwise(starts))
        and all(header.first <= start < header.next for start in starts)
        and all(0 < f.stored <= f.plain + 1024 and 4 * f.records <= f.plain <= _MAX_FRAME for f in frames)
        and all(0 < f.records <= header.next - header.first for f in frames)
        and sum(f.plain - 4 * f.records for f in frames) <= STRETCH_BYTES + _MAX_FRAME
    )
    if not right:
        raise corrupt(where, "the header contradicts itself")


def unpack_frame(stored: Bytes, frame: FrameInfo, where: str) -> list[memoryview]:
    """The records of a frame, as they were sealed. Raises `ArchiveCorrupt`."""
    try:
        if len(stored) != frame.stored or zstandard.frame_content_size(bytes(stored[:18])) != frame.plain:
            raise corrupt(where, f"the frame at offset {frame.first:,} is cut off, or another one")
        plain = zstandard.ZstdDecompressor().decompress(stored, max_output_size=frame.plain)
    except zstandard.ZstdError as error:
        raise corrupt(where, f"the frame at offset {frame.first:,} does not unpack: {error}") from error
    body = 4 * frame.records
    lengths: Sequence[int] = np.frombuffer(plain, "<u4", frame.records).tolist()
    if body + sum(lengths) != len(plain):
        raise corrupt(where, f"the frame at offset {frame.first:,} is not as long as its records")
    view = memoryview(plain)
    return [view[a:b] for a, b in pairwise(accumulate(lengths, initial=body))]


def decode_record(body: Bytes, at: TopicPartition, where: str) -> Record:
    """What `leaves.encode_record` was given. Raises `ArchiveCorrupt`."""
    try:
        taken = _records.decode(body)
    except msgspec.DecodeError as error:
        raise corrupt(where, f"an archived record does not read: {error}") from error
    return Record(
        at.topic, at.partition, taken.offset, taken.timestamp_ms, taken.key, taken.value, taken.headers
    )


def records_of(data: bytes, where: str) -> Iterator[Record]:
    """Every record of a whole object. Raises `ArchiveCorrupt`, where it comes to it."""
    header, at = read_header(data[:HEAD_BYTES], where)
    partition = TopicPartition(header.topic, header.partition)
    view = memoryview(data)
    for frame in header.frames:
        for body in unpack_frame(view[at : at + frame.stored], frame, where):
            yield decode_record(body, partition, where)
        at += frame.stored


def corrupt(where: str, what: str) -> ArchiveCorrupt:
    """`where`: the object's key."""
    return ArchiveCorrupt(f"{where}: {what}", where)
