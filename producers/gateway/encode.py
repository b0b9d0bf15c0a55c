"""The record of an event without a comment, written straight: what `schemas.codec.encode` makes of the same `Feedback`.

A gateway's events are of one shape, and most of their bytes are the same in all: who sent it, when it was received, what
reads it. Those are made once a caller and request. The general codec takes five times as long; a property test holds that
both give the same record, byte for byte, so that a new version of the schema fails here first.
"""

from __future__ import annotations

import struct
from datetime import UTC, datetime
from typing import Final

from rollwire.producers.gateway.judge import Draft
from rollwire.schemas.codec import CONTENT_TYPE, head_of, schema_for
from rollwire.schemas.records import Feedback
from rollwire.streams.seams.log import Outgoing

SOURCE: Final = "rollwire/gateway"
_NULL: Final = b"\x00"
_SOME: Final = b"\x02"  # the second branch of a union with null
_ID_SOURCES: Final = {"client": b"\x00", "content": b"\x02"}  # symbols of the schema's enum, in order
_double: Final = struct.Struct("<d").pack
_Headers = tuple[tuple[str, bytes | None], ...]


def _size(n: int) -> bytes:
    """A length as Avro writes it: zigzag, then 7 bits a byte."""
    n <<= 1
    out = bytearray()
    while n > 0x7F:
        out.append(n & 0x7F | 0x80)
        n >>= 7
    out.append(n)
    return bytes(out)


_SIZES: Final = tuple(
    _size(n) for n in range(1_024)
)  # of the longest label in UTF-8, and all that is shorter


def _text(text: str) -> bytes:
    data = text.encode()
    return _SIZES[len(data)] + data


def _time(time_us: int) -> bytes:
    """A time as Avro writes it. Between 2000 and 2100 its zigzag has 50 to 53 bits: 8 bytes of 7 bits, spread by masks."""
    n = time_us << 1
    n = (n & 0x0FFF_FFFF) | (n & 0x00FF_FFFF_F000_0000) << 4
    n = (n & 0x0000_3FFF_0000_3FFF) | (n & 0x0FFF_C000_0FFF_C000) << 2
    n = (n & 0x007F_007F_007F_007F) | (n & 0x3F80_3F80_3F80_3F80) << 1
    return (n | 0x0080_8080_8080_8080).to_bytes(8, "little")


class Encoder:
    """Of one caller's events by one dialect. Raises what a schema registry raises, where one is set."""

    def __init__(self, tenant: str, key_id: str, dialect: str) -> None:
        schema = schema_for(Feedback)
        self._topic = schema.spec.name
        self._head = head_of(schema)
        self._tenant = _text(tenant)
        self._event = f"{tenant}/".encode()
        self._end = _NULL + _NULL + _text(dialect) + _text(key_id)  # no comment, no seal
        self._before: _Headers = (
            ("ce_specversion", b"1.0"),
            ("ce_type", schema.event_type),
            ("ce_source", SOURCE.encode()),
        )
        self._second = -1
        self._date = ""
        self.received(0)

    def received(self, now_us: int) -> None:
        """The time of the events that follow."""
        second, us = divmod(now_us, 1_000_000)
        if second != self._second:
            self._second = second
            self._date = datetime.fromtimestamp(second, UTC).strftime("%Y-%m-%dT%H:%M:%S")
        self._received = _time(now_us)
        self._after: _Headers = (
            ("ce_time", f"{self._date}.{us:06d}Z".encode()),
            ("content-type", CONTENT_TYPE),
        )

    def record(self, draft: Draft) -> Outgoing:
        feedback_id = draft.feedback_id.encode()
        group_id = draft.group_id.encode()
        value, label = draft.value, draft.label
        body = b"".join(
            (
                self._head,
                _SIZES[len(feedback_id)],
                feedback_id,
                _ID_SOURCES[draft.id_source],
                self._tenant,
                b"\x48",  # 36 characters
                group_id,
                _text(draft.rollout_id),
                _text(draft.signal),
                _NULL if value is None else _SOME + _double(value),
                _NULL if label is None else _SOME + _text(label),
                _time(draft.happened_us),
                self._received,
                _text(draft.subject),
                self._end,
            )
        )
        return Outgoing(
            self._topic,
            group_id,
            body,
            (*self._before, ("ce_id", self._event + feedback_id), *self._after),
        )
