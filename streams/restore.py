"""Restoring a step: its memories to their ends, each read the way the step asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from rollwire.schemas.errors import DeadlineExceeded, LogUnavailable, OffsetLost
from rollwire.streams.seams.clock import Clock
from rollwire.streams.seams.log import Log, Reader, Record, TopicPartition
from rollwire.streams.step import Changelog, Marked, Step, Tail, Taken

_BATCH: Final = 5_000
_FIRST_STRETCH: Final = 16  # records of a tail; each further stretch is four times as long


def restore(
    log: Log,
    reader: Reader,
    step: Step,
    take: Callable[[Record], Taken],
    marks: Mapping[TopicPartition, int],
    *,
    idle_s: float,
    stall_s: float,
    clock: Clock,
) -> dict[TopicPartition, int]:
    """Feeds `step` what stands in its memories; returns the offset that each was read to.

    `marks`: where those that are `Marked` begin. Raises `DeadlineExceeded` when no progress comes for `stall_s`, and
    `LogUnavailable` where retention shortens a memory meanwhile: begin again.
    """
    reading = _Reading(reader, idle_s, stall_s, clock)
    partitions = [memory.partition for memory in step.memories]
    ends, begins = log.end_offsets(partitions), log.beginning_offsets(partitions)
    # Others write into a topic with marks too. What one of them has open there hides what this step committed behind it,
    # so its end is waited for; the other memories have no other writer whose transaction could be open now.
    ends |= log.written_offsets([memory.partition for memory in step.memories if isinstance(memory, Marked)])
    start: dict[TopicPartition, int] = {}
    for memory in step.memories:
        partition = memory.partition
        match memory:
            case Changelog():
                start[partition] = begins[partition]
            case Marked():
                start[partition] = max(marks.get(partition, ends[partition]), begins[partition])
            case Tail():
                continue
    reading.read(start, ends, lambda record: step.restore(take(record)))
    for memory in step.memories:
        if isinstance(memory, Tail):
            begin, end = begins[memory.partition], ends[memory.partition]
            # Control records and what others wrote may fill any stretch, so the stretches grow.
            low, length = end, _FIRST_STRETCH
            while low > begin and not memory.enough():
                high, low = low, max(begin, low - length)
                reading.read(
                    {memory.partition: low},
                    {memory.partition: high},
                    lambda record: step.restore(take(record)),
                )
                length *= 4
    return {partition: max(ends[partition], begins[partition]) for partition in partitions}


class _Reading:
    """Reads stretches with one reader, each wait with a deadline."""

    def __init__(self, reader: Reader, idle_s: float, stall_s: float, clock: Clock) -> None:
        self._reader = reader
        self._idle_s = idle_s
        self._stall_s = stall_s
        self._clock = clock

    def read(
        self,
        start: Mapping[TopicPartition, int],
        ends: Mapping[TopicPartition, int],
        each: Callable[[Record], None],
    ) -> None:
        """Every record from `start` up to `ends`, in order within a partition."""
        left = {p: at for p, at in start.items() if at < ends[p]}
        if not left:
            return
        self._reader.assign(left)
        deadline = self._clock.monotonic_s() + self._stall_s
        while any(at < ends[p] for p, at in left.items()):
            for record in self._poll():
                if record.offset < ends[TopicPartition(record.topic, record.partition)]:
                    each(record)
            before, left = left, self._reader.positions()  # stands behind control records too (C40)
            if left != before:
                deadline = self._clock.monotonic_s() + self._stall_s
            elif self._clock.monotonic_s() > deadline:
                where = ", ".join(f"{p.topic}[{p.partition}] at {at} of {ends[p]}" for p, at in left.items())
                raise DeadlineExceeded(f"no progress for {self._stall_s:g} s while reading {where}")

    def _poll(self) -> list[Record]:
        try:
            return self._reader.poll(_BATCH, self._idle_s)
        except OffsetLost as lost:
            # It began where the log begins: retention has moved that on since, and took nothing that is needed.
            raise LogUnavailable(f"a memory was shortened while it was read: {lost}") from lost
