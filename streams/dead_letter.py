"""A refusal as a record of `dead-letters`: the event whole, and headers that stock tools know (KIP-1034)."""

from __future__ import annotations

from typing import Final, NamedTuple

from rollwire.schemas.errors import Refused
from rollwire.schemas.records import DeadLetter, Header, Position
from rollwire.streams.emit import outgoing
from rollwire.streams.seams.log import Outgoing, Record

_PREFIX = "__streams.errors."

# A refusal that cannot be written would stop everything behind it (law 7), so what the codec would not take is cut
# here, and said: headers beyond this many (the codec's limit is 65,536), and text that is no Unicode.
KEPT_HEADERS: Final = 10_000


def dead_letter(record: Record, refused: Refused, *, refused_by: str, time_us: int) -> Outgoing:
    """The dead letter of `record`: key, value and headers as they were, with source position and reason."""
    detail = refused.detail
    if len(record.headers) > KEPT_HEADERS:
        detail = f"{detail} (of {len(record.headers)} headers the first {KEPT_HEADERS} are kept)"
    letter = outgoing(
        DeadLetter(
            source=Position(topic=record.topic, partition=record.partition, offset=record.offset),
            key=record.key,
            value=record.value,
            headers=tuple(
                Header(key=_text(name), value=value) for name, value in record.headers[:KEPT_HEADERS]
            ),
            source_timestamp_us=record.timestamp_ms * 1_000,
            reason=refused.reason,
            detail=_text(detail),
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


Place = tuple[str, int, int]  # topic, partition, offset


class Letter(NamedTuple):
    """What a dead letter is about: where the refused record stands, and the reason."""

    at: Place
    reason: str


def letter_of(output: Outgoing) -> Letter | None:
    """What a record made by `dead_letter` is about; None for every other record."""
    if output.topic != "dead-letters":
        return None
    found = {name: (value or b"").decode() for name, value in output.headers if name.startswith(_PREFIX)}
    if _PREFIX + "offset" not in found:
        return None
    at = (found[_PREFIX + "topic"], int(found[_PREFIX + "partition"]), int(found[_PREFIX + "offset"]))
    return Letter(at, found[_PREFIX + "exception"])


def _text(text: str) -> str:
    """`text` with lone surrogates spelt out: they have no UTF-8."""
    return text.encode(errors="backslashreplace").decode()
