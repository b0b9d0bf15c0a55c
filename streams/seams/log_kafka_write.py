"""The writing half of the Kafka adapter: idempotent and transactional producers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, NoReturn

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer
from confluent_kafka import TopicPartition as WirePartition

from rollwire.schemas.errors import (
    DeadlineExceeded,
    Fenced,
    LogError,
    LogUnavailable,
    Refused,
    TransactionUnknown,
)
from rollwire.streams.seams.limits import check_size
from rollwire.streams.seams.log import Noted, Outgoing, TopicPartition
from rollwire.streams.seams.rdkafka_logs import ConnectionWatch

_FENCED: Final = frozenset(
    {KafkaError._FENCED, KafkaError.PRODUCER_FENCED, KafkaError.INVALID_PRODUCER_EPOCH}
)
_ABORT_S: Final = 10.0
_FLUSH_S: Final = 0.01
_QUEUE_S: Final = 30.0  # how long a full local queue may stay full (C48)


class Delivery:
    """Counts acknowledgements. `unplaced`: those without an offset, which prove nothing.

    On a topic that was just made, a first batch may be turned away while the next one that is under way is taken, since
    the broker knows no sequence of this producer yet. The first one's retry then looks like a repeat to the broker, and
    librdkafka reports it as written: seen as records that were acknowledged and are not in the log.
    """

    def __init__(self) -> None:
        self.done = 0
        self.unplaced = 0
        self.error: KafkaError | None = None

    def report(self, error: KafkaError | None, message: Message) -> None:
        if error is not None:
            self.error = self.error or error
        else:
            offset = message.offset()
            self.unplaced += offset is None or offset < 0
        self.done += 1


class _Unplaced(Exception):
    """Records of a transaction were acknowledged without an offset."""


class KafkaWriter:
    """Idempotent writes. Thread-safe: each call counts its own acknowledgements."""

    def __init__(self, config: dict[str, Any], prefix: str) -> None:
        self._config = config
        self._prefix = prefix
        self._lock = threading.Lock()
        self._producer = Producer(config)

    def write(self, records: Sequence[Outgoing], timeout_s: float = 30.0) -> None:
        for record in records:
            check_size(record)
        deadline = time.monotonic() + timeout_s
        delivery = Delivery()
        producer = self._producer
        report = delivery.report
        for record in records:
            produce(producer, self._prefix, record, deadline, report)
        while delivery.done < len(records):
            left = deadline - time.monotonic()
            if left <= 0:
                missing = len(records) - delivery.done
                raise LogUnavailable(
                    f"{missing} of {len(records)} records not acknowledged after {timeout_s:g} s; they may still "
                    "arrive (write them again: their ids make repeats harmless)"
                )
            # All that there is to write is queued: a flush sends it at once, where a poll would wait for `linger.ms`.
            # It returns when nobody's records are under way, or soon: another thread may go on and on.
            producer.flush(min(left, _FLUSH_S))
        if delivery.error is not None:
            self._fail(producer, delivery.error)
        if delivery.unplaced:
            self._renew(producer)
            raise LogUnavailable(
                f"{delivery.unplaced} of {len(records)} records were acknowledged without an offset: they may not be in "
                "the log (write them again: their ids make repeats harmless)"
            )

    def close(self) -> None:
        self._producer.flush(10.0)
        self._producer.purge(blocking=False)

    def _fail(self, producer: Producer, error: KafkaError) -> NoReturn:
        if error.code() == KafkaError.MSG_SIZE_TOO_LARGE:
            raise Refused("too_large", f"the broker refused a record: {error.str()}")
        if error.fatal() or error.code() == KafkaError._FATAL:
            self._renew(producer)
        raise LogUnavailable(f"a record was not written: {error.str()} ({error.name()})")

    def _renew(self, producer: Producer) -> None:
        """An idempotent producer that lost its sequence never recovers."""
        with self._lock:
            if self._producer is producer:
                self._producer = Producer(self._config)


class KafkaTransactionalWriter:
    """One transactional producer; dead after the first doubt (law 4).

    When a connection fails, librdkafka sends what was under way again by itself, EndTxn and TxnOffsetCommit too. The
    first copy may still arrive, and would then take part in the *next* transaction of this producer: end it too early,
    or set its offsets back (C36). So a transaction whose connection failed is this writer's last, even where it ended
    well: `begin` then raises `TransactionUnknown`, and the next writer's epoch fences what is late.
    """

    def __init__(
        self,
        config: dict[str, Any],
        prefix: str,
        transactional_id: str,
        group_config: Callable[[str], dict[str, Any]],
        timeout_s: float,
        places: Mapping[str, Callable[[], object]],
    ) -> None:
        """`places`: of each group in which the owner is a member, what tells the broker that it still is."""
        self._places = places
        self._prefix = prefix
        self._id = transactional_id
        self._group_config = group_config
        self._groups: dict[str, Consumer] = {}
        self._open = False
        self._dead: str | None = None
        self._delivery = Delivery()
        self._watch = ConnectionWatch()
        watched = config | {"debug": "broker", "logger": self._watch}
        self._producer: Producer | None = Producer(watched)
        try:
            bounded(partial(self._producer.init_transactions, timeout_s), timeout_s)
        except DeadlineExceeded as failure:
            self.close()
            raise LogUnavailable(f"transactional id {self._id!r}, initialising: {failure}") from failure
        except KafkaException as failure:
            self.close()
            error: KafkaError = failure.args[0]
            if error.code() in _FENCED:
                raise Fenced(f"transactional id {self._id!r} was taken over while it started") from failure
            raise LogUnavailable(
                f"transactional id {self._id!r} not initialised after {timeout_s:g} s: {error.str()}; is the broker up?"
            ) from failure

    def begin(self) -> None:
        producer = self._alive()
        if self._open:
            raise LogError(f"transactional id {self._id!r} has an open transaction: commit or abort it first")
        producer.poll(0)
        self._delivery = Delivery()
        self._watch.failed = None  # nothing was under way
        try:
            producer.begin_transaction()
        except KafkaException as failure:
            self._settle(failure, "beginning")
        self._open = True

    def write(self, records: Sequence[Outgoing]) -> None:
        for record in records:
            check_size(record)
        producer = self._in_transaction()
        deadline = time.monotonic() + _QUEUE_S
        try:
            for record in records:
                produce(producer, self._prefix, record, deadline, self._delivery.report)
            producer.poll(0)
        except KafkaException as failure:
            self._settle(failure, "writing")
        except LogUnavailable as failure:
            self._kill(str(failure))
            raise TransactionUnknown(f"transaction of {self._id!r}: {failure}") from failure

    def commit(
        self,
        group: str,
        offsets: Mapping[TopicPartition, int],
        timeout_s: float = 30.0,
        *,
        also: Mapping[str, Mapping[TopicPartition, int]] | None = None,
    ) -> None:
        producer = self._in_transaction()
        offsets_of = {name: moved for name, moved in {group: offsets, **(also or {})}.items() if moved}
        try:
            bounded(partial(self._commit, producer, offsets_of, timeout_s), timeout_s)
        except KafkaException as failure:
            self._settle(failure, "committing")
        except DeadlineExceeded as failure:
            self._lose(failure, "committing")
        except _Unplaced as failure:
            self.abort()
            self._kill(str(failure))
            raise LogUnavailable(f"{failure}; the transaction is aborted, nothing of it is visible") from None
        self._ended(producer)

    def abort(self) -> None:
        producer = self._in_transaction()
        try:
            bounded(partial(self._abort, producer), _ABORT_S)
        except KafkaException as failure:
            self._settle(failure, "aborting")
        except DeadlineExceeded as failure:
            self._lose(failure, "aborting")
        self._ended(producer)

    @staticmethod
    def _abort(producer: Producer) -> None:
        # What is still queued goes out first. Purged, it could leave the broker without the transaction's partitions,
        # and an abort that comes before them is taken for one of the transaction before: a fatal error.
        producer.flush(_ABORT_S / 2)
        producer.abort_transaction(_ABORT_S / 2)

    def close(self) -> None:
        """Drops the producer without waiting. A transaction left open is ended by the next owner of the id."""
        self._dead = self._dead or "it was closed"
        if self._producer is not None:
            self._producer.purge(blocking=False)
            self._producer = None
        for consumer in list(self._groups.values()):
            consumer.close()
        self._groups.clear()

    def _commit(
        self, producer: Producer, offsets_of: Mapping[str, Mapping[TopicPartition, int]], timeout_s: float
    ) -> None:
        deadline = time.monotonic() + timeout_s
        for name, offsets in offsets_of.items():
            # Read anew each time: metadata of an old generation would pass a zombie's offsets.
            place = self._places.get(name)
            producer.send_offsets_to_transaction(
                [self._wire(partition, at) for partition, at in offsets.items()],
                self._group(name).consumer_group_metadata() if place is None else place(),
                max(0.1, deadline - time.monotonic()),
            )
        producer.flush(max(0.1, deadline - time.monotonic()))
        if self._delivery.unplaced:
            raise _Unplaced(
                f"transaction of {self._id!r}: {self._delivery.unplaced} records were acknowledged without an offset, they "
                "may not be in the log"
            )
        # Never retried: a second EndTxn could end the next transaction (C36).
        producer.commit_transaction(max(0.1, deadline - time.monotonic()))

    def _ended(self, producer: Producer) -> None:
        """The transaction ended as was asked; whether this producer may begin another one is a matter of its connections."""
        self._open = False
        producer.poll(0)
        if self._watch.failed is not None:
            self._kill(
                f"its last transaction ended well, but a request may have been sent twice ({self._watch.failed})"
            )

    def _wire(self, partition: TopicPartition, at: int) -> WirePartition:
        if isinstance(at, Noted):
            return WirePartition(self._prefix + partition.topic, partition.partition, at, at.note)
        return WirePartition(self._prefix + partition.topic, partition.partition, at)

    def _lose(self, failure: DeadlineExceeded, doing: str) -> NoReturn:
        text = f"transactional id {self._id!r}, {doing}: {failure}"
        self._kill(text)
        raise TransactionUnknown(f"{text}; the outcome is unknown, read the committed offsets") from failure

    def _group(self, group: str) -> Consumer:
        """A consumer that never joins: it only names the group whose offsets the transaction commits."""
        if group not in self._groups:
            self._groups[group] = Consumer(self._group_config(group))
        return self._groups[group]

    def _alive(self) -> Producer:
        if self._producer is None or self._dead is not None:
            raise TransactionUnknown(f"the writer of {self._id!r} is unusable: {self._dead}; make a new one")
        return self._producer

    def _in_transaction(self) -> Producer:
        producer = self._alive()
        if not self._open:
            raise LogError(f"transactional id {self._id!r} has no open transaction: call begin() first")
        return producer

    def _kill(self, why: str) -> None:
        self._dead = why
        self._open = False
        self.close()

    def _settle(self, failure: KafkaException, doing: str) -> NoReturn:
        """Sorts an error: fenced, certainly nothing written (aborted here), or unknown."""
        error: KafkaError = failure.args[0]
        cause = self._delivery.error or error
        text = f"transactional id {self._id!r}, {doing}: {error.str()} ({error.name()})"
        if cause is not error:
            text += f", because a record was refused: {cause.str()}"
        if error.code() in _FENCED:
            self._kill(text)
            raise Fenced(f"{text}; another process took over, this one stops") from failure
        if error.txn_requires_abort() and doing != "aborting" and self._producer is not None:
            try:
                bounded(partial(self._producer.abort_transaction, _ABORT_S), _ABORT_S)
            except DeadlineExceeded as second:
                self._lose(second, "aborting")
            except KafkaException as second:
                self._kill(text)
                if second.args[0].code() in _FENCED:
                    raise Fenced(f"{text}; another process took over, this one stops") from second
                raise TransactionUnknown(
                    f"{text}; aborting it failed too: {second.args[0].str()}"
                ) from failure
            self._ended(self._producer)
            if cause.code() == KafkaError.MSG_SIZE_TOO_LARGE:
                raise Refused("too_large", f"{text}; the transaction is aborted") from failure
            raise LogUnavailable(f"{text}; the transaction is aborted, nothing of it is visible") from failure
        self._kill(text)
        raise TransactionUnknown(f"{text}; the outcome is unknown, read the committed offsets") from failure


def bounded(call: Callable[[], None], timeout_s: float) -> None:
    """Makes a call that may never return, and gives it up after its own time-out and a second. Raises what it raises.

    After the death of a broker, librdkafka's transactional calls were seen to wait for a lost answer for ever, whatever
    time-out they were given. The thread that is left behind keeps its producer; the next owner of the id fences it.
    """
    outcome: list[BaseException | None] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
            outcome.append(error)
        else:
            outcome.append(None)

    thread = threading.Thread(target=run, daemon=True, name="transaction")
    thread.start()
    thread.join(timeout_s + 1.0)
    if not outcome:
        raise DeadlineExceeded(f"the client did not come back after {timeout_s:g} s")
    if outcome[0] is not None:
        raise outcome[0]


def produce(
    producer: Producer,
    prefix: str,
    record: Outgoing,
    deadline: float,
    report: Callable[[KafkaError | None, Message], None],
) -> None:
    """Queues one record, waiting for room. Raises `LogUnavailable` at the (monotonic) deadline."""
    while True:
        try:
            producer.produce(
                prefix + record.topic,
                record.value,
                record.key,
                -1 if record.partition is None else record.partition,
                on_delivery=report,
                headers=list(record.headers),
            )
            return
        except BufferError as full:
            if time.monotonic() > deadline:
                raise LogUnavailable("the local queue stayed full: the broker takes nothing") from full
            producer.poll(0.1)
