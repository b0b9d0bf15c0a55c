"""The step: a pure state machine between input events and output records. `rollwire.streams.runtime` drives it.

A step never reads a clock, a log or a store: events, positions and the time come in, records go out. So the same
object runs live, in an audit replay and in a seeded simulation.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple, Protocol

from rollwire.schemas.errors import Refused
from rollwire.schemas.records import Event
from rollwire.streams.seams.log import Outgoing, Record, TopicPartition


class Taken(NamedTuple):
    """A record as a step takes it."""

    record: Record
    event: Event | Refused | None  # `Refused`: what the codec said of it; None: a delete on a compacted topic


class Changelog(NamedTuple):
    """A memory that is read from its beginning."""

    partition: TopicPartition


class Marked(NamedTuple):
    """A memory that is read from the step's mark: an offset that is committed with its outputs.

    The mark moves up to where the memory ended before the transaction in which the step wrote there, once a restart need
    not know what stands below: `needed()` says which committed offsets have to be reached before what was written there so far
    is not needed any more; empty = nothing is. Without a mark, nothing was ever written.
    """

    partition: TopicPartition
    needed: Callable[[], Mapping[TopicPartition, int]]


class Tail(NamedTuple):
    """A memory that is read from its end backwards, stretch by stretch, until `enough()`."""

    partition: TopicPartition
    enough: Callable[[], bool]


Memory = Changelog | Marked | Tail


class Step(Protocol):
    """One instance lives as long as one producer: after any doubt it is thrown away and built anew from the log.

    Order of calls: `restore` for what stands in `memories`, then `start` once, then `feed` and `tick` as they come.

    Two offsets per input. *Committed*: what lies below is not needed any more. *Read*: what lies below has been
    decided as far as it could be, and everything that followed from it has been written. After a restart, records
    between the two come again: they rebuild the state, and must not lead to a second output.
    """

    @property
    def inputs(self) -> Sequence[TopicPartition]: ...

    @property
    def memories(self) -> Sequence[Memory]:
        """Read to their ends before the inputs. An input that is a memory too goes on where that was read to."""
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

    def paused(self) -> Collection[TopicPartition]:
        """The inputs that are not to be read now, since there is no room for what they hold."""
        ...

    def read(self) -> dict[TopicPartition, int]:
        """The next offset to read of every input of which `start` is to be told."""
        ...

    def committable(self) -> dict[TopicPartition, int]:
        """The offset below which nothing is needed any more, of every input that is not a memory."""
        ...
