"""Reads once more what does not verify, record by record: to say which record it is."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import closing
from itertools import islice

from rollwire.schemas.errors import ArchiveCorrupt, LogError, ObjectMissing
from rollwire.streams.archive.chain import Segment
from rollwire.streams.archive.leaves import leaf_of_fields
from rollwire.streams.archive.marks import MARK_BYTES, Mark
from rollwire.streams.archive.stretches import Archive
from rollwire.streams.archive.verify_read import Extent
from rollwire.streams.seams.clock import Clock
from rollwire.streams.seams.log import Log, Record, TopicPartition
from rollwire.streams.seams.scan import Range, read_ranges

_FAR = 20_000  # offsets that are read over rather than jumped over: a reader that starts takes as long


class LookAgain:
    """Segments of a partition are asked for in their order. `close` when nothing is asked any more."""

    def __init__(
        self,
        log: Log,
        archive: Archive | None,
        extents: Mapping[TopicPartition, Extent],
        clock: Clock | None,
    ) -> None:
        self._log = log
        self._archive = archive
        self._extents = extents
        self._clock = clock
        self._at: TopicPartition | None = None
        self._position = 0
        self._coming: Generator[Record, None, None] | None = None
        self._ahead: Record | None = None

    def in_log(self, segment: Segment) -> list[Mark]:
        at = TopicPartition(segment.topic, segment.partition)
        extent = self._extents.get(at)
        if extent is None:
            return []
        if at != self._at or not self._position <= segment.first <= self._position + _FAR:
            self.close()
            self._at = at
            self._coming = self._reading(at, Range(max(segment.first, extent.begin), extent.end))
        found: list[Mark] = []
        try:
            while True:
                record = self._ahead or (next(self._coming, None) if self._coming is not None else None)
                self._ahead = record
                if record is None or record.offset >= segment.next:
                    break
                self._ahead = None
                if record.offset >= segment.first:
                    found.append(_mark(record))
        except LogError:
            self.close()  # gone meanwhile: what was there tells what can be told
        self._position = segment.next
        return found

    def in_archive(self, segment: Segment) -> list[Mark]:
        if self._archive is None:
            return []
        at = TopicPartition(segment.topic, segment.partition)
        found: list[Mark] = []
        try:
            position = self._archive.after(at, segment.first)
            while position is not None and position < segment.next:
                found.extend(map(_mark, self._archive.records(at, position, segment.next)))
                while (stretch := self._archive.covering(at, position)) is not None:
                    position = stretch.next
                position = self._archive.after(at, position)  # behind the hole
        except (ArchiveCorrupt, ObjectMissing):
            return found  # a finding of its own
        return found

    def records(self, at: TopicPartition, offset: int) -> list[Record]:
        """The first two of the log from `offset` on."""
        extent = self._extents.get(at)
        found: list[Record] = []
        if extent is None:
            return found
        try:
            with closing(self._reading(at, Range(offset, min(offset + 64, extent.end)))) as coming:
                found.extend(islice(coming, 2))
        except LogError:
            return []  # gone meanwhile: the finding stands without what it would have told
        return found

    def archived(self, at: TopicPartition, offset: int) -> Record | None:
        if self._archive is None:
            return None
        try:
            return next(self._archive.records(at, offset, offset + 1), None)
        except (ArchiveCorrupt, ObjectMissing):
            return None

    def close(self) -> None:
        if self._coming is not None:
            self._coming.close()
        self._at = self._ahead = self._coming = None

    def _reading(self, at: TopicPartition, range_: Range) -> Generator[Record, None, None]:
        with closing(read_ranges(self._log, {at: range_}, clock=self._clock)) as coming:
            for batch in coming:
                yield from batch


def _mark(record: Record) -> Mark:
    leaf = leaf_of_fields(record.offset, record.timestamp_ms, record.key, record.headers, record.value)
    return Mark(record.offset, leaf[:MARK_BYTES])
