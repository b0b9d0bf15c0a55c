"""One dead letter in full: where it came from, its bytes, what they decode to, and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from rollwire.ops.dlq.letters import Letter, events, letter_of
from rollwire.ops.readable import Look, json_line, raw, readable_event, shut
from rollwire.schemas.advice import ADVICE
from rollwire.schemas.codec import decode, decode_value, framed_schema
from rollwire.schemas.errors import Refused
from rollwire.schemas.records import DeadLetter
from rollwire.streams.seams.log import Log
from rollwire.streams.settlement import Settlement

HEX_BYTES: Final = 512
_LINE: Final = 16


def find(log: Log, name: str) -> tuple[Letter, DeadLetter] | None:
    """The letter with that id, or at that position (`partition:offset`), with its event; its marks are not read."""
    for record, event in events(log):
        if event is not None:
            letter = letter_of(record, event)
            if name in (letter.id, str(letter.at)):
                return letter, event
    return None


def hex_lines(data: bytes, limit: int = HEX_BYTES) -> Iterator[str]:
    """Offset, bytes and printable characters, 16 a line; the first `limit` bytes."""
    for start in range(0, min(len(data), limit), _LINE):
        part = data[start : min(start + _LINE, limit)]
        text = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in part)
        yield f"{start:08x}  {part.hex(' '):<{3 * _LINE - 1}}  {text}"
    if len(data) > limit:
        yield f"... {len(data) - limit:,} more bytes"


def tried(event: DeadLetter, look: Look = shut) -> Iterator[str]:
    """What the codec says of the value now: the event, or the first thing that is wrong with it and what still reads."""
    topic, value = event.source.topic, event.value
    if event.reason == "kills_worker":  # it would kill this one as well
        yield "not decoded: processes died of it"
        return
    headers = tuple((header.key, header.value) for header in event.headers)
    try:
        yield f"decodes: {json_line(readable_event(decode(topic, value, headers, event.key), look))}"
        return
    except Refused as refused:
        yield f"does not decode: {refused.reason}: {refused.detail}"
    if value is None:
        return
    try:
        schema, start = framed_schema(topic, value)
        yield f"its fields, unchecked: {json_line(readable_event(decode_value(value, schema, start), look))}"
    except Refused:
        return
    except ValueError as error:  # arrays of a length that no dtype has
        yield f"its fields cannot be shown: {error}"


def lines(
    letter: Letter, event: DeadLetter, marks: tuple[Settlement, ...], time: Any, look: Look = shut
) -> Iterator[str]:
    """The letter for people. `time` turns microseconds into text; `look` says what is shown of sealed content."""
    source = event.source
    yield f"dead letter  {letter.at}  {letter.id}"
    yield f"state        {letter._replace(marks=marks).state}"
    for done in marks:
        why = f": {done.why}" if done.why else ""
        yield f"             {done.action} {time(done.at_us)} by {done.by}{why}"
    yield f"source       {source.topic}[{source.partition}] at offset {source.offset}, written {time(event.source_timestamp_us)}"
    yield f"refused      {time(event.refused_us)} by {event.refused_by}; replayed {letter.replays} times before"
    yield f"reason       {event.reason}: {event.detail}"
    yield f"do           {ADVICE.get(event.reason, 'Look at the detail.')}"
    yield f"key          {raw(event.key)}"
    for header in event.headers[:50]:
        yield f"header       {header.key} = {raw(header.value)}"
    if len(event.headers) > 50:
        yield f"header       ... {len(event.headers) - 50:,} more"
    yield "value        null" if event.value is None else f"value        {len(event.value):,} bytes"
    yield from (f"  {line}" for line in hex_lines(event.value or b""))
    yield from tried(event, look)
