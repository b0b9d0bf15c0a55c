"""Segments of a partition, and the chain over them. Pure.

A segment covers the offsets [first, next) without a hole: those that hold no record (control records, what was aborted)
belong to the segment whose last record follows them. So two neighbours meet, and nothing fits between.
"""

from __future__ import annotations

from typing import Final

import msgspec

from rollwire.streams.archive.leaves import (
    Content,
    chain_of,
    chain_start,
    leaf_of_fields,
    leaves_digest,
    segment_digest,
)
from rollwire.streams.archive.marks import Marks
from rollwire.streams.seams.log import Record, TopicPartition

SEGMENT_RECORDS: Final = 256


class Segment(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Sealed records of one partition; `digest` and `chain` as `leaves` defines them."""

    topic: str
    partition: int
    first: int  # the `next` of the segment before
    next: int  # behind the last record
    records: int
    first_ms: int  # the oldest timestamp
    last_ms: int  # the newest
    leaves: bytes  # the digest of its records' leaves, which `digest` is made of as well
    digest: bytes
    chain: bytes

    def holds(self, content: bytes, records: int) -> bool:
        """Whether its records are those that gave this digest of `leaves.Content`."""
        return records == self.records and self.digest == segment_digest(
            self.topic,
            self.partition,
            self.first,
            self.next,
            records,
            self.first_ms,
            self.last_ms,
            content,
            self.leaves,
        )


class Chain:
    """Gathers the records of one partition into segments. `chain=None`: its first segment, which begins at `position`."""

    def __init__(self, at: TopicPartition, position: int, chain: bytes | None = None) -> None:
        self._at = at
        self._first = self._next = position
        self._chain = chain if chain is not None else chain_start(at.topic, at.partition, position)
        self._offsets: list[int] = []
        self._times: list[int] = []
        self._leaves: list[bytes] = []
        self._content = Content()
        self.marks = Marks(at)  # of the records in the segments that were given

    @property
    def chain(self) -> bytes:
        """Over the segments that were given."""
        return self._chain

    @property
    def position(self) -> int:
        """Where the next segment begins."""
        return self._first

    def add(self, record: Record) -> Segment | None:
        """The segment that this record fills. Raises `ValueError` where records are not in order."""
        _, _, offset, timestamp_ms, key, value, headers = record
        if offset < self._next:
            raise ValueError(f"{self._at}: offset {offset} comes behind {self._next - 1}")
        self._next = offset + 1
        self._offsets.append(offset)
        self._times.append(timestamp_ms)
        self._content.take((record,))
        self._leaves.append(leaf_of_fields(offset, timestamp_ms, key, headers, value))
        return self.close() if len(self._leaves) == SEGMENT_RECORDS else None

    def close(self) -> Segment | None:
        """The segment of what is gathered, be it short; None without any."""
        if not self._leaves:
            return None
        topic, partition = self._at
        first_ms, last_ms, count = min(self._times), max(self._times), len(self._leaves)
        leaves = leaves_digest(self._leaves)
        digest = segment_digest(
            topic,
            partition,
            self._first,
            self._next,
            count,
            first_ms,
            last_ms,
            self._content.digest(),
            leaves,
        )
        self._chain = chain_of(self._chain, digest)
        segment = Segment(
            topic, partition, self._first, self._next, count, first_ms, last_ms, leaves, digest, self._chain
        )
        self.marks.extend(self._offsets, self._leaves)
        self._first, self._offsets, self._times, self._leaves = self._next, [], [], []
        self._content = Content()
        return segment
