"""The log seam: what Rollwire needs of Apache Kafka, and nothing more.

Two implementations pass one behavioural suite (`tests/streams/seams/log_suite.py`): `log_memory.MemoryLog` and
`log_kafka.KafkaLog`. Topic names here are *without* the prefix; the adapter adds it.

Readers see committed records only (`read_committed`). Offsets may have holes (control records): never count on
`next == last + 1` (C40).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol, Self


class TopicPartition(NamedTuple):
    topic: str
    partition: int


class Noted(int):
    """An offset with a note (at most 4,096 bytes): committed as it is, and given back by `Log.committed`."""

    note: str

    def __new__(cls, offset: int, note: str) -> Self:
        made = super().__new__(cls, offset)
        made.note = note
        return made


class Record(NamedTuple):
    """A committed record as read."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]


class Outgoing(NamedTuple):
    """A record to write. `partition=None`: murmur2 of the key, as every Kafka client of ours does."""

    topic: str
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...] = ()
    partition: int | None = None


class Reader(Protocol):
    """Reads assigned partitions from explicit positions. Not thread-safe."""

    def assign(self, positions: Mapping[TopicPartition, int]) -> None:
        """Replace the assignment. Positions are offsets; negative values are an error."""
        ...

    def seek(self, partition: TopicPartition, offset: int) -> None: ...

    def pause(self, partitions: Sequence[TopicPartition]) -> None: ...

    def resume(self, partitions: Sequence[TopicPartition]) -> None: ...

    def poll(self, max_records: int, timeout_s: float) -> list[Record]:
        """Up to `max_records` records, in order within a partition; an empty list when `timeout_s` has passed,
        or earlier when positions moved past control records.

        Raises `OffsetLost` where a position is no longer in the log, `LogUnavailable` when the broker is away
        for longer than the adapter's patience.
        """
        ...

    def positions(self) -> dict[TopicPartition, int]:
        """The next offset of each assigned partition."""
        ...

    def close(self) -> None: ...


class Writer(Protocol):
    """Idempotent writes, acks=all. Thread-safe."""

    def write(self, records: Sequence[Outgoing], timeout_s: float = 30.0) -> None:
        """Returns when all are durable (law 2); raises `LogUnavailable` at the deadline."""
        ...

    def close(self) -> None: ...


class TransactionalWriter(Protocol):
    """One transactional producer. Any doubt about an outcome raises `TransactionUnknown`: the caller closes this
    writer, makes a new one and reads the committed offsets to learn what happened (law 4). `Fenced`: stop."""

    def begin(self) -> None: ...

    def write(self, records: Sequence[Outgoing]) -> None: ...

    def commit(
        self,
        group: str,
        offsets: Mapping[TopicPartition, int],
        timeout_s: float = 30.0,
        *,
        also: Mapping[str, Mapping[TopicPartition, int]] | None = None,
    ) -> None:
        """Commits the records together with `offsets` (next to read) for consumer group `group`, and the offsets of
        further groups in `also`."""
        ...

    def abort(self) -> None: ...

    def close(self) -> None: ...


class Log(Protocol):
    """A connection to a log. Makes readers and writers, answers questions about topics."""

    def reader(self) -> Reader: ...

    def writer(self) -> Writer: ...

    def transactional_writer(self, transactional_id: str, timeout_s: float = 60.0) -> TransactionalWriter:
        """Initialised: when this returns, the previous owner of the id is fenced and its transaction finished."""
        ...

    def partitions(self, topic: str) -> int: ...

    def committed(self, group: str, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
        """Committed offsets; a partition without one is absent. One with a note is a `Noted`."""
        ...

    def beginning_offsets(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, int]: ...

    def end_offsets(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
        """The last stable offsets: everything below is decided and readable."""
        ...

    def written_offsets(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
        """The ends of what is written, decided or not. A transaction of somebody else that is open hides what was
        committed behind it: whoever must see his own has to read up to here."""
        ...

    def close(self) -> None: ...


class Member(Protocol):
    """A place in a consumer group whose members share out partitions by `range`: of topics with equal counts, a member
    gets the same partitions of each. It reads nothing. Only `transactional_writer` may be called by other threads.
    """

    def poll(self, timeout_s: float) -> frozenset[TopicPartition]:
        """Keeps the place and returns what is assigned to it; call it at least every few seconds.

        When that changes, the `revoke` that the member was made with is called in here, and nobody else gets the
        partitions before it returns; unless the place was lost (the process stood still for too long), then they may
        have been somebody else's already. Raises `LogError` where the broker refuses the member.
        """
        ...

    def transactional_writer(self, transactional_id: str, timeout_s: float = 60.0) -> TransactionalWriter:
        """As `Log.transactional_writer`, but the broker takes offsets of the member's group only while the place is
        held: it is read anew for every commit. A commit without it raises `LogUnavailable`, and nothing is visible.
        """
        ...

    def close(self) -> None:
        """Gives the place up; what is held is revoked before."""
        ...


class HeldBack(NamedTuple):
    """A partition of which readers do not see what is written: a transaction is open there."""

    stable: int  # where readers stand
    written: int  # the end of what is written


class SharedLog(Log, Protocol):
    """A log that processes can share out among themselves."""

    def member(
        self, group: str, topics: Sequence[str], revoke: Callable[[frozenset[TopicPartition]], None]
    ) -> Member:
        """A new member of `group`, which reads `topics`. `revoke` lets go of partitions: see `Member.poll`."""
        ...

    def held_back(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, HeldBack]:
        """Those of `partitions` whose last stable offset stands behind what is written. Ordinary for a moment; for long,
        somebody died in a transaction. Raises `LogUnavailable`."""
        ...

    def openers(self, topic: str) -> tuple[str, ...]:
        """Transactional ids that have a transaction open on `topic`, as far as they can be learnt; for people to read."""
        ...
