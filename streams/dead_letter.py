"""A refusal as a record of `dead-letters`: the event whole, and headers that stock tools know (KIP-1034)."""

from __future__ import annotations

from typing import Final, NamedTuple

from rollwire.schemas.errors import Refused
from rollwire.schemas.records import DeadLetter, Header, Position
from rollwire.streams.emit import outgoing
from rollwire.streams.seams.log import Outgoing, Record

_PREFIX = "__streams.errors."

# A refusal that cannot be written would stop everything behind it (law 7), so what the codec would not take is cut
# here, and said: headers beyond this many (the codec's limit is 65,536), text that is no Unicode, and bytes beyond what
# `dead-letters` takes: a broker's limit is one of compressed batches, so a record of a few kilobytes may be of any size.
KEPT_HEADERS: Final = 10_000
KEPT_BYTES: Final = 9 * 1024 * 1024
_HEADER_BYTES: Final = 16  # a header's lengths, and a character of its name that was cut in two


def dead_letter(record: Record, refused: Refused, *, refused_by: str, time_us: int) -> Outgoing:
    """The dead letter of `record`: key, value and headers as they were, with source position and reason."""
    detail = refused.detail
    if len(record.headers) > KEPT_HEADERS:
        detail = f"{detail} (of {len(record.headers)} headers the first {KEPT_HEADERS} are kept)"
    key, value = record.key, record.value
    headers = tuple(Header(key=_text(name), value=data) for name, data in record.headers[:KEPT_HEADERS])
    if (size := _size(key, value, headers)) > KEPT_BYTES:
        detail = f"{detail} (of {size} bytes the first {KEPT_BYTES} are kept)"
        key, value, headers = _kept(key, value, headers)
    letter = outgoing(
        DeadLetter(
            source=Position(topic=record.topic, partition=record.partition, offset=record.offset),
            key=key,
            value=value,
            headers=headers,
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


def cut(letter: DeadLetter) -> str | None:
    """What of the record was not kept, so that it cannot be written as it was; None = it is whole."""
    if len(letter.headers) >= KEPT_HEADERS:
        return f"only its first {KEPT_HEADERS} headers were kept"
    if _size(letter.key, letter.value, letter.headers) >= KEPT_BYTES:
        return f"only its first {KEPT_BYTES} bytes were kept"
    return None


def _kept(
    key: bytes | None, value: bytes | None, headers: tuple[Header, ...]
) -> tuple[bytes | None, bytes | None, tuple[Header, ...]]:
    """The first `KEPT_BYTES` of a record: of its key, then of its value, then of its headers."""
    left = KEPT_BYTES
    key = None if key is None else key[:left]
    left -= len(key or b"")
    value = None if value is None else value[:left]
    left -= len(value or b"")
    kept: list[Header] = []
    for header in headers:
        if left <= 0:
            break
        name = header.key.encode()[:left].decode(errors="ignore")
        left -= len(name.encode()) + _HEADER_BYTES
        data = None if header.value is None else header.value[: max(left, 0)]
        left -= len(data or b"")
        kept.append(Header(key=name, value=data))
    return key, value, tuple(kept)


def _size(key: bytes | None, value: bytes | None, headers: tuple[Header, ...]) -> int:
    of_headers = sum(len(h.key.encode()) + len(h.value or b"") + _HEADER_BYTES for h in headers)
    return len(key or b"") + len(value or b"") + of_headers


def _text(text: str) -> str:
    """`text` with lone surrogates spelt out: they have no UTF-8."""
    return text.encode(errors="backslashreplace").decode()
