"""Planned ranges of one topic, read as batches of one partition and hour, up to the planned ends and no further."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import groupby
from operator import attrgetter

from rollwire.consumers.audit.lake_plan import Lake
from rollwire.streams.seams.clock import Clock
from rollwire.streams.seams.log import Log, Record, TopicPartition
from rollwire.streams.seams.scan import Lost, Range, read_ranges


def planned_batches(
    log: Log,
    topic: str,
    starts: Mapping[TopicPartition, int],
    ends: Mapping[TopicPartition, int],
    *,
    lake: Lake,
    lost: Callable[[Lost], None],
    clock: Clock | None = None,
) -> Iterator[tuple[TopicPartition, list[Record]]]:
    """Records of [starts, ends) in the times of the lake, in order within each partition."""
    limited = lake.from_ms is not None or lake.to_ms is not None
    ranges = {at: Range(starts[at], end) for at, end in ends.items()}
    for batch in read_ranges(log, ranges, lost=lost, clock=clock):
        for partition, run in groupby(batch, attrgetter("partition")):
            at, records = TopicPartition(topic, partition), list(run)
            if limited:
                records = [record for record in records if in_time(lake, record)]
            if records:
                yield at, records


def in_time(lake: Lake, record: Record) -> bool:
    return (lake.from_ms is None or record.timestamp_ms >= lake.from_ms) and (
        lake.to_ms is None or record.timestamp_ms < lake.to_ms
    )
