"""The writing half of the in-memory log: transactions, and who writes with and without them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from rollwire.schemas.errors import Fenced, LogError, LogUnavailable, TransactionUnknown
from rollwire.streams.seams.limits import check_size
from rollwire.streams.seams.log import Outgoing, TopicPartition

if TYPE_CHECKING:
    from rollwire.streams.seams.log_memory import MemoryLog


class Transaction:
    """A transaction that has not ended everywhere: its records by partition, its offsets by group."""

    def __init__(self, transactional_id: str, begun_us: int) -> None:
        self.transactional_id = transactional_id
        self.begun_us = begun_us
        self.state: Literal["open", "committed", "aborted"] = "open"
        self.entries: dict[TopicPartition, list[int]] = {}
        self.offsets: dict[str, dict[TopicPartition, int]] = {}
        self.ended: set[TopicPartition | str] = set()  # where its marker has arrived

    @property
    def places(self) -> tuple[TopicPartition | str, ...]:
        """Where it has something, or a marker would have to go: partitions, and names of consumer groups."""
        return (*self.entries, *self.offsets)


class MemoryWriter:
    """Writes outside of transactions: readable at once, unless an open transaction stands before it."""

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


class MemoryTransactionalWriter:
    """`commit` is `send_offsets` and `end`: a simulation lets the process die between the two."""

    def __init__(self, log: MemoryLog, transactional_id: str, epoch: int) -> None:
        self._log = log
        self._id = transactional_id
        self._epoch = epoch
        self._transaction: Transaction | None = None
        self._closed = False

    def begin(self) -> None:
        with self._log._changed:
            self._check()
            if self._transaction is not None:
                raise LogError(
                    f"transactional id {self._id!r} has an open transaction: commit or abort it first"
                )
            self._transaction = Transaction(self._id, self._log._clock.now_us())

    def write(self, records: Sequence[Outgoing]) -> None:
        for record in records:
            check_size(record)
        with self._log._changed:
            self._check()
            transaction = self._current()
            if records:
                self._enlist(transaction, 30.0)
            for record in records:
                partition = self._log._append(record)
                transaction.entries.setdefault(partition, []).append(self._log._at(partition).end - 1)

    def send_offsets(self, offsets_of: Mapping[str, Mapping[TopicPartition, int]], timeout_s: float) -> None:
        """Adds the offsets of groups to the transaction; whoever asks for them now waits for its end."""
        for moved in offsets_of.values():
            for partition, offset in moved.items():
                check_position(partition, offset)
        with self._log._changed:
            self._check()
            transaction = self._current()
            for group, moved in offsets_of.items():
                if moved:
                    self._enlist(transaction, timeout_s)
                    transaction.offsets.setdefault(group, {}).update(moved)

    def end(self, state: Literal["committed", "aborted"]) -> None:
        with self._log._changed:
            self._check()
            transaction = self._current()
            self._transaction = None
            if transaction in self._log._transactions:
                self._log._decide(transaction, state)

    def commit(
        self,
        group: str,
        offsets: Mapping[TopicPartition, int],
        timeout_s: float = 30.0,
        *,
        also: Mapping[str, Mapping[TopicPartition, int]] | None = None,
    ) -> None:
        with self._log._changed:
            self.send_offsets({group: offsets, **(also or {})}, timeout_s)
            self.end("committed")

    def abort(self) -> None:
        self.end("aborted")

    def close(self) -> None:
        """Like a process that goes away: an open transaction stays open until the next owner of the id ends it."""
        self._closed = True

    @property
    def transaction(self) -> Transaction | None:
        return self._transaction

    def _check(self) -> None:
        if self._log._epochs[self._id] != self._epoch:
            raise Fenced(f"another process took over transactional id {self._id!r}; this one stops")
        if self._closed:
            raise TransactionUnknown(f"the writer of transactional id {self._id!r} is closed; make a new one")

    def _current(self) -> Transaction:
        if self._transaction is None:
            raise LogError(f"transactional id {self._id!r} has no open transaction: call begin() first")
        return self._transaction

    def _enlist(self, transaction: Transaction, timeout_s: float) -> None:
        """The coordinator learns of a transaction by its first record or offset, when the one before has ended."""
        if transaction not in self._log._transactions:
            self._log.await_markers(self._log._of(self._id), timeout_s)
            self._check()
            self._log._transactions.append(transaction)


def check_position(partition: TopicPartition, offset: int) -> None:
    """Raises `LogError` for what is no offset."""
    if offset < 0:
        raise LogError(f"{partition.topic}/{partition.partition}: {offset} is not an offset")
