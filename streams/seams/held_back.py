"""Who holds readers back: partitions whose last stable offset stands behind what is written, and the open transactions there.

The client library cannot list transactions, but the coordinator keeps them in a topic: `__transaction_state`, key =
transactional id, value = its state and partitions. Its format is the broker's own affair, so a name is a help and never a fact
that anything is decided by: what does not parse is left out.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from confluent_kafka import OFFSET_BEGINNING, Consumer, IsolationLevel, KafkaError, KafkaException
from confluent_kafka import TopicPartition as WirePartition
from confluent_kafka.admin import AdminClient

# Not exported by the package, but the only instances that type checkers accept.
from confluent_kafka.admin._listoffsets import LatestSpec, OffsetSpec

from rollwire.schemas.errors import LogUnavailable
from rollwire.streams.seams.log import HeldBack, TopicPartition

_STATE: Final = "__transaction_state"
_ASK_S: Final = 1.0
_READ_S: Final = 3.0
_VALUE_HEAD: Final = struct.Struct(">hqhib")  # version, producer id, epoch, time-out in ms, status
_ONGOING: Final = 1


def held_back(
    admin: AdminClient, prefix: str, partitions: Sequence[TopicPartition]
) -> dict[TopicPartition, HeldBack]:
    """See `rollwire.streams.seams.log.SharedLog.held_back`; within a few seconds."""
    stable, written = (
        _ends(admin, prefix, partitions, level)
        for level in (IsolationLevel.READ_COMMITTED, IsolationLevel.READ_UNCOMMITTED)
    )
    return {p: HeldBack(stable[p], written[p]) for p in partitions if stable[p] < written[p]}


def open_transactions(config: Mapping[str, Any]) -> dict[str, bytes]:
    """Transactional id -> the coordinator's record, of every transaction that is under way."""
    consumer = Consumer(dict(config))
    found: dict[str, bytes] = {}
    try:
        known = consumer.list_topics(_STATE, timeout=_ASK_S).topics[_STATE].partitions
        consumer.assign([WirePartition(_STATE, number, OFFSET_BEGINNING) for number in known])
        left, deadline = len(known), time.monotonic() + _READ_S
        while left and time.monotonic() < deadline:
            for message in consumer.consume(1_000, 0.2):
                error = message.error()
                if error is not None:
                    left -= error.code() == KafkaError._PARTITION_EOF
                    continue
                name, value = transactional_id(message.key()), message.value()
                if name is None:
                    continue
                if value is not None and is_ongoing(value):
                    found[name] = value
                else:
                    found.pop(name, None)
    except (KafkaException, KeyError):
        return {}  # a broker that does not show it
    finally:
        consumer.close()
    return found


def transactional_id(key: bytes | None) -> str | None:
    if key is None or len(key) < 4:
        return None
    version, length = struct.unpack(">hh", key[:4])
    return key[4:].decode(errors="replace") if version == 0 and length == len(key) - 4 else None


def is_ongoing(value: bytes) -> bool:
    return len(value) >= _VALUE_HEAD.size and _VALUE_HEAD.unpack_from(value)[4] == _ONGOING


def _ends(
    admin: AdminClient, prefix: str, partitions: Sequence[TopicPartition], level: IsolationLevel
) -> dict[TopicPartition, int]:
    newest: OffsetSpec = LatestSpec()  # type: ignore[no-untyped-call]
    wires: dict[WirePartition, OffsetSpec] = {
        WirePartition(prefix + p.topic, p.partition): newest for p in partitions
    }
    try:
        answers = admin.list_offsets(wires, isolation_level=level, request_timeout=_ASK_S)
        return {
            TopicPartition(wire.topic.removeprefix(prefix), wire.partition): answer.result(2 * _ASK_S).offset
            for wire, answer in answers.items()
        }
    except (KafkaException, TimeoutError) as failure:
        raise LogUnavailable(f"asking for both ends: {failure}") from failure
