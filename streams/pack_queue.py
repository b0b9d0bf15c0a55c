"""What `pack` has read and not decided: by partition in order, by kind in order of arrival. Pure.

Two kinds of groups stand in one topic and leave it each at its own pace: those whose members are compared with one another, and
single answers of live traffic, which wait for a cohort. A partition's position is its first undecided record of either kind.
What is decided above it is decided out of order: `decided_above` says how far, since a restart meets it again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping

from rollwire.schemas.errors import PlanViolation, Refused
from rollwire.schemas.ids import opened_us
from rollwire.schemas.records import Group
from rollwire.streams.assemble_answer import BASELINE
from rollwire.streams.pack_judge import Facts
from rollwire.streams.seams.log import Record


class Entry:
    """One group that is not decided."""

    __slots__ = ("facts", "group", "live", "offset", "opened_us", "partition", "record", "timestamp_ms")

    def __init__(self, record: Record, group: Group, facts: Facts) -> None:
        self.partition = record.partition
        self.offset = record.offset
        self.timestamp_ms = record.timestamp_ms
        self.record: Record | None = record  # the raw bytes, while a quarantine is possible
        self.group = group
        self.facts = facts
        self.live = group.baseline == BASELINE
        self.opened_us = opened_us(group.group_id) if self.live else 0


class Unreadable:
    """One record that did not decode: refused when the position comes by it. It has no slot to give back, and a dead
    letter above the position would be written again after a restart."""

    __slots__ = ("record", "refused")

    def __init__(self, record: Record, refused: Refused) -> None:
        self.record = record
        self.refused = refused


class Waiting:
    """`positions`: where each partition is read from. `decided_below`: offsets below which all lies that was decided in
    earlier lives."""

    def __init__(self, positions: Mapping[int, int], decided_below: Mapping[int, int]) -> None:
        self.positions = dict(positions)
        self.read_to = dict(positions)
        self._decided_below = dict(decided_below)
        self._decided_to = dict(positions)  # behind the last record that was decided
        self._queues: dict[int, OrderedDict[int, Entry | Unreadable]] = {p: OrderedDict() for p in positions}
        self._counts = {False: 0, True: 0}

    def count(self, *, live: bool) -> int:
        return self._counts[live]

    def __len__(self) -> int:
        return self._counts[False] + self._counts[True]

    def __iter__(self) -> Iterator[Entry]:
        """Partition by partition, in order. What is decided on the way may go."""
        for queue in self._queues.values():
            for entry in list(queue.values()):
                if isinstance(entry, Entry):
                    yield entry

    def read(self, record: Record) -> None:
        """A record that comes next in its partition."""
        self.read_to[record.partition] = record.offset + 1

    def add(self, entry: Entry) -> None:
        self._queues[entry.partition][entry.offset] = entry
        self._counts[entry.live] += 1

    def add_unreadable(self, record: Record, refused: Refused) -> None:
        self._queues[record.partition][record.offset] = Unreadable(record, refused)

    def decided(self, partition: int, offset: int) -> None:
        """A record was decided, now or in an earlier life."""
        self._decided_to[partition] = max(self._decided_to[partition], offset + 1)

    def remove(self, entry: Entry) -> None:
        """Takes out an entry that is decided. Raises `PlanViolation` where it was before."""
        if self._queues[entry.partition].pop(entry.offset, None) is not entry:
            raise PlanViolation(f"record {entry.offset} of groups was to get a second fate")
        self._counts[entry.live] -= 1
        self.decided(entry.partition, entry.offset)

    def oldest(self, count: int, *, live: bool) -> list[Entry]:
        """The first `count` of a kind, a prefix of what of it waits in each partition. Timestamps are the producers' and
        may fall within a partition: there the highest so far counts, so that the merge keeps every partition's order."""
        keyed: list[tuple[int, int, int, Entry]] = []
        for partition, queue in self._queues.items():
            highest, found = 0, 0
            for entry in queue.values():
                if found == count:
                    break
                if isinstance(entry, Entry) and entry.live is live:
                    highest = max(highest, entry.timestamp_ms)
                    keyed.append((highest, partition, entry.offset, entry))
                    found += 1
        keyed.sort(key=lambda key: key[:3])
        return [entry for *_, entry in keyed[:count]]

    def advance(self) -> list[Unreadable]:
        """Moves every position to its first undecided record; what could not be read on the way."""
        unreadable: list[Unreadable] = []
        for partition, queue in self._queues.items():
            while queue:
                offset, first = next(iter(queue.items()))
                if isinstance(first, Entry):
                    break
                del queue[offset]
                unreadable.append(first)
                self.decided(partition, offset)
            self.positions[partition] = next(iter(queue)) if queue else self.read_to[partition]
        return unreadable

    @property
    def decided_above(self) -> dict[int, int]:
        """Partition -> the offset that its position has to reach before a restart need not know any fate that was given so
        far; only those that have not reached it. Fates of an earlier life count until reading has come by the last."""
        bounds: dict[int, int] = {}
        for partition, position in self.positions.items():
            bound = self._decided_to[partition]
            below = self._decided_below.get(partition, 0)
            if self.read_to[partition] < below:
                bound = max(bound, below)
            if bound > position:
                bounds[partition] = bound
        return bounds
