"""Reads stretches of topics once, from their beginning to where they end now: for auditors, ledgers and restarts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rollwire.schemas.errors import DeadlineExceeded
from rollwire.streams.seams.clock import Clock, SystemClock
from rollwire.streams.seams.log import Log, Record, TopicPartition


def scan(
    log: Log,
    topics: Sequence[str],
    *,
    start: Mapping[TopicPartition, int] | None = None,
    patience_s: float = 30.0,
    clock: Clock | None = None,
    hidden: bool = False,
) -> Iterator[Record]:
    """All records of `topics` from `start` (a partition that is not named: its beginning) up to the end offsets at
    the time of the call, in order within each partition.

    `hidden`: what somebody's open transaction hides is waited for. Whoever must not miss what he committed himself asks
    for it: it may stand behind such a transaction.

    Raises `DeadlineExceeded` when no record and no progress comes for `patience_s` seconds.
    """
    clock = clock or SystemClock()
    partitions = [TopicPartition(topic, p) for topic in topics for p in range(log.partitions(topic))]
    ends = log.written_offsets(partitions) if hidden else log.end_offsets(partitions)
    begins = {**log.beginning_offsets(partitions), **(start or {})}
    open_ = {p: begins[p] for p in partitions if begins[p] < ends[p]}
    if not open_:
        return
    reader = log.reader()
    try:
        reader.assign(open_)
        deadline = clock.monotonic_s() + patience_s
        while open_:
            before = dict(open_)
            for record in reader.poll(5_000, 0.5):
                if record.offset < ends[TopicPartition(record.topic, record.partition)]:
                    yield record
            # Control records sit between the last event and the end, so the position tells, not the last offset.
            open_ = {p: at for p, at in reader.positions().items() if p in open_ and at < ends[p]}
            if open_ != before:
                deadline = clock.monotonic_s() + patience_s
            elif clock.monotonic_s() > deadline:
                where = ", ".join(f"{p.topic}[{p.partition}] at {at} of {ends[p]}" for p, at in open_.items())
                raise DeadlineExceeded(
                    f"no progress for {patience_s:g} s while reading {where}: is the broker up?"
                )
    finally:
        reader.close()
