"""Reads ranges of partitions batch by batch: for who looks at every record, and to whom a call a record counts."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Final, NamedTuple

from rollwire.schemas.errors import DeadlineExceeded
from rollwire.streams.seams.clock import Clock, SystemClock
from rollwire.streams.seams.log import Log, Record, TopicPartition

_BATCH: Final = 200  # see `streams.seams.scan`


class Range(NamedTuple):
    """Offsets [first, next)."""

    first: int
    next: int


def batches(
    log: Log,
    ranges: Mapping[TopicPartition, Range],
    *,
    patience_s: float = 30.0,
    clock: Clock | None = None,
) -> Generator[list[Record], None, None]:
    """The records of `ranges`, in order within each partition. No range may end behind what is decided.

    Raises `DeadlineExceeded` where nothing comes for `patience_s` seconds, and what a reader raises.
    """
    clock = clock or SystemClock()
    open_ = {at: range_.first for at, range_ in ranges.items() if range_.first < range_.next}
    if not open_:
        return
    reader = log.reader()
    try:
        reader.assign(open_)
        deadline = clock.monotonic_s() + patience_s
        while open_:
            batch = reader.poll(_BATCH, 0.5)
            positions = reader.positions()
            done = [at for at in open_ if positions[at] >= ranges[at].next]
            if any(positions[at] > ranges[at].next for at in done):
                # More was written since: it is of no range.
                batch = [r for r in batch if r.offset < ranges[TopicPartition(r.topic, r.partition)].next]
            if batch:
                yield batch
            before, open_ = open_, {at: positions[at] for at in open_ if at not in done}
            if done and open_:
                reader.pause(done)
            if open_ != before:
                deadline = clock.monotonic_s() + patience_s
            elif clock.monotonic_s() > deadline:
                where = ", ".join(
                    f"{p.topic}[{p.partition}] at {at} of {ranges[p].next}" for p, at in open_.items()
                )
                raise DeadlineExceeded(
                    f"no progress for {patience_s:g} s while reading {where}: is the broker up?"
                )
    finally:
        reader.close()
