"""Copies sealed segments of one partition into stretches. What is not what was sealed is never put into the archive."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import IO, Final, NamedTuple

from rollwire.streams.archive.chain import Segment
from rollwire.streams.archive.layout import stretch_key
from rollwire.streams.archive.leaves import Content, encode_record
from rollwire.streams.archive.objects import STRETCH_BYTES, StretchWriter, content_digest
from rollwire.streams.archive.plan_copy import Todo
from rollwire.streams.seams.clock import Clock
from rollwire.streams.seams.log import Log, Record, TopicPartition
from rollwire.streams.seams.scan import Range, read_ranges
from rollwire.streams.seams.store import ObjectStore

_FULL: Final = STRETCH_BYTES * 3 // 4  # a stretch that has this much ends with its segment
_IN_MEMORY: Final = 64 * 1024 * 1024  # of what waits for its segment to be checked; more goes to disk

Put = Callable[[str, int, int], None]
"""Told of every object that was made: its key, its records, its bytes."""


class Differs(NamedTuple):
    """A segment whose records in the log are not those that were sealed."""

    segment: Segment
    records: int  # that were read


class _Check:
    """Adds up the records of segments, one segment after the other."""

    def __init__(self, segments: tuple[Segment, ...]) -> None:
        self._segments = iter(segments)
        self._content = Content()
        self.at: Segment | None = next(self._segments, None)

    def add(self, offset: int, body: bytes) -> Segment | Differs | None:
        """The segment that ends with this record, or does not have it."""
        segment = self.at
        if segment is None or offset >= segment.next:
            return None if segment is None else Differs(segment, self.count)
        self._content.take_encoded(body)
        return self._judge(segment) if offset == segment.next - 1 else None

    def _judge(self, segment: Segment) -> Segment | Differs:
        if not segment.holds(self._content.digest(), self.count):
            return Differs(segment, self.count)
        self._content = Content()
        self.at = next(self._segments, None)
        return segment

    @property
    def count(self) -> int:
        return self._content.records


class _Held(NamedTuple):
    key: str
    records: int
    at: int  # in the file
    size: int


class _Stretches:
    """Stretches as they fill up. They are held until their last segment is checked, then created in the store."""

    def __init__(
        self, store: ObjectStore, name: str, at: TopicPartition, first: int, span_ms: int | None, put: Put
    ) -> None:
        self._store = store
        self._name = name
        self._at = at
        self._span_ms = span_ms
        self._put = put
        self._first = first
        self._next = first  # behind the last record
        self._writer = StretchWriter(at, first)
        self._held: list[_Held] = []
        self._file: IO[bytes] = tempfile.SpooledTemporaryFile(_IN_MEMORY)  # noqa: SIM115 (closed by `close`)

    def add(self, offset: int, timestamp_ms: int, body: bytes) -> None:
        if not self._writer.takes(body):
            self._end(self._next)
        self._writer.add(offset, timestamp_ms, body)
        self._next = offset + 1

    def checked(self, upto: int, *, last: bool = False, newest_ms: int = 0) -> None:
        """Everything below `upto` is what was sealed. `last`: nothing follows; else what follows goes up to `newest_ms`."""
        writer = self._writer
        old = self._span_ms is not None and newest_ms - writer.oldest_ms >= self._span_ms
        if writer.records and (last or old or writer.plain >= _FULL):
            self._end(upto)
        for held in self._held:
            self._file.seek(held.at)
            data = self._file.read(held.size)
            if self._store.create(held.key, data):
                self._put(held.key, held.records, held.size)
        self._held.clear()
        self._file.seek(0)
        self._file.truncate()

    def close(self) -> None:
        self._file.close()

    def _end(self, next: int) -> None:
        data = self._writer.finish(next)
        key = stretch_key(self._name, self._at, self._first, next, content_digest(data))
        at = self._file.seek(0, 2)
        self._file.write(data)
        self._held.append(_Held(key, self._writer.records, at, len(data)))
        self._first = next
        self._writer = StretchWriter(self._at, next)


def copy_segments(
    log: Log,
    store: ObjectStore,
    *,
    name: str,
    at: TopicPartition,
    todo: Todo,
    end: int,
    span_ms: int | None,
    clock: Clock,
    stop: threading.Event,
    put: Put,
    progress: Callable[[int], None],
) -> Differs | None:
    """Copies `todo`, as far as it is right and `stop` is not set; the first segment that differs.

    `end`: up to there the last stretch reaches where no record follows it, the stable end of the partition, or the first of
    what is sealed next. `span_ms`: the
    oldest and the newest record of a stretch are closer together than this, where segments allow it.
    """
    check = _Check(todo.segments)
    with closing(_Stretches(store, name, at, todo.write_from, span_ms, put)) as stretches:
        for record in _records(log, at, todo.segments[0].first, end, clock):
            if check.at is None:
                # What lies between the last segment and this record holds none: the stretch reaches up to it.
                stretches.checked(record.offset, last=True)
                return None
            body = encode_record(record)
            if todo.write_from <= record.offset < check.at.next:
                stretches.add(record.offset, record.timestamp_ms, body)
            judged = check.add(record.offset, body)
            if isinstance(judged, Differs):
                return judged
            if judged is not None:
                progress(judged.records)
                if check.at is not None:
                    stretches.checked(judged.next, last=stop.is_set(), newest_ms=check.at.last_ms)
                    if stop.is_set():
                        return None
        if check.at is not None:
            return Differs(check.at, check.count)
        stretches.checked(end, last=True)
    return None


def _records(log: Log, at: TopicPartition, first: int, end: int, clock: Clock) -> Iterator[Record]:
    for batch in read_ranges(log, {at: Range(first, end)}, clock=clock):
        yield from batch
