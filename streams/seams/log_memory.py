"""The in-memory twin of the log: what Kafka does to a reader, without Kafka.

It keeps the properties that bite: transactions with a last stable offset, control records that take an offset (C40),
fencing by epoch (C38), consumer-group offsets that become visible with their transaction, records that retention
removed (`trim`), and the key's partition by murmur2. Thread-safe; nothing outlives the object.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rollwire.schemas.errors import (
    Fenced,
    LogError,
    LogUnavailable,
    OffsetLost,
    TopicMismatch,
    TransactionUnknown,
)
from rollwire.schemas.partitioner import partition_for
from rollwire.streams.seams.clock import Clock, SystemClock
from rollwire.streams.seams.limits import check_size
from rollwire.streams.seams.log import Outgoing, Reader, Record, TopicPartition, TransactionalWriter, Writer


class _Transaction:
    """One open transaction: where it began in each partition, and which records are its own."""

    def __init__(self) -> None:
        self.first: dict[TopicPartition, int] = {}
        self.entries: dict[TopicPartition, list[int]] = {}


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

    def __init__(self, partitions: Mapping[str, int], clock: Clock | None = None) -> None:
        self._clock: Clock = clock if clock is not None else SystemClock()
        self._changed = threading.Condition(threading.RLock())
        self._counts = dict(partitions)
        self._partitions = {
            TopicPartition(topic, index): _Partition()
            for topic, count in partitions.items()
            for index in range(count)
        }
        self._open: list[_Transaction] = []
        self._epochs: dict[str, int] = {}
        self._owners: dict[str, _MemoryTransactionalWriter] = {}
        self._committed: dict[GroupOffset, int] = {}

    # -- the seam -----------------------------------------------------------------------------------------------

    def reader(self) -> Reader:
        return _MemoryReader(self)

    def writer(self) -> Writer:
        return _MemoryWriter(self)

    def transactional_writer(self, transactional_id: str, timeout_s: float = 60.0) -> TransactionalWriter:
        with self._changed:
            previous = self._owners.get(transactional_id)
            if previous is not None:
                previous.fence()
            epoch = self._epochs.get(transactional_id, -1) + 1
            self._epochs[transactional_id] = epoch
            writer = _MemoryTransactionalWriter(self, transactional_id, epoch)
            self._owners[transactional_id] = writer
            return writer

    def partitions(self, topic: str) -> int:
        if topic not in self._counts:
            raise TopicMismatch(f"topic {topic!r} does not exist; create it with `rollwire topics apply`")
        return self._counts[topic]

    def committed(self, group: str, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
        with self._changed:
            found = {p: self._committed.get(GroupOffset(group, p)) for p in partitions}
        return {p: offset for p, offset in found.items() if offset is not None}

    def beginning_offsets(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
        with self._changed:
            return {p: self._at(p).begin for p in partitions}

    def end_offsets(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
        with self._changed:
            return {p: self._stable(p) for p in partitions}

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

    # -- shared by readers and writers ----------------------------------------------------------------------------

    def _at(self, partition: TopicPartition) -> _Partition:
        at = self._partitions.get(partition)
        if at is None:
            raise TopicMismatch(f"{partition.topic}/{partition.partition} does not exist")
        return at

    def _stable(self, partition: TopicPartition) -> int:
        firsts = [t.first[partition] for t in self._open if partition in t.first]
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

    def _finish(self, transaction: _Transaction, *, keep: bool) -> None:
        if transaction not in self._open:
            return
        self._open.remove(transaction)
        for partition, offsets in transaction.entries.items():
            at = self._at(partition)
            if not keep:
                for offset in offsets:
                    if offset >= at.begin:
                        at.entries[offset - at.begin] = None
            at.entries.append(None)  # the control record
        self._changed.notify_all()


class _MemoryReader:
    def __init__(self, log: MemoryLog) -> None:
        self._log = log
        self._positions: dict[TopicPartition, int] = {}
        self._paused: set[TopicPartition] = set()

    def assign(self, positions: Mapping[TopicPartition, int]) -> None:
        for partition, offset in positions.items():
            _check_position(partition, offset)
            self._log._at(partition)
        self._positions = dict(positions)
        self._paused.clear()

    def seek(self, partition: TopicPartition, offset: int) -> None:
        _check_position(partition, offset)
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
        deadline = time.monotonic() + timeout_s
        with self._log._changed:
            before = dict(self._positions)
            while True:
                taken = self._take(max_records)
                left = deadline - time.monotonic()
                if taken or self._positions != before or left <= 0:
                    return taken
                self._log._changed.wait(left)

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


class _MemoryWriter:
    def __init__(self, log: MemoryLog) -> None:
        self._log = log

    def write(self, records: Sequence[Outgoing], timeout_s: float = 30.0) -> None:
        if timeout_s <= 0:
            raise LogUnavailable("the deadline had passed before the first record was written")
        for record in records:
            check_size(record)
        with self._log._changed:
            for record in records:
                self._log._append(record)
            self._log._changed.notify_all()

    def close(self) -> None:
        """Nothing to release."""


class _MemoryTransactionalWriter:
    def __init__(self, log: MemoryLog, transactional_id: str, epoch: int) -> None:
        self._log = log
        self._id = transactional_id
        self._epoch = epoch
        self._transaction: _Transaction | None = None
        self._closed = False

    def fence(self) -> None:
        if self._transaction is not None:
            self._log._finish(self._transaction, keep=False)
            self._transaction = None

    def _check(self) -> None:
        if self._log._epochs[self._id] != self._epoch:
            raise Fenced(f"another process took over transactional id {self._id!r}; this one stops")
        if self._closed:
            raise TransactionUnknown(f"the writer of transactional id {self._id!r} is closed; make a new one")

    def begin(self) -> None:
        with self._log._changed:
            self._check()
            if self._transaction is not None:
                raise LogError(
                    f"transactional id {self._id!r} has an open transaction: commit or abort it first"
                )
            self._transaction = _Transaction()
            self._log._open.append(self._transaction)

    def write(self, records: Sequence[Outgoing]) -> None:
        for record in records:
            check_size(record)
        with self._log._changed:
            self._check()
            transaction = self._current()
            for record in records:
                partition = self._log._append(record)
                offset = self._log._at(partition).end - 1
                transaction.first.setdefault(partition, offset)
                transaction.entries.setdefault(partition, []).append(offset)

    def commit(
        self,
        group: str,
        offsets: Mapping[TopicPartition, int],
        timeout_s: float = 30.0,
        *,
        also: Mapping[str, Mapping[TopicPartition, int]] | None = None,
    ) -> None:
        with self._log._changed:
            self._check()
            transaction = self._current()
            for name, moved in {group: offsets, **(also or {})}.items():
                for partition, offset in moved.items():
                    _check_position(partition, offset)
                    self._log._committed[GroupOffset(name, partition)] = offset
            self._transaction = None
            self._log._finish(transaction, keep=True)

    def abort(self) -> None:
        with self._log._changed:
            self._check()
            transaction = self._current()
            self._transaction = None
            self._log._finish(transaction, keep=False)

    def close(self) -> None:
        """Like a process that goes away: an open transaction stays open until the next owner of the id ends it."""
        self._closed = True

    def _current(self) -> _Transaction:
        if self._transaction is None:
            raise LogError(f"transactional id {self._id!r} has no open transaction: call begin() first")
        return self._transaction


def _check_position(partition: TopicPartition, offset: int) -> None:
    if offset < 0:
        raise LogError(f"{partition.topic}/{partition.partition}: {offset} is not an offset")
