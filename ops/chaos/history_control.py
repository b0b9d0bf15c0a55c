"""The positive control: an EndTxn that is held past its time-out and let go within the next transaction (C36).

A round has two transactions of one client. The EndTxn of the first is held by the proxy; what the client then does is the
client's own affair. When a record of its second transaction is on the broker, the held request is let go.

`RuleBreaker` uses its producer again, as librdkafka invites it to: the call that timed out is made once more, EndTxn is sent
a second time, the first transaction ends well, and the held copy, which bears the same producer id and epoch, ends the
second transaction. `RuleKeeper` is our own writer.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final, Literal, NamedTuple, Protocol

from confluent_kafka import KafkaException, Producer

from rollwire.ops.chaos.history_book import Book
from rollwire.ops.chaos.proxy import KafkaProxy, error_code, parse_end_txn
from rollwire.schemas.errors import DeadlineExceeded, LogError, TransactionUnknown
from rollwire.streams.seams.log import Log, Outgoing, Reader, TopicPartition

Outcome = Literal["ok", "fail", "info"]
End = Literal["commit", "abort"]
_SOCKET_S: Final = 1.0  # librdkafka sends again what has no answer for this long
_PATIENCE_S: Final = 0.3  # the rule-breaker's time-out of a commit
_DEADLINE_S: Final = 15.0
_SETTLE_S: Final = 0.3
FIRST, SECOND = TopicPartition("history-a", 0), TopicPartition("history-b", 0)


class Client(Protocol):
    """A transactional producer, with whatever it does about a time-out."""

    def begin(self) -> None: ...

    def write(self, value: int, partition: TopicPartition) -> None: ...

    def commit(self) -> Outcome: ...

    def abort(self) -> Outcome: ...

    def close(self) -> None: ...


class RuleBreaker:
    """Uses its producer again after a time-out (law 4 forbids it). Dies of errors that librdkafka calls fatal."""

    def __init__(self, bootstrap: str, prefix: str, transactional_id: str) -> None:
        self._prefix = prefix
        self._config = {
            "bootstrap.servers": bootstrap,
            "broker.address.family": "v4",
            "transactional.id": transactional_id,
            "transaction.timeout.ms": 30_000,
            "socket.timeout.ms": round(_SOCKET_S * 1_000),
            "linger.ms": 1,
            "logger": _silent(),
        }
        self._producer: Producer | None = None

    def begin(self) -> None:
        if self._producer is None:
            self._producer = Producer(self._config)
            self._producer.init_transactions(_DEADLINE_S)
        self._producer.begin_transaction()

    def write(self, value: int, partition: TopicPartition) -> None:
        producer = self._made()
        producer.produce(self._prefix + partition.topic, b"%d" % value, partition=partition.partition)
        producer.flush(_DEADLINE_S)

    def commit(self) -> Outcome:
        return self._end(self._made().commit_transaction, "ok")

    def abort(self) -> Outcome:
        return self._end(self._made().abort_transaction, "fail")

    def close(self) -> None:
        if self._producer is not None:
            self._producer.purge(blocking=False)
            self._producer = None

    def _end(self, call: Callable[[float], None], done: Outcome) -> Outcome:
        try:
            try:
                call(_PATIENCE_S)
            except KafkaException as failure:
                if not failure.args[0].retriable():
                    raise
                call(_DEADLINE_S)  # the broken rule
        except KafkaException:
            self.close()  # fatal even by librdkafka's rules
            return "info" if done == "ok" else "fail"
        return done

    def _made(self) -> Producer:
        if self._producer is None:
            raise LogError("the producer has died: begin a transaction first")
        return self._producer


def _silent() -> logging.Logger:
    """For a client whose requests are to time out: it says so on stderr unless it is given a logger."""
    logger = logging.getLogger("rollwire.chaos.control")
    logger.addHandler(logging.NullHandler())
    logger.propagate = False
    return logger


class RuleKeeper:
    """Our writer and our rule: one doubt, a new producer."""

    def __init__(self, log: Log, transactional_id: str, timeout_s: float = 1.0) -> None:
        self._log = log
        self._id = transactional_id
        self._timeout_s = timeout_s
        self._writer = log.transactional_writer(transactional_id)
        self.made = 1  # writers so far

    def begin(self) -> None:
        try:
            self._writer.begin()
        except TransactionUnknown:
            self._renew()
            self._writer.begin()

    def write(self, value: int, partition: TopicPartition) -> None:
        self._writer.write([Outgoing(partition.topic, None, b"%d" % value, (), partition.partition)])

    def commit(self) -> Outcome:
        try:
            self._writer.commit("", {}, self._timeout_s)
        except TransactionUnknown:
            self._renew()
            return "info"
        return "ok"

    def abort(self) -> Outcome:
        with suppress(TransactionUnknown):
            self._writer.abort()
        return "fail"

    def close(self) -> None:
        self._writer.close()

    def _renew(self) -> None:
        self._writer.close()
        self._writer = self._log.transactional_writer(self._id)
        self.made += 1


class Round(NamedTuple):
    """What a round came to. `answer`: what the broker said to the held request, 0 where it took it."""

    held: End
    first: Outcome
    second: Outcome
    answer: int


def play_round(
    client: Client,
    book: Book,
    shown: Book,
    proxy: KafkaProxy,
    reader: Reader,
    written: Callable[[TopicPartition], int],
    *,
    transactional_id: str,
    value: int,
    held: End,
    cut: bool = False,
) -> Round:
    """Two transactions with the values from `value` on; what `reader` is shown goes into the book `shown`. With `cut`, the connection ends while the request is held.

    A held commit comes while the second transaction is still being written, which then aborts: whoever is shown anything of
    it is shown an aborted record. A held abort takes away the first record of the second transaction, which then
    commits. `written(partition)` is the end of a partition, undecided records included.

    Raises `DeadlineExceeded` where a step does not happen, and what the client raises.
    """
    hold = proxy.hold_end_txn(transactional_id, cut=cut)
    try:
        first = _transaction(client, book, [(value, FIRST), (value + 1, SECOND)], held)
        request = hold.wait(_DEADLINE_S)
        if parse_end_txn(request).committed != (held == "commit"):
            raise LogError(f"another request was held than the {held} of the first transaction")
        client.begin()
        op = book.begin()
        before = written(FIRST)
        book.sends(op, value + 2, FIRST)
        client.write(value + 2, FIRST)
        _wait(lambda: written(FIRST) > before, f"value {value + 2} on the broker")
        answer = error_code(hold.release(), request.api_version)
    finally:
        hold.cancel()
    until = time.monotonic() + _SETTLE_S
    while time.monotonic() < until:
        start = time.monotonic_ns()
        shown.polled(start, reader.poll(100, 0.05))
    if held == "commit":
        second = client.abort()
    else:
        book.sends(op, value + 3, SECOND)
        client.write(value + 3, SECOND)
        book.commits(op)
        second = client.commit()
    book.end(op, second)
    return Round(held, first, second, answer)


def _transaction(client: Client, book: Book, values: list[tuple[int, TopicPartition]], end: End) -> Outcome:
    client.begin()
    op = book.begin()
    for value, partition in values:
        book.sends(op, value, partition)
        client.write(value, partition)
    if end == "commit":
        book.commits(op)
        outcome = client.commit()
    else:
        outcome = client.abort()
    book.end(op, outcome)
    return outcome


def _wait(true: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + _DEADLINE_S
    while not true():
        if time.monotonic() > deadline:
            raise DeadlineExceeded(f"{what}: not within {_DEADLINE_S:g} s")
        time.sleep(0.01)
