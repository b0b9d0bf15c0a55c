"""Holds records as they are read against the segments that sealed them: one partition. Pure.

What verifies leaves nothing behind; what does not is kept with the marks of what was found, to be explained.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rollwire.streams.archive.leaves import leaf_of, leaf_of_fields, segment_digest
from rollwire.streams.archive.marks import MARK_BYTES, Mark
from rollwire.streams.archive.verify_tables import Placed
from rollwire.streams.seams.log import Record


class Unlike(NamedTuple):
    """A segment whose records are not those that were sealed, or not all of them."""

    placed: Placed
    found: tuple[Mark, ...]


class Follower:
    """`segments`: of one partition, by `first`; records between them are of no concern, those of a segment come in order."""

    def __init__(self, segments: Sequence[Placed]) -> None:
        self._segments = segments
        self._index = 0
        self._next = segments[0].segment.next if segments else 0
        self._first = segments[0].segment.first if segments else 0
        self._offsets: list[int] = []
        self._leaves: list[bytes] = []
        self.records = 0  # looked at
        self.verified: list[int] = []  # `first` of the segments that are as they were sealed
        self.unlike: list[Unlike] = []

    def take(self, records: Sequence[Record]) -> None:
        """Records of this partition, in order."""
        offsets, leaves = self._offsets, self._leaves
        for _, _, offset, timestamp_ms, key, value, headers in records:
            if offset >= self._next:
                self._reach(offset)
                offsets, leaves = self._offsets, self._leaves
            if offset >= self._first:
                offsets.append(offset)
                leaves.append(leaf_of_fields(offset, timestamp_ms, key, headers, value))
        self.records += len(records)

    def take_encoded(self, offset: int, body: memoryview) -> None:
        """One record as it is archived."""
        if offset >= self._next:
            self._reach(offset)
        if offset >= self._first:
            self._offsets.append(offset)
            self._leaves.append(leaf_of(body))
        self.records += 1

    def skip(self, offset: int) -> None:
        """Nothing comes below `offset` any more: a segment that it cuts is judged by what came."""
        if offset >= self._next:
            self._reach(offset)

    def end(self) -> None:
        """Nothing comes any more."""
        while self._index < len(self._segments):
            self._finish()

    def _reach(self, offset: int) -> None:
        while self._index < len(self._segments) and offset >= self._next:
            self._finish()

    def _finish(self) -> None:
        placed = self._segments[self._index]
        s = placed.segment
        if s.digest and s.digest == segment_digest(
            s.topic,
            s.partition,
            s.first,
            s.next,
            s.records,
            s.first_ms,
            s.last_ms,
            b"".join(self._leaves),
        ):
            self.verified.append(s.first)
        else:
            marks = [leaf[:MARK_BYTES] for leaf in self._leaves]
            self.unlike.append(Unlike(placed, tuple(map(Mark, self._offsets, marks))))
        self._offsets, self._leaves = [], []
        self._index += 1
        if self._index < len(self._segments):
            self._first, self._next = (
                self._segments[self._index].segment.first,
                self._segments[self._index].segment.next,
            )
        else:
            self._first = self._next = 1 << 63
