"""Apache Kafka behind the log seam, through confluent-kafka (librdkafka).

What is fixed here and why
    partitioner=murmur2_random      librdkafka's default differs from every other client's: joins would miss silently
    acks=all, enable.idempotence    law 2
    read_committed                  nobody sees an aborted record
    auto.offset.reset=error         a lost offset is `OffsetLost`, never a silent jump (law 3)
    readers join no group           partitions are assigned by hand; the group id only names where offsets are kept
    enable.partition.eof            the end-of-partition event carries the position *behind* control records, which
                                    no record ever reports (C40)

librdkafka has no KIP-890: a delayed EndTxn can hit a later transaction of the same producer (C36). So a transactional
writer whose outcome is in doubt is dead: every later call raises, and its producer is destroyed (law 4).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from confluent_kafka import Consumer, IsolationLevel, KafkaError, KafkaException
from confluent_kafka import TopicPartition as WirePartition
from confluent_kafka.admin import AdminClient

# Not exported by the package, but the only instances that type checkers accept.
from confluent_kafka.admin._listoffsets import EarliestSpec, LatestSpec, OffsetSpec

from rollwire.schemas.errors import LogError, LogUnavailable, OffsetLost, TopicMismatch
from rollwire.streams.seams.held_back import held_back, open_transactions
from rollwire.streams.seams.limits import DEAD_LETTER_BYTES, TOPIC_BYTES
from rollwire.streams.seams.log import (
    HeldBack,
    Member,
    Noted,
    Reader,
    Record,
    TopicPartition,
    TransactionalWriter,
    Writer,
)
from rollwire.streams.seams.log_kafka_write import KafkaTransactionalWriter, KafkaWriter
from rollwire.streams.seams.member_kafka import MEMBER_TIMEOUT_S, KafkaMember
from rollwire.streams.seams.rdkafka_logs import bridge

_REQUEST_S: Final = 8.0  # a question to the broker: short enough for a stop within 10 s
_NEW_TOPIC_S: Final = 1.0  # the broker tells of a topic that was just made this much later at most
_NO_POSITION: Final = -1001  # librdkafka's OFFSET_INVALID: nothing is committed
_make = tuple.__new__

_NO_LEADER: Final = frozenset(
    {
        KafkaError._NOENT,
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError.LEADER_NOT_AVAILABLE,
        KafkaError.NOT_LEADER_FOR_PARTITION,
        # A broker that just came back may for a moment be behind the epoch that its clients know.
        KafkaError.FENCED_LEADER_EPOCH,
        KafkaError.UNKNOWN_LEADER_EPOCH,
    }
)
_NO_COORDINATOR: Final = frozenset(
    {
        KafkaError.NOT_COORDINATOR,
        KafkaError.COORDINATOR_NOT_AVAILABLE,
        KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    }
)


class KafkaLog:
    """A connection to one cluster. `prefix` goes before every topic name and is stripped from what is read.

    `patience_s` bounds how long the broker may be away before a reader raises `LogUnavailable`;
    `transaction_timeout_s` is when the broker itself ends a transaction whose owner died: above the worst pause of a
    process, and no longer than readers may stand still behind it (C41). `member_timeout_s` is when a member of a group that
    is silent loses its place: a broker with default settings refuses less than 6 s. `connect`: to every broker at
    once, for who asks soon and ends soon.
    """

    def __init__(
        self,
        bootstrap: str,
        prefix: str = "rollwire.",
        client_id: str = "rollwire",
        *,
        patience_s: float = 60.0,
        transaction_timeout_s: float = 60.0,
        member_timeout_s: float = MEMBER_TIMEOUT_S,
        connect: bool = False,
    ) -> None:
        self._prefix = prefix
        self._patience_s = patience_s
        self._transaction_timeout_s = transaction_timeout_s
        self._member_timeout_s = member_timeout_s
        self._common: dict[str, Any] = {
            "bootstrap.servers": bootstrap,
            "client.id": client_id,
            # The broker binds IPv4; a resolver that offers ::1 first would cost a failed connection each time.
            "broker.address.family": "v4",
            "reconnect.backoff.max.ms": 1_000,
            "topic.metadata.refresh.interval.ms": 30_000,
            "log.connection.close": False,
            "logger": bridge(),
        }
        # librdkafka connects when it is asked for something, and then takes 50 ms to answer for the first time.
        self._admin = AdminClient(self._common | {"enable.sparse.connections": not connect})

    def reader(self) -> Reader:
        return _KafkaReader(self._consumer_config("reader"), self._prefix, self._patience_s)

    def writer(self) -> Writer:
        return KafkaWriter(self._producer_config(), self._prefix)

    def member(
        self, group: str, topics: Sequence[str], revoke: Callable[[frozenset[TopicPartition]], None]
    ) -> Member:
        config = self._consumer_config(group) | {
            "session.timeout.ms": round(self._member_timeout_s * 1_000),
            "heartbeat.interval.ms": round(min(0.5, self._member_timeout_s / 4) * 1_000),
        }
        return KafkaMember(config, self._prefix, group, topics, revoke, self._transactional_writer)

    def held_back(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, HeldBack]:
        return held_back(self._admin, self._prefix, partitions)

    def openers(self, topic: str) -> tuple[str, ...]:
        name = (self._prefix + topic).encode()
        found = open_transactions(self._consumer_config("openers"))
        return tuple(sorted(one for one, record in found.items() if name in record))

    def transactional_writer(self, transactional_id: str, timeout_s: float = 60.0) -> TransactionalWriter:
        return self._transactional_writer(transactional_id, timeout_s, {})

    def _transactional_writer(
        self, transactional_id: str, timeout_s: float, places: Mapping[str, Callable[[], object]]
    ) -> TransactionalWriter:
        config = self._producer_config() | {
            "transactional.id": transactional_id,
            "transaction.timeout.ms": round(self._transaction_timeout_s * 1_000),
        }
        config.pop("message.timeout.ms")  # a transaction's records live as long as the transaction
        return KafkaTransactionalWriter(
            config, self._prefix, transactional_id, self._consumer_config, timeout_s, places
        )

    def partitions(self, topic: str) -> int:
        name = self._prefix + topic
        deadline = time.monotonic() + _NEW_TOPIC_S
        while True:
            try:
                found = self._admin.list_topics(topic=name, timeout=_REQUEST_S).topics.get(name)
            except KafkaException as failure:
                raise unavailable("asking for the partitions of " + name, failure) from failure
            if found is not None and found.error is None and found.partitions:
                return len(found.partitions)
            if time.monotonic() > deadline:
                raise TopicMismatch(f"topic {name!r} does not exist; create it with `rollwire topics apply`")
            time.sleep(0.05)

    def committed(self, group: str, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
        consumer = Consumer(self._consumer_config(group))
        deadline = time.monotonic() + _REQUEST_S
        try:
            while True:
                try:
                    answer = consumer.committed([self._wire(p) for p in partitions], timeout=_REQUEST_S)
                    break
                except KafkaException as failure:
                    # A transaction that is just being finished makes the answer unstable for a moment (KIP-447).
                    error: KafkaError = failure.args[0]
                    again = error.retriable() or error.code() in _NO_COORDINATOR
                    if not again or time.monotonic() > deadline:
                        raise unavailable(f"asking for the offsets of group {group!r}", failure) from failure
                    time.sleep(0.05)
        finally:
            consumer.close()
        for wire in answer:
            if wire.error is not None:
                raise LogError(
                    f"offsets of group {group!r}: {wire.topic}[{wire.partition}]: {wire.error.str()}"
                )
        return {
            self._ours(w): Noted(w.offset, w.metadata) if w.metadata else w.offset
            for w in answer
            if w.offset != _NO_POSITION and w.offset >= 0
        }

    def beginning_offsets(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
        return self._offsets(partitions, EarliestSpec())  # type: ignore[no-untyped-call]

    def end_offsets(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
        return self._offsets(partitions, LatestSpec())  # type: ignore[no-untyped-call]

    def written_offsets(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
        newest: OffsetSpec = LatestSpec()  # type: ignore[no-untyped-call]
        return self._offsets(partitions, newest, IsolationLevel.READ_UNCOMMITTED)

    def close(self) -> None:
        """Readers and writers are closed by those who made them."""

    def _offsets(
        self,
        partitions: Sequence[TopicPartition],
        spec: OffsetSpec,
        level: IsolationLevel = IsolationLevel.READ_COMMITTED,
    ) -> dict[TopicPartition, int]:
        if not partitions:
            return {}
        deadline = time.monotonic() + _REQUEST_S
        while True:
            try:
                futures = self._admin.list_offsets(
                    {self._wire(p): spec for p in partitions},
                    isolation_level=level,
                    request_timeout=_REQUEST_S,
                )
                return {
                    self._ours(wire): future.result(_REQUEST_S).offset for wire, future in futures.items()
                }
            except KafkaException as failure:
                # A new topic, or one whose leader just came back, is not known to every client at once.
                for topic in {p.topic for p in partitions}:
                    self.partitions(topic)
                if failure.args[0].code() not in _NO_LEADER or time.monotonic() > deadline:
                    raise unavailable("asking for offsets", failure) from failure
                time.sleep(0.05)
            except TimeoutError as failure:
                raise LogUnavailable(f"no offsets after {_REQUEST_S:g} s: is the broker up?") from failure

    def _wire(self, partition: TopicPartition) -> WirePartition:
        return WirePartition(self._prefix + partition.topic, partition.partition)

    def _ours(self, wire: WirePartition) -> TopicPartition:
        return TopicPartition(wire.topic.removeprefix(self._prefix), wire.partition)

    def _consumer_config(self, group: str) -> dict[str, Any]:
        return self._common | {
            "group.id": group,
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "auto.offset.reset": "error",
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
            "allow.auto.create.topics": False,
            "fetch.wait.max.ms": 100,
            # By default a reader whose queue was full for a moment fetches nothing for a second.
            "fetch.queue.backoff.ms": 5,
            "fetch.error.backoff.ms": 50,
            "fetch.message.max.bytes": TOPIC_BYTES,
            "queued.max.messages.kbytes": 32 * 1024,
            "receive.message.max.bytes": 100 * 1024 * 1024,
        }

    def _producer_config(self) -> dict[str, Any]:
        return self._common | {
            "partitioner": "murmur2_random",
            "acks": "all",
            "enable.idempotence": True,
            "linger.ms": 5,
            # After EndTxn (v1) the next transaction is refused until the markers are written: asked again this soon.
            "retry.backoff.ms": 10,
            "compression.type": "lz4",
            "message.max.bytes": DEAD_LETTER_BYTES,
            "message.timeout.ms": 60_000,
            "queue.buffering.max.kbytes": 256 * 1024,
        }


class _KafkaReader:
    def __init__(self, config: dict[str, Any], prefix: str, patience_s: float) -> None:
        self._prefix = prefix
        self._patience_s = patience_s
        self._down_since: float | None = None
        self._asked = 0.0
        self._positions: dict[TopicPartition, int] = {}
        self._paused: set[TopicPartition] = set()
        self._names: dict[str, str] = {}  # with the prefix -> without: one string per topic, not per record
        self._consumer = Consumer(config | {"error_cb": self._on_error})

    def assign(self, positions: Mapping[TopicPartition, int]) -> None:
        for partition, offset in positions.items():
            if offset < 0:
                raise LogError(f"{partition.topic}/{partition.partition}: {offset} is not an offset")
        self._positions = dict(positions)
        self._paused.clear()
        self._names = {self._prefix + p.topic: p.topic for p in positions}
        self._reassign()

    def seek(self, partition: TopicPartition, offset: int) -> None:
        if offset < 0:
            raise LogError(f"{partition.topic}/{partition.partition}: {offset} is not an offset")
        if partition not in self._positions:
            raise LogError(
                f"{partition.topic}/{partition.partition} is not assigned: assign it before seeking"
            )
        self._positions[partition] = offset
        # librdkafka's own seek() fails while the fetcher is starting; assigning anew always holds.
        self._reassign()

    def pause(self, partitions: Sequence[TopicPartition]) -> None:
        self._paused.update(partitions)
        self._consumer.pause([self._wire(p) for p in partitions])

    def resume(self, partitions: Sequence[TopicPartition]) -> None:
        self._paused.difference_update(partitions)
        self._consumer.resume([self._wire(p) for p in partitions])

    def poll(self, max_records: int, timeout_s: float) -> list[Record]:
        deadline = time.monotonic() + timeout_s
        while True:
            taken: list[Record] = []
            before = dict(self._positions)
            # consume() waits for a full batch: so take what is already here, else wait for the first record.
            moved = self._take(self._consumer.consume(max_records, 0.0), taken)
            if not moved:
                left = max(0.0, deadline - time.monotonic())
                first = self._consumer.consume(1, left)
                moved = self._take(first, taken)
                if first and max_records > 1:
                    moved |= self._take(self._consumer.consume(max_records - 1, 0.0), taken)
            if moved:
                self._down_since = None
            elif self._down_since is not None:
                self._check_patience()
            # A position that moved without a record stands behind control records: who reads to an end wants to know.
            if taken or self._positions != before or time.monotonic() >= deadline:
                return taken

    def positions(self) -> dict[TopicPartition, int]:
        return dict(self._positions)

    def close(self) -> None:
        self._consumer.close()

    def _take(self, messages: Sequence[Any], taken: list[Record]) -> bool:
        """Appends records; True when a position moved. An audit reads every record there is through these lines."""
        moved = False
        wire: str | None = None
        at: TopicPartition | None = None
        number, after = -1, 0
        for message in messages:
            # Records come in runs of one partition: what is asked of dictionaries is asked once a run.
            error = message.error()
            if error is not None or message.partition() != number or message.topic() != wire:
                if at is not None:
                    self._positions[at] = after
                if error is not None:
                    moved |= self._event(message, error)
                    wire = at = None
                    continue
                wire, number = message.topic(), message.partition()
                topic = None if wire is None else self._names.get(wire)
                at = None if topic is None else TopicPartition(topic, number)
            if at is None:
                continue
            offset = message.offset()
            after = offset + 1
            headers = message.headers()
            # Calling `Record` takes as long as all the rest of these lines.
            taken.append(
                _make(
                    Record,
                    (
                        at[0],
                        number,
                        offset,
                        message.timestamp()[1],
                        message.key(),
                        message.value(),
                        tuple(headers) if headers else (),
                    ),
                )
            )
            moved = True
        if at is not None:
            self._positions[at] = after
        return moved

    def _event(self, message: Any, error: KafkaError) -> bool:
        """What comes between records and is none. True for the end of a partition, which may move its position; a fault
        that waiting mends is noted, any other raised."""
        name = message.topic()
        topic = self._names.get(name)
        if error.code() != KafkaError._PARTITION_EOF or topic is None:
            self._raise(error, name, message.partition(), message.offset())
            return False
        partition = TopicPartition(topic, message.partition())
        if message.offset() > self._positions.get(partition, message.offset()):
            self._positions[partition] = message.offset()
        return True

    def _raise(self, error: KafkaError, topic: str | None, partition: int | None, offset: int | None) -> None:
        where = f"{topic}[{partition}] at {offset}"
        if error.code() in (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE):
            raise OffsetLost(
                f"{where}: this offset is no longer in the log ({error.str()}); "
                "restore it from the archive or decide on a new position"
            )
        if error.code() in (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_PARTITION):
            raise TopicMismatch(f"{where}: {error.str()}; create it with `rollwire topics apply`")
        if error.code() in (KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN) or error.retriable():
            self._on_error(error)
            return
        raise LogError(f"{where}: {error.str()} ({error.name()})")

    def _on_error(self, error: KafkaError) -> None:
        """librdkafka says once that all brokers are gone and goes on trying; the patience is ours."""
        if error.code() in (KafkaError._ALL_BROKERS_DOWN, KafkaError._TRANSPORT) and self._down_since is None:
            self._down_since = time.monotonic()

    def _check_patience(self) -> None:
        now = time.monotonic()
        if self._down_since is None or now - self._asked < 1.0:
            return
        self._asked = now
        try:
            self._consumer.list_topics(topic=next(iter(self._names), None), timeout=1.0)
        except KafkaException as failure:
            gone_s = time.monotonic() - self._down_since
            if gone_s > self._patience_s:
                raise LogUnavailable(f"no broker for {gone_s:.0f} s: is it up?") from failure
        else:
            self._down_since = None

    def _reassign(self) -> None:
        self._consumer.assign(
            [WirePartition(self._prefix + p.topic, p.partition, at) for p, at in self._positions.items()]
        )
        if self._paused:
            self._consumer.pause([self._wire(p) for p in self._paused])

    def _wire(self, partition: TopicPartition) -> WirePartition:
        return WirePartition(self._prefix + partition.topic, partition.partition)


def unavailable(what: str, failure: KafkaException) -> LogUnavailable:
    error: KafkaError = failure.args[0]
    return LogUnavailable(f"{what}: {error.str()} ({error.name()}); is the broker up?")
