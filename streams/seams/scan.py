"""Reads stretches of topics once, by default from their beginning to where they end now: for auditors, ledgers and restarts."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Final, NamedTuple, Protocol, runtime_checkable

from rollwire.schemas.errors import DeadlineExceeded, OffsetLost
from rollwire.streams.seams.clock import Clock, SystemClock
from rollwire.streams.seams.log import Log, Record, TopicPartition
from rollwire.streams.seams.places import partitions_of


class Range(NamedTuple):
    """Offsets [first, next)."""

    first: int
    next: int


class Lost(NamedTuple):
    """Offsets [first, next) that can be read nowhere."""

    partition: TopicPartition
    first: int
    next: int


@runtime_checkable
class Patchy(Protocol):
    """A log that may have holes in its middle."""

    def readable_from(self, partition: TopicPartition, position: int) -> int | None:
        """The first offset from `position` on that can be read; None: there is none."""
        ...


BATCH: Final = 200
"""Records of one poll. Of 5,000, what the first ones brought into the caches is gone when they are looked at: reading 1 kB
records then takes three times as long."""

_POLL_BYTES: Final = 2 << 20
"""Bytes of values that a poll should bring at most, for the same reason; one record may be larger."""


def scan(
    log: Log,
    topics: Sequence[str],
    *,
    start: Mapping[TopicPartition, int] | None = None,
    patience_s: float = 30.0,
    clock: Clock | None = None,
    hidden: bool = False,
    lost: Callable[[Lost], None] | None = None,
) -> Iterator[Record]:
    """All records of `topics` from `start` (a partition that is not named: its beginning) up to the end offsets at
    the time of the call, in order within each partition.

    `hidden`: what somebody's open transaction hides is waited for. Whoever must not miss what he committed himself asks
    for it: it may stand behind such a transaction.

    `lost` is told of offsets that neither log nor archive have, and reading goes on behind them: audits name them and go on
    to the end. Without it they raise `OffsetLost`.

    Raises `DeadlineExceeded` when no record and no progress comes for `patience_s` seconds.
    """
    for records in scan_batches(
        log, topics, start=start, patience_s=patience_s, clock=clock, hidden=hidden, lost=lost
    ):
        yield from records


def scan_batches(
    log: Log,
    topics: Sequence[str],
    *,
    start: Mapping[TopicPartition, int] | None = None,
    patience_s: float = 30.0,
    clock: Clock | None = None,
    hidden: bool = False,
    lost: Callable[[Lost], None] | None = None,
) -> Iterator[list[Record]]:
    """The same as they come, as `read_ranges` gives them: for who does something with many at once."""
    partitions = partitions_of(log, topics)
    ends = log.written_offsets(partitions) if hidden else log.end_offsets(partitions)
    begins = {**log.beginning_offsets(partitions), **(start or {})}
    ranges = {p: Range(begins[p], ends[p]) for p in partitions}
    yield from read_ranges(log, ranges, patience_s=patience_s, clock=clock, lost=lost)


def read_ranges(
    log: Log,
    ranges: Mapping[TopicPartition, Range],
    *,
    patience_s: float = 30.0,
    clock: Clock | None = None,
    lost: Callable[[Lost], None] | None = None,
) -> Generator[list[Record], None, None]:
    """The records of `ranges`, `BATCH` at most at once and fewer where they are large, in order within each partition. No
    range may end behind what is decided.

    `lost` as of `scan`. Raises `DeadlineExceeded` when no record and no progress comes for `patience_s` seconds, and what a
    reader raises.
    """
    clock = clock or SystemClock()
    ends = {p: range_.next for p, range_ in ranges.items() if range_.first < range_.next}
    open_ = {p: ranges[p].first for p in ends}
    if not open_:
        return
    reader = log.reader()
    try:
        reader.assign(open_)
        deadline = clock.monotonic_s() + patience_s
        count = BATCH
        while open_:
            try:
                records = reader.poll(count, 0.5)
            except OffsetLost:
                holes = [] if lost is None else unreadable(log, open_, ends)
                if not holes or lost is None:
                    raise
                for hole in holes:
                    lost(hole)
                # What a reader had taken before it found the hole is read again.
                open_ |= {hole.partition: hole.next for hole in holes}
                open_ = {p: at for p, at in open_.items() if at < ends[p]}
                reader.assign(open_)
                continue
            count = next_count(records, count)
            positions = reader.positions()
            # Control records sit between the last event and the end, so the position tells, not the last offset.
            done = [p for p in open_ if positions[p] >= ends[p]]
            if any(positions[p] > ends[p] for p in done):
                # More was written since: it is of no range.
                records = [r for r in records if r.offset < ends[TopicPartition(r.topic, r.partition)]]
            if records:
                yield records
            before, open_ = open_, {p: positions[p] for p in open_ if positions[p] < ends[p]}
            if done and open_:
                reader.pause(done)
            if open_ != before:
                deadline = clock.monotonic_s() + patience_s
            elif clock.monotonic_s() > deadline:
                where = ", ".join(f"{p.topic}[{p.partition}] at {at} of {ends[p]}" for p, at in open_.items())
                raise DeadlineExceeded(
                    f"no progress for {patience_s:g} s while reading {where}: is the broker up?"
                )
    finally:
        reader.close()


def next_count(records: Sequence[Record], count: int) -> int:
    """How many records the next poll should bring, if they are as large as these, of which `count` were asked for."""
    if not records:
        return count
    nbytes = sum([len(record[5] or b"") for record in records])
    return (
        BATCH
        if nbytes * BATCH <= _POLL_BYTES * len(records)
        else max(1, _POLL_BYTES * len(records) // nbytes)
    )


def unreadable(
    log: Log, open_: Mapping[TopicPartition, int], ends: Mapping[TopicPartition, int]
) -> list[Lost]:
    """The positions that cannot be read, each up to where reading can go on."""
    found: list[Lost] = []
    begins = {} if isinstance(log, Patchy) else log.beginning_offsets(list(open_))
    for partition, position in open_.items():
        on = log.readable_from(partition, position) if isinstance(log, Patchy) else begins[partition]
        upto = ends[partition] if on is None else min(on, ends[partition])
        if upto > position:
            found.append(Lost(partition, position, upto))
    return found
