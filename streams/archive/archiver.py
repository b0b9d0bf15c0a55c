"""Copies what is sealed into the archive, partition by partition. What is there is not copied again, whoever put it there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Final, NamedTuple

import structlog

from rollwire.schemas.catalogue import TOPICS
from rollwire.schemas.errors import OffsetLost, TopicMismatch
from rollwire.schemas.records import Position
from rollwire.streams.archive.chain import Segment
from rollwire.streams.archive.copying import Differs, copy_segments
from rollwire.streams.archive.log import compacted
from rollwire.streams.archive.plan_copy import Todo, to_copy
from rollwire.streams.archive.sealed import Sealed
from rollwire.streams.archive.stretches import Archive
from rollwire.streams.findings import Finding, Kind, at
from rollwire.streams.seams.clock import Clock
from rollwire.streams.seams.log import Log, TopicPartition
from rollwire.streams.seams.store import ObjectStore

SPANS: Final = 30
"""Where a topic is archived for a time only, a stretch holds at most this part of it: expiry takes whole stretches."""

Thinned = dict[TopicPartition, set[int]]
"""First offsets of segments that the broker compacted before they were copied: they never come back."""

_logger = structlog.get_logger("rollwire.archive")


class Copied(NamedTuple):
    """What one run of the archiver did."""

    stretches: int = 0
    records: int = 0
    stored_bytes: int = 0
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()  # what could not be copied, and is no fault
    waiting_ms: int | None = None  # when the oldest sealed record was written that is still to be copied

    def __add__(self, other: object) -> Copied:
        if not isinstance(other, Copied):
            return NotImplemented
        return Copied(
            self.stretches + other.stretches,
            self.records + other.records,
            self.stored_bytes + other.stored_bytes,
            self.findings + other.findings,
            self.notes + other.notes,
            min((ms for ms in (self.waiting_ms, other.waiting_ms) if ms is not None), default=None),
        )


def archive_ms(topic: str) -> int:
    """How long a topic is archived: -1 = for ever, 0 = not at all. One that the catalogue does not know: for ever."""
    return TOPICS[topic].archive_ms if topic in TOPICS else -1


def archive_sealed(
    log: Log,
    store: ObjectStore,
    *,
    name: str,
    sealed: Sealed,
    clock: Clock,
    stop: threading.Event,
    wait_s: float = 0.0,
    planned: Callable[[int], None] = lambda _records: None,
    progress: Callable[[int], None] = lambda _records: None,
    thinned: Thinned | None = None,
) -> Copied:
    """Copies the segments of `sealed` that no stretch has, until `stop`. `log` is the live one.

    Records are checked against the segments' digests on the way: a segment that differs is a finding, and is not copied.
    `wait_s`: of a partition nothing is copied before its oldest new record has this age, so that stretches are not small.
    `planned` is told how many records there are to be copied, `progress` how many were since it was told last. What is in
    `thinned` is not read again; more goes into it.

    Raises what log and store raise; what is copied by then stays, and is not copied again.
    """
    archive = Archive(store, name)
    thinned = {} if thinned is None else thinned
    done = Copied()
    now_ms = clock.now_us() // 1_000
    works = [
        _Work(
            partition,
            segments,
            kept,
            now_ms - kept if kept > 0 else -1,
            now_ms - round(wait_s * 1_000),
            thinned.setdefault(partition, set()),
        )
        for partition, segments in sorted(sealed.segments.items())
        if (kept := archive_ms(partition.topic))
    ]
    planned(sum(work.records(archive) for work in works))
    for work in works:
        if stop.is_set():
            break
        done += _copy_partition(log, store, archive, work, clock=clock, stop=stop, progress=progress)
    return done


class _Work(NamedTuple):
    """A partition to copy."""

    partition: TopicPartition
    segments: Sequence[Segment]
    kept: int  # `archive_ms`
    oldest_ms: int  # what is from before is over its time already
    ripe_ms: int  # what is from before waits no longer
    thinned: set[int]

    def todo(self, archive: Archive, without: Collection[int] = ()) -> Iterator[Todo]:
        def covered(position: int) -> int:
            while (stretch := archive.covering(self.partition, position)) is not None:
                position = stretch.next
            return position

        return to_copy(self.segments, covered, oldest_ms=self.oldest_ms, without=without)

    def records(self, archive: Archive) -> int:
        todo = list(self.todo(archive, self.thinned))
        ripe = todo and todo[0].segments[0].first_ms <= self.ripe_ms
        return sum(s.records for one in todo for s in one.segments) if ripe else 0


def _copy_partition(
    log: Log,
    store: ObjectStore,
    archive: Archive,
    work: _Work,
    *,
    clock: Clock,
    stop: threading.Event,
    progress: Callable[[int], None],
) -> Copied:
    done = Copied()
    partition, segments, kept = work.partition, work.segments, work.kept

    def put(key: str, records: int, size: int) -> None:
        nonlocal done
        done += Copied(1, records, size)
        _logger.info("archive.stretch", key=key, records=records, bytes=size)

    passed_over = set(work.thinned)  # first offsets
    while not stop.is_set():
        todo = next(work.todo(archive, passed_over), None)
        if todo is None:
            return done
        if todo.segments[0].first_ms > work.ripe_ms:
            return done + Copied(waiting_ms=todo.segments[0].first_ms)
        try:
            begin, end = _extent(log, partition)
        except TopicMismatch:
            return done + _note(
                f"{partition.topic} is not in the log any more: {_span(todo)} was not copied before"
            )
        gone = [s for s in todo.segments if s.first < begin]
        if gone:
            passed_over |= {s.first for s in gone}
            done += _note(f"{_span(Todo(tuple(gone), 0))} was gone from the log before it was copied")
            continue
        cut = [s for s in todo.segments if s.next > end]
        if cut:  # nobody may wait for what will never come
            passed_over |= {s.first for s in cut}
            done += _cut(cut[0], end)
            continue
        tail, had = todo.next == segments[-1].next, done.stretches
        try:
            differs = copy_segments(
                log,
                store,
                name=archive.name,
                at=partition,
                todo=todo,
                end=max(end, todo.next) if tail else todo.next,
                span_ms=max(1, kept // SPANS) if kept > 0 else None,
                clock=clock,
                stop=stop,
                put=put,
                progress=progress,
            )
        except OffsetLost:
            continue  # retention went on: what is left of it is found by the next look
        if differs is not None:
            passed_over.add(differs.segment.first)
            judged = _judged(differs)
            if not judged.findings:
                work.thinned.add(differs.segment.first)
            done += judged
        if done.stretches > had:
            archive.refresh([partition.topic])
    return done


def _extent(log: Log, partition: TopicPartition) -> tuple[int, int]:
    return log.beginning_offsets([partition])[partition], log.end_offsets([partition])[partition]


def _judged(differs: Differs) -> Copied:
    segment = differs.segment
    where = at(segment.topic, segment.partition, segment.first)
    if compacted(segment.topic) and differs.records < segment.records:
        return _note(
            f"{where}: {differs.records} of {segment.records} records are left; the broker compacted them before they were copied"
        )
    finding = Finding(
        kind=Kind.RECORD_CHANGED if differs.records >= segment.records else Kind.RECORDS_MISSING,
        where=where,
        detail=f"the segment up to {segment.next - 1:,} has {segment.records} sealed records, the log {differs.records}, and not "
        "the same: it is not archived; `rollwire audit verify` names the first that differs",
        position=Position(topic=segment.topic, partition=segment.partition, offset=segment.first),
    )
    return Copied(findings=(finding,))


def _cut(segment: Segment, end: int) -> Copied:
    """What is sealed is decided: a log that ends before it was cut, or made anew."""
    finding = Finding(
        kind=Kind.RECORDS_MISSING,
        where=at(segment.topic, segment.partition, segment.first),
        detail=f"the log ends at {end:,}, and from here on was not copied before: `rollwire audit verify` says what is gone",
        position=Position(topic=segment.topic, partition=segment.partition, offset=segment.first),
    )
    return Copied(findings=(finding,))


def _note(text: str) -> Copied:
    return Copied(notes=(text,))


def _span(todo: Todo) -> str:
    first = todo.segments[0]
    return f"{first.topic}[{first.partition}] from {first.first:,} to {todo.next - 1:,}"
