"""Events to records of the log and back: the codec, in the seam's words."""

from __future__ import annotations

from collections.abc import Sequence

from rollwire.schemas.codec import decode, encode, is_delete
from rollwire.schemas.errors import Refused
from rollwire.schemas.records import Event, Group
from rollwire.schemas.splice import encode_group
from rollwire.streams.seams.log import Outgoing, Record
from rollwire.streams.step import Taken


def outgoing(event: Event, *, source: str, time_us: int) -> Outgoing:
    """The record to write for an event; `source` says who writes it, `time_us` when. Raises `Refused`."""
    encoded = encode(event, source=source, time_us=time_us)
    return Outgoing(encoded.topic, encoded.key, encoded.value, encoded.headers, encoded.partition)


def outgoing_group(group: Group, values: Sequence[bytes | None], *, source: str, time_us: int) -> Outgoing:
    """The same for a group, of whose rollouts the records' values are at hand; see `schemas.splice.encode_group`."""
    encoded = encode_group(group, values, source=source, time_us=time_us)
    return Outgoing(encoded.topic, encoded.key, encoded.value, encoded.headers, encoded.partition)


def decode_record(record: Record) -> Event:
    """The event of a record, its key checked too. Raises `Refused` and nothing else.

    A null value is refused; on a compacted topic it is a delete: ask `deletes` first.
    """
    key = (
        b"" if record.key is None else record.key
    )  # no event of ours has an empty key: a missing one is refused
    return decode(record.topic, record.value, record.headers, key)


def deletes(record: Record) -> bool:
    """Whether a record deletes its key: a null value on a compacted topic."""
    return is_delete(record.topic, record.value)


def take(record: Record) -> Taken:
    """A record decoded for a step."""
    if deletes(record):
        return Taken(record, None)
    try:
        return Taken(record, decode_record(record))
    except Refused as refused:
        return Taken(record, refused)
