"""A record of either topic as its event. Pure."""

from __future__ import annotations

from rollwire.schemas.codec import decode
from rollwire.schemas.errors import Refused
from rollwire.schemas.reasons import REASONS
from rollwire.schemas.records import Event, Feedback
from rollwire.schemas.validate_feedback import REFUSED_HEADER

Headers = tuple[tuple[str, bytes | None], ...]


def opened(topic: str, value: bytes | None, headers: Headers, key: bytes | None) -> Event:
    """Raises `Refused` for what does not decode, and for feedback that its gateway told the caller no about and kept: an id with
    other content, for another rollout perhaps, where nothing here would know of the first one."""
    event = decode(topic, value, headers, key or b"")
    if isinstance(event, Feedback):
        for name, reason in headers:
            if name == REFUSED_HEADER and reason is not None and reason.decode(errors="replace") in REASONS:
                raise Refused(reason.decode(), "the gateway refused it, and kept it for the audit")
    return event
