"""Holds records as they are read against the segments that sealed them: one partition. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from operator import attrgetter
from typing import Final

from rollwire.streams.archive.leaves import Content
from rollwire.streams.archive.verify_tables import Placed
from rollwire.streams.seams.log import Record

_BEHIND: Final = 1 << 63  # behind every offset
_offset = attrgetter("offset")


class Follower:
    """`segments`: of one partition, by `first`; records between them are of no concern, those of a segment come in order."""

    def __init__(self, segments: Sequence[Placed]) -> None:
        self._segments = segments
        self._index = -1
        self._first = self._next = -1
        self._content = Content()
        self.records = 0  # looked at
        self.verified: set[int] = set()  # `first` of the segments that are as they were sealed
        self.unlike: set[int] = set()  # of those that are not, of which there is something
        self._forward()

    def take(self, records: Sequence[Record]) -> None:
        """Records of this partition, in order."""
        self.records += len(records)
        start = 0
        while start < len(records):
            if records[start].offset >= self._next:
                self._reach(records[start].offset)
            end = len(records)
            if records[-1].offset >= self._next:
                end = bisect_left(records, self._next, start, key=_offset)
            if records[start].offset < self._first:
                start = bisect_left(records, self._first, start, end, key=_offset)
            if start < end:
                self._content.take(records[start:end])
            start = end

    def take_encoded(self, offset: int, body: memoryview) -> None:
        """One record as it is archived."""
        if offset >= self._next:
            self._reach(offset)
        if offset >= self._first:
            self._content.take_encoded(body)
        self.records += 1

    def end(self) -> None:
        """Nothing comes any more."""
        self._reach(_BEHIND)

    def _reach(self, offset: int) -> None:
        while offset >= self._next and self._index < len(self._segments):
            segment = self._segments[self._index].segment
            if segment.holds(self._content.digest(), self._content.records):
                self.verified.add(segment.first)
            elif self._content.records:
                self.unlike.add(segment.first)
            self._content = Content()
            self._forward()

    def _forward(self) -> None:
        self._index += 1
        if self._index < len(self._segments):
            segment = self._segments[self._index].segment
            self._first, self._next = segment.first, segment.next
        else:
            self._first = self._next = _BEHIND
