"""Planned ranges of one topic, read as batches of one partition and hour, up to the planned ends and no further."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import attrgetter

from rollwire.consumers.audit.lake_plan import Lake
from rollwire.streams.seams.clock import Clock
from rollwire.streams.seams.log import Log, Reader, Record, TopicPartition, TransactionalWriter, Writer
from rollwire.streams.seams.scan import Lost, Patchy, scan_batches


class BoundedLog:
    """A log that ends where somebody planned it; a partition without a plan is empty."""

    def __init__(self, log: Log, ends: Mapping[TopicPartition, int]) -> None:
        self._log = log
        self._ends = ends

    def reader(self) -> Reader:
        return self._log.reader()

    def writer(self) -> Writer:
        return self._log.writer()

    def transactional_writer(self, transactional_id: str, timeout_s: float = 60.0) -> TransactionalWriter:
        return self._log.transactional_writer(transactional_id, timeout_s)

    def partitions(self, topic: str) -> int:
        """As many as are planned."""
        return 1 + max((at.partition for at in self._ends if at.topic == topic), default=-1)

    def committed(self, group: str, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
        return self._log.committed(group, partitions)

    def beginning_offsets(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
        return self._log.beginning_offsets(partitions)

    def end_offsets(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
        return {at: self._ends.get(at, 0) for at in partitions}

    def written_offsets(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
        return self.end_offsets(partitions)

    def readable_from(self, partition: TopicPartition, position: int) -> int | None:
        if isinstance(self._log, Patchy):
            return self._log.readable_from(partition, position)
        return max(position, self._log.beginning_offsets([partition])[partition])

    def close(self) -> None:
        """The log is closed by who made it."""


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
    if not ends:
        return
    bounded = BoundedLog(log, ends)
    for batch in scan_batches(bounded, (topic,), start=starts, lost=lost, clock=clock):
        for partition, run in groupby(batch, attrgetter("partition")):
            at = TopicPartition(topic, partition)
            records = [record for record in run if record.offset < ends.get(at, 0) and in_time(lake, record)]
            if records:
                yield at, records


def in_time(lake: Lake, record: Record) -> bool:
    return (lake.from_ms is None or record.timestamp_ms >= lake.from_ms) and (
        lake.to_ms is None or record.timestamp_ms < lake.to_ms
    )
