"""A refusal as a record of `dead-letters`: the event whole, and headers that stock tools know (KIP-1034)."""

from __future__ import annotations

from rollwire.schemas.errors import Refused
from rollwire.schemas.records import DeadLetter, Header, Position
from rollwire.streams.emit import outgoing
from rollwire.streams.seams.log import Outgoing, Record

_PREFIX = "__streams.errors."


def dead_letter(record: Record, refused: Refused, *, refused_by: str, time_us: int) -> Outgoing:
    """The dead letter of `record`: key, value and headers as they were, with source position and reason."""
    letter = outgoing(
        DeadLetter(
            source=Position(topic=record.topic, partition=record.partition, offset=record.offset),
            key=record.key,
            value=record.value,
            headers=tuple(Header(key=name, value=value) for name, value in record.headers),
            source_timestamp_us=record.timestamp_ms * 1_000,
            reason=refused.reason,
            detail=refused.detail,
            refused_by=refused_by,
            refused_us=time_us,
        ),
        source=f"rollwire/{refused_by}",
        time_us=time_us,
    )
    errors = (
        (_PREFIX + "exception", refused.reason.encode()),
        (_PREFIX + "message", refused.detail.encode(errors="replace")[:1_000]),
        (_PREFIX + "topic", record.topic.encode()),
        (_PREFIX + "partition", str(record.partition).encode()),
        (_PREFIX + "offset", str(record.offset).encode()),
    )
    return letter._replace(headers=(*letter.headers, *errors))
