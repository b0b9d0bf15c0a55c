"""Reads all topics of a log once and adds them up; a gap on a live log is believed only when it stays."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from rollwire.consumers.audit.hours import HourLedger
from rollwire.consumers.audit.hours_book import Book, Tally
from rollwire.consumers.audit.hours_judge import CONSUMERS, JOINED, LIVE
from rollwire.consumers.audit.hours_names import named
from rollwire.schemas.catalogue import TOPICS
from rollwire.streams.seams.clock import Clock, SystemClock
from rollwire.streams.seams.log import Log, Record, TopicPartition
from rollwire.streams.seams.places import existing, partitions_of
from rollwire.streams.seams.scan import Lost, scan

SETTLE_S: Final = 1.0
_COUNTS: Final = 3
_TOLD: Final = 5_000
_NOTHING: Final = 1 << 62  # from here on
# Against the flow, so that what an event was made from is read after it. What lies below a committed offset has left its
# trace already; only `groups-closed` and `group-fates` are looked for in topics that come after them.
_FLOW: Final = (
    "user-feedback",
    "groups-closed",
    "production-groups-closed",
    "group-fates",
    "groups",
    "packed-batches",
    "train-steps",
    "weight-versions",
    *JOINED,
)
ORDER: Final = (*(topic for topic in TOPICS if topic not in _FLOW), *_FLOW)

Told = Callable[[str, int], None]
"""Is told, again and again, how many more records of a topic were read."""


class Counted(NamedTuple):
    ledger: HourLedger
    records: int
    lost: tuple[Lost, ...]  # offsets that an event may have stood at, and that can be read nowhere
    absent: tuple[
        str, ...
    ]  # topics that are not there: a stack from before they were in the catalogue, or a loss


def count_hours(
    log: Log,
    prefix: str,
    *,
    settle_s: float = SETTLE_S,
    told: Told = lambda *_: None,
    patchy: bool = False,
    also: Callable[[Record], None] | None = None,
    clock: Clock | None = None,
) -> Counted:
    """Counts all topics of the catalogue. `prefix` is that of the consumer groups.

    On a live log the markers of one transaction reach its partitions one after the other, so a gap is believed only
    when it is still there after `_COUNTS` counts, `settle_s` apart. `patchy`: offsets that can be read nowhere and topics that
    are not there are named, and what lies below such offsets counts as removed; else they raise `OffsetLost` and
    `TopicMismatch`. `also` is told every record of the first count. Raises `DeadlineExceeded` when the log does not answer.
    """
    clock = clock or SystemClock()
    there, absent = _present(log) if patchy else (ORDER, ())
    count = _count(log, prefix, there, told, patchy, also, clock)
    pause = threading.Event()
    for _ in range(_COUNTS - 1):
        if count.tally.exact:
            break
        pause.wait(settle_s)
        count = _count(log, prefix, there, told, patchy, None, clock)

    def read(topic: str, start: Mapping[TopicPartition, int]) -> Iterator[Record]:
        if topic not in there:
            return iter(())
        if start:
            start = {**dict.fromkeys(partitions_of(log, [topic]), _NOTHING), **start}
        return scan(log, [topic], start=start, lost=_pass_over if patchy else None)

    return Counted(named(count.tally, read), count.records, count.lost, absent)


class _Count(NamedTuple):
    tally: Tally
    records: int
    lost: tuple[Lost, ...]


def _present(log: Log) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The topics that are there, and those that are not."""
    there = existing(log, ORDER)
    return tuple(there), tuple(topic for topic in ORDER if topic not in there)


def _count(
    log: Log,
    prefix: str,
    there: Sequence[str],
    told: Told,
    patchy: bool,
    also: Callable[[Record], None] | None,
    clock: Clock,
) -> _Count:
    committed: dict[TopicPartition, int] = {}
    live: dict[TopicPartition, int] = {}
    begins: dict[TopicPartition, int] = {}
    # The offsets first: whatever lies below them has left its trace in the topics by now.
    for topic, consumer in CONSUMERS.items():
        if topic in there:
            committed |= log.committed(f"{prefix}{consumer}", partitions_of(log, [topic]))
    topic, consumer, _ = LIVE
    if topic in there:
        live |= log.committed(f"{prefix}{consumer}", partitions_of(log, [topic]))
    for topic in there:
        begins |= log.beginning_offsets(partitions_of(log, [topic]))
    book = Book()
    lost: list[Lost] = []
    for topic in there:
        read = 0
        next_offset: dict[int, int] = {}
        for record in scan(log, [topic], lost=lost.append if patchy else None):
            if record.offset < next_offset.get(record.partition, 0):
                continue  # read again behind a hole
            next_offset[record.partition] = record.offset + 1
            book.add(record)
            if also is not None:
                also(record)
            read += 1
            if read == _TOLD:
                told(topic, read)
                read = 0
        told(topic, read)
    for hole in lost:
        begins[hole.partition] = max(hole.next, begins[hole.partition])
    return _Count(book.close(committed, begins, live, clock.now_us() // 1_000), book.records, tuple(lost))


def _pass_over(_: Lost) -> None:
    """Was named when the topics were counted."""
