"""One event as a caller says it, out of JSON. One parser decides (msgspec), and it decides alone.

It refuses NaN, Infinity, numbers beyond a double, lone surrogates, bytes that are no UTF-8, unknown fields and wrong types.
What it would let pass is looked for here: of two equal keys it keeps the last, so keys are counted. All fields are scalars:
in a body without a backslash each string has exactly two quotation marks, and one count of a whole body shows a repeat.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

import msgspec
from msgspec import UNSET, UnsetType

from rollwire.producers.gateway.access import Refusal

_Text = str | None | UnsetType


class Item(msgspec.Struct, forbid_unknown_fields=True, gc=False, frozen=True):
    """The fields of one event. null is as good as absent, but not as a value."""

    rollout_id: str
    signal: str
    value: bool | float | UnsetType = UNSET
    happened_at: str | float | UnsetType | None = UNSET  # RFC 3339 with a zone, or seconds since 1970
    feedback_id: _Text = UNSET
    label: _Text = UNSET
    comment: _Text = UNSET
    subject: _Text = UNSET


_ONE: Final = msgspec.json.Decoder(Item)
_MANY: Final = msgspec.json.Decoder(list[Item])
_RAWS: Final = msgspec.json.Decoder(list[msgspec.Raw])
# Matches from every quotation mark on, also where the string never ends: a search that failed there would begin again at each
# of a million marks. Possessive throughout: nothing is tried twice.
_STRING: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
_NOT_FINITE: Final = re.compile(rb'"(\w{1,40})"\s*:\s*[+-]?(?:NaN|Infinity|nan|inf)')
_AT: Final = re.compile(r" - at `\$\.?([^`]*)`$")
_QUOTED: Final = re.compile(r"`([^`]*)`")
_SHOWN: Final = 300

Parsed = Item | Refusal


def _marks(item: Item) -> int:
    """Quotation marks of an event that names no key twice and holds no backslash."""
    n = 8  # rollout_id and signal: two keys, two strings
    if item.value is not UNSET:
        n += 2
    if item.happened_at is not UNSET:
        n += 4 if type(item.happened_at) is str else 2
    if item.feedback_id is not UNSET:
        n += 4 if item.feedback_id is not None else 2
    if item.subject is not UNSET:
        n += 4 if item.subject is not None else 2
    if item.label is not UNSET:
        n += 4 if item.label is not None else 2
    if item.comment is not UNSET:
        n += 4 if item.comment is not None else 2
    return n


def parse_one(raw: bytes | memoryview, field: str = "") -> Parsed:
    """One event; `field` is the path of the object in the body."""
    try:
        item = _ONE.decode(raw)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        return refusal_of(error, bytes(raw), field)
    marks = bytes(raw).count(b'"')
    if marks != _marks(item) and 2 * len(_STRING.findall(raw)) != _marks(item):
        return Refusal(400, "repeated_key", "a key stands there twice", field)
    return item


def parse_lines(body: bytes) -> list[Parsed]:
    """NDJSON: an event a line, in order; empty lines are passed over."""
    try:
        items: Sequence[Parsed] = _ONE.decode_lines(body)
    except (msgspec.DecodeError, RecursionError, ValueError):
        pass
    else:
        if _whole(items, body):
            return list(items)
    lines = [line for line in body.split(b"\n") if line.strip()]
    return [parse_one(line, f"items[{index}]") for index, line in enumerate(lines)]


def parse_array(body: bytes) -> list[Parsed] | Refusal:
    """A JSON array of events; the refusal of the whole where it is no array."""
    try:
        items: Sequence[Parsed] = _MANY.decode(body)
    except (msgspec.DecodeError, RecursionError, ValueError):
        pass
    else:
        if _whole(items, body):
            return list(items)
    try:
        raws = _RAWS.decode(body)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        return refusal_of(error, body, "")
    return [parse_one(memoryview(raw), f"items[{index}]") for index, raw in enumerate(raws)]


def _whole(items: Sequence[Any], body: bytes) -> bool:
    """Whether no key stands twice in any event of the body; False also where that would need a closer look."""
    return b"\\" not in body and body.count(b'"') == sum(map(_marks, items))


def may_be(body: bytes, events: int) -> bool:
    """Whether a JSON array can be of so many well-formed events, found without parsing it and before anything large is held.
    An event has eight members at most: eight commas with the one behind it, sixteen strings."""
    commas, strings = 8 * events, 16 * events
    if body.count(b",") <= commas:
        return True
    at = 0
    for found in _STRING.finditer(body):
        commas -= body.count(b",", at, found.start())
        strings -= 1
        at = found.end()
        if commas < 0 or strings < 0:
            return False
    return body.count(b",", at) <= commas


def refusal_of(error: Exception, raw: bytes, field: str) -> Refusal:
    """What the parser said, as a code and the path of the field. Only words are chosen here: it is refused already."""
    if isinstance(error, RecursionError):
        return Refusal(400, "malformed", "nested too deep", field)
    text = str(error)
    at = _AT.search(text)
    said = _AT.sub("", text)[:_SHOWN]
    named = at[1] if at else ""
    if "Number out of range" in text:
        return Refusal(400, "not_finite", "a number beyond a double", _path(field, named))
    if isinstance(error, msgspec.ValidationError):
        quoted = _QUOTED.search(said)
        if "unknown field" in said and quoted:
            return Refusal(400, "unknown_field", said, _path(field, quoted[1][:80]))
        if "missing required" in said and quoted:
            return Refusal(400, "missing_field", said, _path(field, quoted[1]))
        return Refusal(400, "wrong_type", said, _path(field, named))
    not_finite = _NOT_FINITE.search(raw)
    if not_finite:
        name = not_finite[1].decode(errors="replace")
        return Refusal(400, "not_finite", "NaN and Infinity are no JSON numbers", _path(field, name))
    return Refusal(400, "malformed", said, field)


def _path(field: str, name: str) -> str:
    return f"{field}.{name}" if field and name else field or name
