"""The topics of a history run, their ends, and the final read."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

from confluent_kafka import IsolationLevel, KafkaError, KafkaException
from confluent_kafka import TopicPartition as WirePartition
from confluent_kafka.admin import AdminClient

# Not exported by the package, but the only instances that type checkers accept.
from confluent_kafka.admin._listoffsets import LatestSpec, OffsetSpec
from confluent_kafka.cimpl import NewTopic

from rollwire.ops.chaos.history_book import Book
from rollwire.ops.chaos.history_check import Partition
from rollwire.schemas.errors import DeadlineExceeded
from rollwire.streams.seams.log import Log, TopicPartition
from rollwire.streams.seams.rdkafka_logs import bridge

TOPICS: Final = {"history-a": 3, "history-b": 2}  # partitions of each
PARTITIONS: Final = tuple(TopicPartition(topic, p) for topic, n in TOPICS.items() for p in range(n))
SOURCE: Final = "history-a"  # what members echo
ECHO: Final = TopicPartition("history-echo", 0)
GROUP: Final = "history.echo"
_ASK_S: Final = 10.0
_READ_S: Final = 60.0
# A topic that was just made has no leader yet; a paused broker does not answer, and may then be behind its clients' epoch.
_PASSING: Final = frozenset(
    {
        KafkaError.NOT_LEADER_FOR_PARTITION,
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError.LEADER_NOT_AVAILABLE,
        KafkaError.FENCED_LEADER_EPOCH,
        KafkaError.UNKNOWN_LEADER_EPOCH,
        KafkaError._TIMED_OUT,
        KafkaError._TRANSPORT,
    }
)


class Ends:
    """The topics under one prefix, asked over the broker's own listener."""

    def __init__(self, bootstrap: str, prefix: str) -> None:
        self._prefix = prefix
        config: dict[str, Any] = {"bootstrap.servers": bootstrap, "broker.address.family": "v4"}
        self._admin = AdminClient(config, logger=bridge())

    def create(self) -> None:
        counts = {**TOPICS, ECHO.topic: 1}
        new = [NewTopic(self._prefix + name, partitions, 1) for name, partitions in counts.items()]
        for future in self._admin.create_topics(new).values():
            future.result(_ASK_S)

    def written(self, partition: TopicPartition) -> int:
        """The end of a partition, undecided records included."""
        wire = WirePartition(self._prefix + partition.topic, partition.partition)
        newest: OffsetSpec = LatestSpec()  # type: ignore[no-untyped-call]
        deadline = time.monotonic() + _READ_S
        while True:
            answer = self._admin.list_offsets(
                {wire: newest}, isolation_level=IsolationLevel.READ_UNCOMMITTED, request_timeout=_ASK_S
            )
            try:
                return int(answer[wire].result(2 * _ASK_S).offset)
            except KafkaException as failure:
                if failure.args[0].code() not in _PASSING or time.monotonic() > deadline:
                    raise
                # The client does not ask by itself who leads now.
                with suppress(KafkaException):
                    self._admin.list_topics(wire.topic, timeout=_ASK_S)
                time.sleep(0.05)

    def settled(self, log: Log, deadline_s: float) -> dict[TopicPartition, int]:
        """Waits until no transaction is open any more, and returns the ends. Raises `DeadlineExceeded`."""
        deadline = time.monotonic() + deadline_s
        while True:
            stable = log.end_offsets((*PARTITIONS, ECHO))
            blocked = [p for p in stable if stable[p] < self.written(p)]
            if not blocked:
                return stable
            if time.monotonic() > deadline:
                one = blocked[0]
                raise DeadlineExceeded(
                    f"{one.topic}[{one.partition}]: its stable end is still {stable[one]} after {deadline_s:g} s, "
                    "behind an open transaction"
                )
            time.sleep(0.05)


def read_out(log: Log, book: Book, ends: dict[TopicPartition, int], deadline_s: float) -> list[Partition]:
    """Reads every partition from its beginning to `ends`; the partitions of which the end was reached."""
    reader = log.reader()
    deadline = time.monotonic() + deadline_s
    try:
        positions = dict.fromkeys(ends, 0)
        reader.assign(positions)
        book.assigned(positions)
        while any(positions[p] < end for p, end in ends.items()) and time.monotonic() < deadline:
            start = time.monotonic_ns()
            book.polled(start, reader.poll(500, 0.2))
            positions = reader.positions()
    finally:
        reader.close()
    return [(p.topic, p.partition) for p, end in ends.items() if positions[p] >= end]


def last_offsets(log: Log, ends: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
    """The offset of the last committed record of each partition below its end; a partition without one is absent."""
    found: dict[TopicPartition, int] = {}
    reader = log.reader()
    deadline = time.monotonic() + _READ_S
    try:
        reader.assign(dict.fromkeys(ends, 0))
        while any(reader.positions()[p] < end for p, end in ends.items()):
            if time.monotonic() > deadline:
                raise DeadlineExceeded(
                    f"the ends of {len(ends)} partitions were not read within {_READ_S:g} s"
                )
            for record in reader.poll(500, 0.2):
                found[TopicPartition(record.topic, record.partition)] = record.offset
    finally:
        reader.close()
    return found
