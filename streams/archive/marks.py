"""The marks of an epoch: of every sealed record its offset and the first bytes of its leaf. Pure.

A segment's digest says that a segment is not what it was; its marks say which record. They are read only where something
was found: they prove nothing by themselves, since four bytes can be met by trying.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import msgspec
import numpy as np
import zstandard

from rollwire.schemas.errors import ArchiveCorrupt
from rollwire.streams.seams.log import TopicPartition

MARK_BYTES: Final = 4
_MAX_PLAIN: Final = 1 << 30


class Marks:
    """Of one partition's records, in their order."""

    def __init__(self, at: TopicPartition) -> None:
        self.at = at
        self._offsets = array("q")
        self._leaves = bytearray()

    def __len__(self) -> int:
        return len(self._offsets)

    def extend(self, offsets: Iterable[int], leaves: Iterable[bytes]) -> None:
        """`leaves`: whole, or their first bytes."""
        self._offsets.extend(offsets)
        self._leaves += b"".join([leaf[:MARK_BYTES] for leaf in leaves])

    def between(self, first: int, next: int) -> list[Mark]:
        """Of the records at [first, next)."""
        offsets = np.frombuffer(self._offsets, np.int64)
        a, b = np.searchsorted(offsets, [first, next]).tolist() if len(offsets) else (0, 0)
        return [
            Mark(offset, bytes(self._leaves[MARK_BYTES * i : MARK_BYTES * (i + 1)]))
            for i, offset in enumerate(self._offsets[a:b], a)
        ]

    def row(self) -> MarksRow:
        offsets_N = np.frombuffer(self._offsets, np.int64) if self._offsets else np.zeros(0, np.int64)
        return MarksRow(
            self.at.topic,
            self.at.partition,
            # Neighbours differ by one nearly always, so their differences take next to no room.
            np.diff(offsets_N, prepend=0).astype("<i8").tobytes(),
            bytes(self._leaves),
        )


class Mark(NamedTuple):
    offset: int
    leaf: bytes  # its first `MARK_BYTES`


class MarksRow(msgspec.Struct, frozen=True, array_like=True):
    topic: str
    partition: int
    steps: bytes  # <i8 a record: its offset less the one before; the first one's less 0
    leaves: bytes  # `MARK_BYTES` a record


_rows: Final = msgspec.msgpack.Decoder(tuple[MarksRow, ...])


def pack_marks(marks: Sequence[Marks]) -> bytes:
    """zstd over MessagePack: one row a partition."""
    return zstandard.ZstdCompressor(level=1).compress(
        msgspec.msgpack.encode([one.row() for one in marks if len(one)])
    )


def unpack_marks(data: bytes, where: str) -> dict[TopicPartition, Marks]:
    """Raises `ArchiveCorrupt` for anything that `pack_marks` did not make."""
    try:
        if not 0 <= zstandard.frame_content_size(data) <= _MAX_PLAIN:
            raise ArchiveCorrupt(f"{where}: marks of an unknown or unlikely size")
        rows = _rows.decode(zstandard.ZstdDecompressor().decompress(data))
    except (zstandard.ZstdError, msgspec.DecodeError) as error:
        raise ArchiveCorrupt(f"{where}: the marks do not read: {error}") from error
    found: dict[TopicPartition, Marks] = {}
    for row in rows:
        if len(row.steps) % 8 or len(row.steps) // 8 * MARK_BYTES != len(row.leaves):
            raise ArchiveCorrupt(f"{where}: the marks of {row.topic}[{row.partition}] are cut off")
        at = TopicPartition(row.topic, row.partition)
        marks = found[at] = Marks(at)
        offsets_N = np.cumsum(np.frombuffer(row.steps, "<i8"))
        leaves = (row.leaves[i : i + MARK_BYTES] for i in range(0, len(row.leaves), MARK_BYTES))
        marks.extend(offsets_N.tolist(), leaves)
    return found
