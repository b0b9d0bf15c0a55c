"""The in-memory twin of the log: what Kafka does to a reader, without Kafka.

It keeps the properties that bite: transactions with a last stable offset, control records that take an offset (C40),
fencing by epoch (C38), consumer-group offsets that become visible with their transaction, records that retention
removed (`trim`), and the key's partition by murmur2. Thread-safe; nothing outlives the object.

A transaction is decided at once, by its coordinator; its markers then travel to every partition and every group's offsets
on their own. By default they arrive at once; with `hold_markers` a simulation delivers them (`markers`, `deliver`), one
by one and in any order. Whoever must have them waits (`await_markers`): the next transaction of the same id, and whoever
asks for the offsets of a group.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

from rollwire.schemas.errors import (
    LogError,
    LogUnavailable,
    OffsetLost,
    TopicMismatch,
)
from rollwire.schemas.partitioner import partition_for
from rollwire.streams.seams.clock import Clock, SystemClock
from rollwire.streams.seams.log import (
    HeldBack,
    Outgoing,
    Reader,
    Record,
    TopicPartition,
    TransactionalWriter,
    Writer,
)
from rollwire.streams.seams.log_memory_write import (
    MemoryTransactionalWriter,
    MemoryWriter,
    Transaction,
    check_position,
)
from rollwire.streams.seams.member_memory import MemoryGroup, MemoryMember


class Marker(NamedTuple):
    """The end of a decided transaction on its way to one partition, or to the offsets of one group."""

    transaction: Transaction
    place: TopicPartition | str


class _Partition:
    """`entries[i]` is the record at offset `begin + i`; None = a control record or an aborted record."""

    def __init__(self) -> None:
        self.begin = 0
        self.entries: list[Record | None] = []

    @property
    def end(self) -> int:
        return self.begin + len(self.entries)


class GroupOffset(NamedTuple):
    group: str
    partition: TopicPartition


class MemoryLog:
    """A log with the given topics and partition counts. Record time is the clock's."""

    def __init__(
        self, partitions: Mapping[str, int], clock: Clock | None = None, *, hold_markers: bool = False
    ) -> None:
        self._clock: Clock = clock if clock is not None else SystemClock()
        self._hold_markers = hold_markers
        self._changed = threading.Condition(threading.RLock())
        self._counts = dict(partitions)
        self._partitions = {
            TopicPartition(topic, index): _Partition()
            for topic, count in partitions.items()
            for index in range(count)
        }
        self._transactions: list[Transaction] = []  # until the last marker of each has arrived
        self._epochs: dict[str, int] = {}
        self._committed: dict[GroupOffset, int] = {}
        self.groups: dict[str, MemoryGroup] = {}  # those that ever had members

    # -- the seam -----------------------------------------------------------------------------------------------

    def reader(self) -> Reader:
        return _MemoryReader(self)

    def writer(self) -> Writer:
        return MemoryWriter(self)

    def transactional_writer(self, transactional_id: str, timeout_s: float = 60.0) -> TransactionalWriter:
        return self.take_over(transactional_id, timeout_s)

    def take_over(self, transactional_id: str, timeout_s: float) -> MemoryTransactionalWriter:
        """`transactional_writer`, with the twin's own type."""
        with self._changed:
            epoch = self._fence(transactional_id)
            self.await_markers(self._of(transactional_id), timeout_s)
            return MemoryTransactionalWriter(self, transactional_id, epoch)

    def member(
        self, group: str, topics: Sequence[str], revoke: Callable[[frozenset[TopicPartition]], None]
    ) -> MemoryMember:
        with self._changed:
            at = self.groups.setdefault(group, MemoryGroup(group, self.partitions, self._changed))
        return at.join(topics, revoke, self.transactional_writer)

    def held_back(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, HeldBack]:
        with self._changed:
            return {
                p: HeldBack(self._stable(p), self._at(p).end)
                for p in partitions
                if self._stable(p) < self._at(p).end
            }

    def openers(self, topic: str) -> tuple[str, ...]:
        return tuple(
            t.transactional_id for t in self.transactions() if any(p.topic == topic for p in t.entries)
        )

    def partitions(self, topic: str) -> int:
        if topic not in self._counts:
            raise TopicMismatch(f"topic {topic!r} does not exist; create it with `rollwire topics apply`")
        return self._counts[topic]

    def committed(self, group: str, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
        with self._changed:
            self.await_markers(self._unstable(group, partitions), 10.0)
            if self._unstable(group, partitions):
                raise LogUnavailable(
                    f"the offsets of group {group!r} wait for a transaction that is not decided"
                )
            found = {p: self._committed.get(GroupOffset(group, p)) for p in partitions}
        return {p: offset for p, offset in found.items() if offset is not None}

    def beginning_offsets(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
        with self._changed:
            return {p: self._at(p).begin for p in partitions}

    def end_offsets(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
        with self._changed:
            return {p: self._stable(p) for p in partitions}

    def written_offsets(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
        with self._changed:
            return {p: self._at(p).end for p in partitions}

    def close(self) -> None:
        """Nothing to release."""

    # -- what a test does to a log ------------------------------------------------------------------------------

    def trim(self, partition: TopicPartition, before: int) -> None:
        """What retention does: records below `before` are gone."""
        with self._changed:
            at = self._at(partition)
            drop = min(max(before - at.begin, 0), len(at.entries))
            del at.entries[:drop]
            at.begin += drop

    def set_committed(self, group: str, partition: TopicPartition, offset: int) -> None:
        """What an administrator does: moves a group's offset."""
        with self._changed:
            self._committed[GroupOffset(group, partition)] = offset

    # -- what a simulation does to a log --------------------------------------------------------------------------

    def transactions(self) -> list[Transaction]:
        """Those that are open, or decided and not ended everywhere; oldest first."""
        with self._changed:
            return list(self._transactions)

    def markers(self) -> list[Marker]:
        """Those on their way, oldest transaction first."""
        with self._changed:
            return [
                Marker(transaction, place)
                for transaction in self._transactions
                if transaction.state != "open"
                for place in transaction.places
                if place not in transaction.ended
            ]

    def deliver(self, marker: Marker) -> None:
        """The marker arrives: what it ends becomes visible, or is gone."""
        transaction, place = marker
        with self._changed:
            if transaction.state == "open" or place in transaction.ended:
                raise LogError(f"no marker of {transaction.transactional_id!r} is on its way to {place}")
            transaction.ended.add(place)
            keep = transaction.state == "committed"
            if isinstance(place, str):
                for partition, offset in transaction.offsets[place].items() if keep else ():
                    self._committed[GroupOffset(place, partition)] = offset
            else:
                at = self._at(place)
                for offset in () if keep else transaction.entries[place]:
                    if offset >= at.begin:
                        at.entries[offset - at.begin] = None
                at.entries.append(None)  # the control record
            if len(transaction.ended) == len(transaction.places):
                self._transactions.remove(transaction)
            self._changed.notify_all()

    def time_out(self, transaction: Transaction) -> None:
        """What the coordinator does to a transaction that was open for too long: it is aborted, its owner fenced."""
        with self._changed:
            if transaction.state != "open":
                raise LogError(f"the transaction of {transaction.transactional_id!r} is decided")
            self._fence(transaction.transactional_id)

    def decide(self, transaction: Transaction, state: Literal["committed", "aborted"]) -> None:
        """What a request does that was on its way for long: it ends the transaction, if nothing else has."""
        with self._changed:
            if transaction in self._transactions and transaction.state == "open":
                self._decide(transaction, state)

    # -- how it waits; a simulation has its own ways --------------------------------------------------------------

    def await_markers(self, markers: Sequence[Marker], timeout_s: float) -> None:
        """Returns when `markers` have arrived. Raises `LogUnavailable` when they have not after `timeout_s`."""
        for marker in markers:
            if marker.place not in marker.transaction.ended:
                self.deliver(marker)

    def monotonic_s(self) -> float:
        return time.monotonic()

    def wait(self, seconds: float) -> None:
        """Until something changed, or `seconds` have passed. Called with the lock held."""
        self._changed.wait(seconds)

    # -- shared by readers and writers ----------------------------------------------------------------------------

    def _at(self, partition: TopicPartition) -> _Partition:
        at = self._partitions.get(partition)
        if at is None:
            raise TopicMismatch(f"{partition.topic}/{partition.partition} does not exist")
        return at

    def _stable(self, partition: TopicPartition) -> int:
        firsts = [
            t.entries[partition][0]
            for t in self._transactions
            if partition in t.entries and partition not in t.ended
        ]
        return min(firsts, default=self._at(partition).end)

    def _append(self, record: Outgoing) -> TopicPartition:
        count = self.partitions(record.topic)
        index = record.partition
        if index is None:
            # A record without a key goes anywhere; 0 keeps tests repeatable.
            index = 0 if record.key is None else partition_for(record.key, count)
        partition = TopicPartition(record.topic, index)
        at = self._at(partition)
        at.entries.append(
            Record(
                topic=record.topic,
                partition=index,
                offset=at.end,
                timestamp_ms=self._clock.now_us() // 1_000,
                key=record.key,
                value=record.value,
                headers=tuple(record.headers),
            )
        )
        return partition

    def _decide(self, transaction: Transaction, state: Literal["committed", "aborted"]) -> None:
        """The coordinator's decision; from now on nothing but markers can follow."""
        transaction.state = state
        if not transaction.places:
            self._transactions.remove(transaction)
        elif not self._hold_markers:
            for place in transaction.places:
                self.deliver(Marker(transaction, place))
        self._changed.notify_all()

    def _fence(self, transactional_id: str) -> int:
        """Raises the epoch and aborts what its owner had open; the new epoch."""
        epoch = self._epochs[transactional_id] = self._epochs.get(transactional_id, -1) + 1
        for transaction in list(self._transactions):
            if transaction.transactional_id == transactional_id and transaction.state == "open":
                self._decide(transaction, "aborted")
        return epoch

    def _of(self, transactional_id: str) -> list[Marker]:
        return [m for m in self.markers() if m.transaction.transactional_id == transactional_id]

    def _unstable(self, group: str, partitions: Sequence[TopicPartition]) -> list[Marker]:
        """Markers that an answer about `partitions` has to wait for; those of undecided transactions included."""
        return [
            Marker(transaction, group)
            for transaction in self._transactions
            if group in transaction.offsets
            and group not in transaction.ended
            and any(p in transaction.offsets[group] for p in partitions)
        ]


class _MemoryReader:
    def __init__(self, log: MemoryLog) -> None:
        self._log = log
        self._positions: dict[TopicPartition, int] = {}
        self._paused: set[TopicPartition] = set()

    def assign(self, positions: Mapping[TopicPartition, int]) -> None:
        for partition, offset in positions.items():
            check_position(partition, offset)
            self._log._at(partition)
        self._positions = dict(positions)
        self._paused.clear()

    def seek(self, partition: TopicPartition, offset: int) -> None:
        check_position(partition, offset)
        if partition not in self._positions:
            raise LogError(
                f"{partition.topic}/{partition.partition} is not assigned: assign it before seeking"
            )
        self._positions[partition] = offset

    def pause(self, partitions: Sequence[TopicPartition]) -> None:
        self._paused.update(partitions)

    def resume(self, partitions: Sequence[TopicPartition]) -> None:
        self._paused.difference_update(partitions)

    def poll(self, max_records: int, timeout_s: float) -> list[Record]:
        log = self._log
        deadline = log.monotonic_s() + timeout_s
        with log._changed:
            before = dict(self._positions)
            while True:
                taken = self._take(max_records)
                left = deadline - log.monotonic_s()
                if taken or self._positions != before or left <= 0:
                    return taken
                log.wait(left)

    def _take(self, max_records: int) -> list[Record]:
        taken: list[Record] = []
        for partition in list(self._positions):
            if partition in self._paused:
                continue
            at = self._log._at(partition)
            offset = self._positions[partition]
            if offset < at.begin or offset > at.end:
                raise OffsetLost(
                    f"{partition.topic}/{partition.partition}: offset {offset} is not in the log "
                    f"[{at.begin}, {at.end}); restore it from the archive or decide on a new position"
                )
            stable = self._log._stable(partition)
            while offset < stable and len(taken) < max_records:
                entry = at.entries[offset - at.begin]
                offset += 1
                if entry is not None:
                    taken.append(entry)
            self._positions[partition] = offset
        return taken

    def positions(self) -> dict[TopicPartition, int]:
        return dict(self._positions)

    def close(self) -> None:
        self._positions = {}
