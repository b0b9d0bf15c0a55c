"""Sizes on the wire: a record that the broker would refuse is refused here, at once and by name (C42)."""

from __future__ import annotations

from typing import Final

from rollwire.schemas.errors import Refused
from rollwire.streams.seams.log import Outgoing, Record

# `message.max.bytes` of the broker and of every topic but `dead-letters`.
TOPIC_BYTES: Final = 8 * 1024 * 1024
# A dead letter holds a whole refused record of any topic plus its headers and the reason.
DEAD_LETTER_BYTES: Final = 10 * 1024 * 1024
# What a batch adds to a record: batch header, record header, varints; generous, since the broker judges the batch.
OVERHEAD_BYTES: Final = 4 * 1024


def record_bytes(record: Outgoing | Record) -> int:
    """Bytes of key, value and headers."""
    key, value = record.key, record.value
    size = (len(key) if key else 0) + (len(value) if value else 0) + 10 * len(record.headers)
    for name, content in record.headers:
        size += len(name) + (len(content) if content else 0)
    return size


def limit_bytes(topic: str) -> int:
    """The largest record that every broker of ours takes on `topic` (without the prefix)."""
    return (DEAD_LETTER_BYTES if topic == "dead-letters" else TOPIC_BYTES) - OVERHEAD_BYTES


def check_size(record: Outgoing) -> None:
    """Raises `Refused("too_large")`."""
    size = record_bytes(record)
    limit = limit_bytes(record.topic)
    if size > limit:
        raise Refused(
            "too_large", f"{size} bytes for topic {record.topic!r}, which takes {limit}; use a claim check"
        )
