"""Membership in a Kafka consumer group, for its assignment alone.

What is fixed here and why
    range                       joined topics must be shared out in whole pairs; cooperative-sticky splits them
    nothing is assigned         to the consumer itself, so it fetches nothing: sessions read with readers of their own
    session.timeout.ms          who is killed is missed within MEMBER_TIMEOUT_S, so that a standby takes over within 10 s
    client.id has a start time  `range` goes by member ids, which begin with it: who was there first keeps its part
                                when another process comes
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from confluent_kafka import Consumer, KafkaError, KafkaException
from confluent_kafka import TopicPartition as WirePartition

from rollwire.schemas.errors import DeadlineExceeded, LogError, LogUnavailable, TopicMismatch
from rollwire.streams.seams.log import TopicPartition, TransactionalWriter
from rollwire.streams.seams.log_kafka_write import bounded

MEMBER_TIMEOUT_S: Final = 6.0  # the least that a broker with default settings takes
_LEAVE_S: Final = 1.0
_NEW_TOPIC_S: Final = 1.0  # the broker tells of a topic this much later at most
_PASSING: Final = frozenset(
    {
        KafkaError._TRANSPORT,
        KafkaError._ALL_BROKERS_DOWN,
        KafkaError._MAX_POLL_EXCEEDED,
        KafkaError._TIMED_OUT,
    }
)

MakeWriter = Callable[[str, float, Mapping[str, Callable[[], object]]], TransactionalWriter]


class KafkaMember:
    """A place in `group`; see `rollwire.streams.seams.log.Member`."""

    def __init__(
        self,
        config: Mapping[str, Any],
        prefix: str,
        group: str,
        topics: Sequence[str],
        revoke: Callable[[frozenset[TopicPartition]], None],
        make_writer: MakeWriter,
    ) -> None:
        self._prefix = prefix
        self._group = group
        self._revoke = revoke
        self._make_writer = make_writer
        self._held: frozenset[TopicPartition] = frozenset()
        self._metadata: object = None
        self._consumer = Consumer(
            dict(config)
            | {
                "client.id": f"{config['client.id']}.{time.time_ns():020d}",
                "partition.assignment.strategy": "range",
            }
        )
        self._names = [prefix + topic for topic in topics]
        self._consumer.subscribe(
            self._names,
            on_assign=self._assigned,
            on_revoke=self._revoked,
            on_lost=self._revoked,
        )

    def poll(self, timeout_s: float) -> frozenset[TopicPartition]:
        message = self._consumer.poll(timeout_s)
        # A place changes in `poll` alone, and the client answers no other thread while that waits (nor one that settles
        # while `revoke` runs in it): so it is read here, and every commit takes what was read last. Whoever stood still
        # meanwhile shows a generation that is over, and is refused.
        self._metadata = self._consumer.consumer_group_metadata()
        error = message.error() if message is not None else None
        if error is not None and not error.retriable() and error.code() not in _PASSING:
            text = f"member of group {self._group!r}: {error.str()} ({error.name()})"
            if error.code() != KafkaError.UNKNOWN_TOPIC_OR_PART:
                raise LogError(text)
            if self._missing():
                raise TopicMismatch(f"{text}; create it with `rollwire topics apply`")
        return self._held

    def transactional_writer(self, transactional_id: str, timeout_s: float = 60.0) -> TransactionalWriter:
        return self._make_writer(transactional_id, timeout_s, {self._group: self._place})

    def close(self) -> None:
        self._let_go()
        self._metadata = None
        try:
            bounded(self._consumer.close, _LEAVE_S)
        except (DeadlineExceeded, KafkaException):
            return  # the broker is away: it will miss this member when its time is up

    def _missing(self) -> bool:
        """Whether a topic is really not there: a broker that just came back may not know of it for a moment."""
        deadline = time.monotonic() + _NEW_TOPIC_S
        while time.monotonic() < deadline:
            try:
                known = self._consumer.list_topics(timeout=_NEW_TOPIC_S).topics
            except KafkaException:
                return False  # away: nobody can tell
            if all(name in known for name in self._names):
                return False
            time.sleep(0.1)
        return True

    def _place(self) -> object:
        if self._metadata is None:
            raise LogUnavailable(f"there is no place in group {self._group!r}: not joined yet, or given up")
        return self._metadata

    def _assigned(self, consumer: Consumer, partitions: list[WirePartition]) -> None:
        consumer.assign([])
        self._held = frozenset(
            TopicPartition(wire.topic.removeprefix(self._prefix), wire.partition) for wire in partitions
        )

    def _revoked(self, consumer: Consumer, partitions: list[WirePartition]) -> None:
        self._let_go()
        consumer.unassign()

    def _let_go(self) -> None:
        held, self._held = self._held, frozenset()
        if held:
            self._revoke(held)
