"""Reads many partitions of a history in a chosen order with bounded memory: each at its own pace, or merged by time.

Merged order is (broker timestamp, topic, partition, offset). Within a partition the offset decides: where a timestamp falls, the
highest so far counts.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple, Self

from rollwire.schemas.errors import DeadlineExceeded, OffsetLost
from rollwire.streams.seams.clock import Clock, SystemClock
from rollwire.streams.seams.log import Log, Record, TopicPartition
from rollwire.streams.seams.scan import Lost, unreadable

_BATCH: Final = 200
_HELD: Final = 1_000  # records of one partition that are held before its reading pauses


class Timed(NamedTuple):
    """A record and the merge's time, which never falls."""

    at_us: int
    record: Record


class Source:
    """The given partitions from `start` (else their beginnings) up to where they end at the time of the call.

    `lost` is told of offsets that can be read nowhere, and reading goes on behind them; without it they raise `OffsetLost`.
    Every method that reads raises `DeadlineExceeded` when no progress comes for `patience_s`. One thread.
    """

    def __init__(
        self,
        log: Log,
        partitions: Sequence[TopicPartition],
        *,
        start: Mapping[TopicPartition, int] | None = None,
        lost: Callable[[Lost], None] | None = None,
        stamped: Callable[[Record], Record] | None = None,
        patience_s: float = 30.0,
        clock: Clock | None = None,
    ) -> None:
        """`stamped` gives records another time than the broker's, before they are merged."""
        self._log = log
        self._stamped = stamped
        self._lost = lost
        self._patience_s = patience_s
        self._clock = clock or SystemClock()
        self.ends = log.end_offsets(partitions) if partitions else {}
        self.begins = {**log.beginning_offsets(partitions), **(start or {})} if partitions else {}
        self._held: dict[TopicPartition, deque[Record]] = {p: deque() for p in partitions}
        self._at = {p: self.begins[p] for p in partitions}
        self._full: set[TopicPartition] = set()
        self._reader = log.reader()
        self._assign()

    def close(self) -> None:
        self._reader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def peek(self, partition: TopicPartition) -> Record | None:
        """The next record of a partition; None at its end."""
        held = self._held[partition]
        deadline = self._clock.monotonic_s() + self._patience_s
        while not held and self._at[partition] < self.ends[partition]:
            if self._poll(partition):
                deadline = self._clock.monotonic_s() + self._patience_s
            elif self._clock.monotonic_s() > deadline:
                raise DeadlineExceeded(
                    f"no progress for {self._patience_s:g} s while reading {partition.topic}[{partition.partition}] at "
                    f"{self._at[partition]} of {self.ends[partition]}: is the broker up?"
                )
        return held[0] if held else None

    def take(self, partition: TopicPartition) -> Record | None:
        """The same, and goes on behind it."""
        record = self.peek(partition)
        if record is not None:
            self._held[partition].popleft()
        return record

    def below(self, partition: TopicPartition, offset: int) -> Iterator[Record]:
        """Takes what stands below `offset`."""
        while (record := self.peek(partition)) is not None and record.offset < offset:
            self._held[partition].popleft()
            yield record

    def merged(self) -> Iterator[Timed]:
        """Everything that is left, by time."""
        heap: list[tuple[int, str, int, int, Record]] = []
        highest: dict[TopicPartition, int] = {}

        def push(partition: TopicPartition) -> None:
            record = self.take(partition)
            if record is not None:
                at = highest[partition] = max(highest.get(partition, 0), record.timestamp_ms)
                heapq.heappush(heap, (at, record.topic, record.partition, record.offset, record))

        for partition in self._held:
            push(partition)
        while heap:
            at_ms, topic, number, _, record = heapq.heappop(heap)
            yield Timed(at_ms * 1_000, record)
            push(TopicPartition(topic, number))

    # -- inside -------------------------------------------------------------------------------------------------

    def _poll(self, wanted: TopicPartition) -> bool:
        """Reads on; False where nothing came."""
        free = {p for p in self._full if len(self._held[p]) < _HELD // 2 or p == wanted}
        if free:
            self._full -= free
            self._reader.resume(sorted(free))
        before = dict(self._at)
        try:
            records = self._reader.poll(_BATCH, 0.5)
        except OffsetLost:
            found = [] if self._lost is None else unreadable(self._log, self._open(), self.ends)
            if not found or self._lost is None:
                raise
            for hole in found:
                self._lost(hole)
                self._at[hole.partition] = hole.next
            self._assign()
            return True
        for record in records:
            partition = TopicPartition(record.topic, record.partition)
            if self._at[partition] <= record.offset < self.ends[partition]:
                self._held[partition].append(record if self._stamped is None else self._stamped(record))
        self._at |= self._reader.positions()
        full = {p for p in self._open() if p not in self._full and len(self._held[p]) >= _HELD}
        if full:
            self._full |= full
            self._reader.pause(sorted(full))
        return self._at != before

    def _open(self) -> dict[TopicPartition, int]:
        return {p: at for p, at in self._at.items() if at < self.ends[p]}

    def _assign(self) -> None:
        self._full.clear()
        if open_ := self._open():
            self._reader.assign(open_)


def by_time(*merged: Iterator[Timed]) -> Iterator[Timed]:
    """Several merged sources as one, in the same order."""
    return heapq.merge(*merged, key=_order)


def _order(timed: Timed) -> tuple[int, str, int, int]:
    at_us, record = timed
    return at_us, record.topic, record.partition, record.offset
