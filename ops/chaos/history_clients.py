"""The clients of a history run: producers of mixed transactions, members that echo, readers.

All go through our own adapter and write down what they do before and after they do it. Producers and members are processes, so that
they can be killed.

A *producer* sends to and polls from all partitions in one transaction, which moves its own group's offsets.
A *member* shares the partitions of one topic with other members of its group, and echoes each value as a new one, in one
transaction with the offset behind it: nothing may be echoed twice or be left out, whoever joins, leaves or dies.
"""

from __future__ import annotations

import random
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Final, Literal

import msgspec
import structlog

from rollwire.ops.chaos.history_book import Book
from rollwire.ops.chaos.history_log import ECHO, GROUP, PARTITIONS, SOURCE
from rollwire.ops.logs import configure_logging
from rollwire.ops.parent import stop_with_parent
from rollwire.schemas.errors import DeadlineExceeded, Fenced, LogError, LogUnavailable, TransactionUnknown
from rollwire.streams.seams.log import Member, Outgoing, Reader, Record, TopicPartition, TransactionalWriter
from rollwire.streams.seams.log_kafka import KafkaLog

TRANSACTION_S: Final = 12.0  # the broker ends what a dead producer left open after this
COMMIT_S: Final = 3.0
_INIT_S: Final = 20.0
_POLL_S: Final = 0.02
_ABORTS: Final = 0.15  # of a producer's transactions
_SLOW: Final = 0.1  # of a producer's transactions; what is late finds them open
_SLOW_S: Final = (0.15, 0.35)
_ECHOES: Final = 10  # values in one transaction of a member
_VALUES: Final = 1_000_000  # of one start of one client
_AGAIN: Final = (TransactionUnknown, LogUnavailable, DeadlineExceeded, Fenced)

_logger = structlog.get_logger("rollwire.chaos.history")


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """What a client is started with."""

    role: Literal["producer", "member"]
    name: str
    number: int  # of this start among all starts of clients: it makes values unique
    bootstrap: str
    prefix: str
    folder: str  # of the books
    per_second: float  # transactions
    seed: int


class Pace:
    """A timetable. What was missed (a paused broker) is not made up for."""

    def __init__(self, per_second: float) -> None:
        self._step_s = 1.0 / per_second
        self._next = time.monotonic()

    def left_s(self) -> float:
        """Seconds until the next operation; when it is due, the one after it is planned."""
        now = time.monotonic()
        if now < self._next:
            return self._next - now
        self._next = max(self._next + self._step_s, now - self._step_s)
        return 0.0


class Producer:
    """One client that sends and polls. Its books and values are its own for one start."""

    def __init__(self, task: Task, log: KafkaLog, stop: threading.Event) -> None:
        self._task = task
        self._log = log
        self._stop = stop
        self._random = random.Random(f"{task.seed}.{task.name}.{task.number}")
        self._book = Book(Path(task.folder), f"{task.name}.{task.number}")
        self._value = task.number * _VALUES
        self._group = f"history.{task.name}"
        self._pace = Pace(task.per_second)

    def run(self) -> None:
        while not self._stop.is_set():
            with suppress(*_AGAIN):
                self._session()

    def _session(self) -> None:
        """One writer's life: after any doubt the next one begins at the offsets that are committed (law 4)."""
        writer = self._log.transactional_writer(f"history.{self._task.name}", _INIT_S)
        reader = self._log.reader()
        try:
            positions = self._back(reader)
            while not self._stop.is_set():
                left_s = self._pace.left_s()
                if left_s > 0:
                    self._stop.wait(left_s)
                    continue
                positions = self._transaction(writer, reader, positions)
        except _AGAIN as error:
            _logger.warning("session.end", client=self._task.name, error=str(error))
            raise
        finally:
            writer.close()
            reader.close()

    def _back(self, reader: Reader) -> dict[TopicPartition, int]:
        committed = self._log.committed(self._group, PARTITIONS)
        positions = {p: committed.get(p, 0) for p in PARTITIONS}
        reader.assign(positions)
        self._book.assigned(positions)
        return positions

    def _transaction(
        self, writer: TransactionalWriter, reader: Reader, positions: dict[TopicPartition, int]
    ) -> dict[TopicPartition, int]:
        writer.begin()
        op = self._book.begin()
        slow = self._random.random() < _SLOW
        for _ in range(self._random.randint(1, 4)):
            if self._random.random() < 0.3:
                start = time.monotonic_ns()
                self._book.polled(start, reader.poll(50, _POLL_S))
                continue
            self._value += 1
            to = self._random.choice(PARTITIONS)
            self._book.sends(op, self._value, to)
            writer.write([_record(to, self._value)])
            if slow:
                self._stop.wait(self._random.uniform(*_SLOW_S))
                slow = False
        if self._random.random() < _ABORTS:
            writer.abort()
            self._book.end(op, "fail")
            return self._back(reader)
        self._book.commits(op)
        _commit(self._book, op, writer, self._group, reader.positions())
        return positions


class Echoer:
    """One member of the echo group: a writer for each partition that it holds, as our own processors have."""

    def __init__(self, task: Task, log: KafkaLog, stop: threading.Event) -> None:
        self._task = task
        self._log = log
        self._stop = stop
        self._book = Book(Path(task.folder), f"{task.name}.{task.number}")
        self._value = task.number * _VALUES
        self._writers: dict[TopicPartition, TransactionalWriter] = {}
        self._positions: dict[TopicPartition, int] = {}
        self._reader = log.reader()

    def run(self) -> None:
        member = self._log.member(GROUP, [SOURCE], self._revoke)
        try:
            while not self._stop.is_set():
                held = member.poll(_POLL_S)
                with suppress(*_AGAIN):
                    self._open(member, held)
                    for partition, records in self._polled().items():
                        self._echo(partition, records)
        finally:
            member.close()
            self._reader.close()

    def _revoke(self, partitions: frozenset[TopicPartition]) -> None:
        for partition in partitions:
            self._drop(partition)

    def _drop(self, partition: TopicPartition) -> None:
        writer = self._writers.pop(partition, None)
        self._positions.pop(partition, None)
        if writer is not None:
            writer.close()

    def _open(self, member: Member, held: frozenset[TopicPartition]) -> None:
        new = [p for p in held if p not in self._writers]
        if not new and set(self._positions) == set(held):
            return
        for partition in new:
            name = f"history.echo.{partition.partition}"
            # The old owner is fenced first; only then are the offsets what they stay (law 6).
            self._writers[partition] = member.transactional_writer(name, _INIT_S)
            self._positions[partition] = self._log.committed(GROUP, [partition]).get(partition, 0)
        self._reader.assign(self._positions)
        self._book.assigned(self._positions)

    def _polled(self) -> dict[TopicPartition, list[Record]]:
        if not self._positions:
            self._stop.wait(_POLL_S)
            return {}
        start = time.monotonic_ns()
        records = self._reader.poll(_ECHOES, _POLL_S)
        self._book.polled(start, records)
        found: dict[TopicPartition, list[Record]] = {}
        for record in records:
            found.setdefault(TopicPartition(record.topic, record.partition), []).append(record)
        return found

    def _echo(self, partition: TopicPartition, records: list[Record]) -> None:
        """On any failure the partition starts again at its committed offset, with a new writer."""
        writer = self._writers.get(partition)
        if writer is None:
            return
        try:
            writer.begin()
            op = self._book.begin()
            for record in records:
                self._value += 1
                self._book.sends(op, self._value, ECHO, source=int(record.value or b"0"))
                writer.write([_record(ECHO, self._value)])
            self._book.commits(op)
            _commit(self._book, op, writer, GROUP, {partition: records[-1].offset + 1})
        except _AGAIN as error:
            _logger.warning("echo.end", client=self._task.name, partition=partition.partition, error=str(error))  # fmt: skip
            self._drop(partition)
            raise
        self._positions[partition] = records[-1].offset + 1


def follow(log: KafkaLog, book: Book, stop: threading.Event) -> None:
    """A reader of everything from the beginning, until `stop`. A broker that is away is waited for."""
    reader = log.reader()
    positions = dict.fromkeys((*PARTITIONS, ECHO), 0)
    reader.assign(positions)
    book.assigned(positions)
    try:
        while not stop.is_set():
            start = time.monotonic_ns()
            with suppress(LogUnavailable):
                book.polled(start, reader.poll(200, 0.2))
    finally:
        reader.close()


def _commit(
    book: Book, op: int, writer: TransactionalWriter, group: str, positions: dict[TopicPartition, int]
) -> None:
    try:
        writer.commit(group, positions, COMMIT_S)
    except LogUnavailable:
        book.end(op, "fail")  # the adapter says so only where the transaction is aborted
        raise
    except LogError:
        book.end(op, "info")
        raise
    book.end(op, "ok")


def _record(to: TopicPartition, value: int) -> Outgoing:
    return Outgoing(to.topic, None, b"%d" % value, (), to.partition)


def main() -> None:
    """`<task as JSON>`"""
    configure_logging()
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    stop_with_parent(stop)
    task = msgspec.json.decode(sys.argv[1], type=Task)
    log = KafkaLog(task.bootstrap, task.prefix, f"history-{task.name}", transaction_timeout_s=TRANSACTION_S)
    (Producer if task.role == "producer" else Echoer)(task, log, stop).run()
    log.close()
