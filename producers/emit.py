"""Events to records of the log and back, for the producers (whose room does not reach `streams.emit`)."""

from __future__ import annotations

from rollwire.schemas.codec import decode, encode
from rollwire.schemas.records import Event
from rollwire.streams.seams.log import Outgoing, Record


def outgoing(event: Event, *, source: str, time_us: int) -> Outgoing:
    """`source` is the CloudEvents source, e.g. `rollwire/verifier`; `time_us` becomes `ce_time`."""
    return Outgoing(*encode(event, source=source, time_us=time_us))


def decode_record(record: Record) -> Event:
    """The event of a record, its key checked too. Raises `Refused` and nothing else."""
    # No event of ours has an empty key, so a missing one is refused.
    return decode(record.topic, record.value, record.headers, record.key or b"")
