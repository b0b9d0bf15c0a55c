"""A log whose `packed-batches` are derived anew where retention took them: at the offsets at which they were consumed.

`train-steps` says where each step's plan stood, so a learner reads derived plans as it read the recorded ones. Everything
else is the log's own, and so are plans that it still has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from rollwire.consumers.audit.rebuild_past import Past
from rollwire.consumers.trainer.history import BATCHES
from rollwire.schemas.errors import OffsetLost
from rollwire.schemas.records import OffsetRange, PackedBatch, TrainStep
from rollwire.streams.emit import outgoing
from rollwire.streams.seams.forwarding import ForwardingLog, ForwardingReader
from rollwire.streams.seams.log import Log, Reader, Record, TopicPartition

Derive = Callable[[int, int], Iterator[tuple[PackedBatch, ...]]]
"""The plans of the steps from the first to the last of two, the last included: of each step one slice a rank."""


class DerivedPlansLog(ForwardingLog):
    """`derive` is asked when a plan is read that `log` has no more."""

    def __init__(self, log: Log, past: Past, derive: Derive) -> None:
        super().__init__(log)
        self._log = log
        self._past = past
        self._derive = derive

    def derives(self) -> bool:
        """Whether there is a step whose plan the log has no more."""
        consumed = [one for step in self._past.steps.values() for one in step.consumed]
        at = {TopicPartition(one.topic, one.partition) for one in consumed}
        begins = self._log.beginning_offsets(sorted(at))
        return any(one.start < begins[TopicPartition(one.topic, one.partition)] for one in consumed)

    def beginning_offsets(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
        found = super().beginning_offsets(partitions)
        for step in self._past.steps.values():
            for one in step.consumed:
                at = TopicPartition(one.topic, one.partition)
                if at in found:
                    found[at] = min(found[at], one.start)
        return found

    def reader(self) -> Reader:
        return _DerivingReader(super().reader(), self)

    def kept_from(self, partition: TopicPartition) -> int:
        """Where the log itself begins."""
        return self._log.beginning_offsets([partition])[partition]

    def steps_from(self, partition: TopicPartition, offset: int) -> Iterator[tuple[TrainStep, OffsetRange]]:
        """The steps that trained, from the one whose plan stood at `offset` on, up to the next revert."""
        began = False
        for step in self._past.steps.values():
            mine = next((r for r in step.consumed if r.partition == partition.partition), None)
            if mine is None or (not began and mine.start != offset):
                continue
            event = self._past.versions.get(step.version)
            if event is not None and event.reverts_to is not None:
                return
            began = True
            yield step, mine

    def derived(self, partition: TopicPartition, offset: int) -> Iterator[Record]:
        """The plans from `offset` on that the log has no more."""
        kept = self.kept_from(partition)
        wanted = [(step, mine) for step, mine in self.steps_from(partition, offset) if mine.start < kept]
        if not wanted:
            raise OffsetLost(
                f"{BATCHES}[{partition.partition}] begins at {kept}, and no step says what stood at {offset}"
            )
        plans = self._derive(wanted[0][0].step, wanted[-1][0].step)
        for (_, mine), slices in zip(wanted, plans, strict=True):
            yield _record(slices[partition.partition], mine)


class _DerivingReader(ForwardingReader):
    """Of one partition of `packed-batches` as `PackedBatchReader` reads it, or of others as they are."""

    def __init__(self, inner: Reader, log: DerivedPlansLog) -> None:
        super().__init__(inner)
        self._log = log
        self._plans: Iterator[Record] | None = None
        self._at: dict[TopicPartition, int] = {}

    def assign(self, positions: Mapping[TopicPartition, int]) -> None:
        self._plans = None
        for partition, offset in positions.items():
            if partition.topic == BATCHES and offset < self._log.kept_from(partition):
                self._plans, self._at = self._log.derived(partition, offset), {partition: offset}
                return
        super().assign(positions)

    def poll(self, max_records: int, timeout_s: float) -> list[Record]:
        if self._plans is not None:
            record = next(self._plans, None)
            if record is not None:
                self._at = {TopicPartition(record.topic, record.partition): record.offset + 1}
                return [record]
            self._plans = None
            super().assign(self._at)
        return super().poll(max_records, timeout_s)

    def positions(self) -> dict[TopicPartition, int]:
        return super().positions() if self._plans is None else dict(self._at)


def _record(batch: PackedBatch, stood: OffsetRange) -> Record:
    made = outgoing(batch, source="rollwire/audit", time_us=batch.cut.clock_us)
    return Record(
        topic=BATCHES,
        partition=stood.partition,
        offset=stood.end - 1,
        timestamp_ms=batch.cut.clock_us // 1_000,
        key=made.key,
        value=made.value,
        headers=made.headers,
    )
