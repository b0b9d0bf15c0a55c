"""The step: a pure state machine between input records and output records. `rollwire.streams.runtime` drives it.

A step never reads a clock, a log or a store: records, positions and the time come in, records go out. So the same
object runs live, in an audit replay and in a seeded simulation.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from rollwire.streams.seams.log import Outgoing, Record, TopicPartition


class Step(Protocol):
    """One instance lives as long as one producer: after any doubt it is thrown away and built anew from the log.

    Order of calls: `restore` for every record of `changelogs`, then `start` once, then `feed` and `tick` as they come.

    Two offsets per input. *Committed*: what lies below is not needed any more. *Read*: what lies below has been
    decided as far as it could be, and everything that followed from it has been written. After a restart, records
    between the two come again: they rebuild the state, and must not lead to a second output.
    """

    @property
    def inputs(self) -> Sequence[TopicPartition]: ...

    @property
    def changelogs(self) -> Sequence[TopicPartition]:
        """Read from their beginning to their end before the inputs."""
        ...

    def restore(self, record: Record) -> None: ...

    def start(self, committed: Mapping[TopicPartition, int], read: Mapping[TopicPartition, int]) -> None:
        """`committed` has every input; `read` only those for which a mark was ever written."""
        ...

    def feed(self, records: Sequence[Record], clock_us: int) -> list[Outgoing]:
        """Takes records, in order within a partition, and returns what follows from them. Never raises `Refused`."""
        ...

    def tick(self, clock_us: int, at_end: Collection[TopicPartition]) -> list[Outgoing]:
        """Lets time pass. `at_end`: the inputs that were read to their end *after* the clock showed `clock_us`."""
        ...

    def due_us(self) -> int | None:
        """When `tick` next has something to do; None = only records can change something."""
        ...

    def read(self) -> dict[TopicPartition, int]:
        """The next offset to read of every input."""
        ...

    def committable(self) -> dict[TopicPartition, int]:
        """The offset of every input below which nothing is needed any more."""
        ...
