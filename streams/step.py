"""The step: a pure state machine between input events and output records. `rollwire.streams.runtime` drives it.

A step never reads a clock, a log or a store: events, positions and the time come in, records go out. So the same
object runs live, in an audit replay and in a seeded simulation.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple, Protocol

from rollwire.schemas.errors import Refused
from rollwire.schemas.records import Event
from rollwire.streams.seams.log import Outgoing, Record, TopicPartition


class Taken(NamedTuple):
    """A record as a step takes it."""

    record: Record
    event: Event | Refused | None  # `Refused`: what the codec said of it; None: a delete on a compacted topic


class Step(Protocol):
    """One instance lives as long as one producer: after any doubt it is thrown away and built anew from the log.

    Order of calls: `restore` for what stands in `changelogs`, then `start` once, then `feed` and `tick` as they come.

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

    def restore(self, taken: Taken) -> None: ...

    def start(self, committed: Mapping[TopicPartition, int], read: Mapping[TopicPartition, int]) -> None:
        """`committed` has every input; `read` only those for which a mark was ever written."""
        ...

    def feed(self, taken: Sequence[Taken], clock_us: int) -> list[Outgoing]:
        """Takes events, in order within a partition, and returns what follows from them. Never raises `Refused`: what
        was refused becomes a dead letter here, since only the step knows whether it was written before."""
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
