"""A join's return to where earlier owners stood: what is new waits until everything that they had read is read again. Pure.

Inputs are read each at its own pace. A new owner that took new records of one input before it had the old ones of
another would commit a read position on both sides that no owner ever held together; the next one would take for decided
what nobody could decide.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from rollwire.streams.seams.log import TopicPartition
from rollwire.streams.step import Taken


class CatchUp:
    """From `committed` to `read` (see `Step.start`), of all inputs together."""

    def __init__(self, committed: Mapping[TopicPartition, int], read: Mapping[TopicPartition, int]) -> None:
        self._marks = {p: read.get(p, 0) for p in committed}
        self._behind = {p for p, at in committed.items() if at < self._marks[p]}
        self._held: list[Taken] = []

    def __bool__(self) -> bool:
        """Whether it goes on."""
        return bool(self._behind)

    def admit(self, taken: Sequence[Taken]) -> Sequence[Taken]:
        """What may be taken now, in order within each partition: known records at once, new ones at the end of it."""
        if not self._behind:
            return taken
        admitted: list[Taken] = []
        for one in taken:
            record = one.record
            partition = TopicPartition(record.topic, record.partition)
            mark = self._marks[partition]
            if record.offset >= mark:
                self._held.append(one)
                continue
            admitted.append(one)
            if record.offset + 1 >= mark:
                self._behind.discard(partition)
        if not self._behind:
            admitted += self._held
            self._held = []
        return admitted

    def paused(self) -> Collection[TopicPartition]:
        """The inputs whose next records are new: nothing of them can be taken yet."""
        return [p for p in self._marks if p not in self._behind] if self._behind else ()

    def holds(self, partition: TopicPartition) -> bool:
        """Whether records of `partition` were read and not admitted."""
        return any((t.record.topic, t.record.partition) == partition for t in self._held)
