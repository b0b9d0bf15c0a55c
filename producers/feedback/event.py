"""One piece of feedback as the gateway takes it: a JSON object on a line of its own. Pure.

Checked here is what no rules could allow, so that the mistake shows where it is made; everything else (is the signal known,
is the value in its range) the gateway's rules decide. An event is complete when `send` returns: its id and its time stand in
the line, so that every retry, after a restart too, is the same event.
"""

from __future__ import annotations

import json
import math
import re
from datetime import UTC, datetime, timedelta
from typing import Final

from rollwire.schemas.errors import Refused
from rollwire.schemas.ids import new_group_id, parse_rollout_id

MAX_LINE_BYTES: Final = 64 * 1024
"""Bytes of one event as JSON: a long comment fits, a document does not."""

_ID: Final = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
# 2000-01-01 to 2100-01-01 in seconds: what is outside is no time in seconds (C45).
_EARLIEST_S: Final = 946_684_800
_LATEST_S: Final = 4_102_444_800

Value = bool | int | float
When = datetime | int | float


def feedback_line(
    rollout_id: str,
    signal: str,
    value: Value | None,
    *,
    label: str | None,
    comment: str | None,
    subject: str | None,
    happened_at: When | None,
    feedback_id: str | None,
    now_us: int,
    random_bits: int,
) -> tuple[str, bytes]:
    """(feedback id, its line without the line's end).

    `now_us` stands in for `happened_at`, and with the lowest 74 bits of `random_bits` for `feedback_id` (a UUIDv7).
    Raises `Refused`: `id_invalid`, `not_finite`, `time_invalid`, `too_large` or `malformed`.
    """
    for name, given in (("rollout_id", rollout_id), ("signal", signal), ("label", label)):
        if not isinstance(given, str) and (given is not None or name != "label"):
            raise Refused("malformed", f"{name} is {given!r}, which is no text", name)
    for name, given in (("comment", comment), ("subject", subject), ("feedback_id", feedback_id)):
        if given is not None and not isinstance(given, str):
            raise Refused("malformed", f"{name} is of type {type(given).__name__}, not text", name)
    parse_rollout_id(rollout_id)
    if not signal:
        raise Refused("malformed", "signal is empty: name one of the gateway's rules, such as 'thumb'")
    if feedback_id is None:
        feedback_id = new_group_id(now_us, random_bits)
    elif not _ID.fullmatch(feedback_id):
        raise Refused(
            "id_invalid", f"feedback_id={feedback_id[:80]!r} is not 1 to 128 of A-Z a-z 0-9 . _ : -"
        )
    event: dict[str, object] = {
        "feedback_id": feedback_id,
        "rollout_id": rollout_id,
        "signal": signal,
        "happened_at": _time_text(now_us if happened_at is None else _to_us(happened_at)),
    }
    if value is not None:
        event["value"] = _number(value)
    for name, text in (("label", label), ("comment", comment), ("subject", subject)):
        if text is not None:
            event[name] = text
    if value is None and label is None and comment is None:
        raise Refused("malformed", f"feedback {signal!r} says nothing: give a value, a label or a comment")
    if comment is not None and not subject:
        raise Refused(
            "malformed",
            "a comment is encrypted with its person's key: name the person in subject, by any id of yours",
        )
    try:
        line = json.dumps(event, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
    except UnicodeEncodeError:
        # Half of an emoji, cut in the middle of a UTF-16 pair: no UTF-8 can say it.
        raise Refused("malformed", "a text holds a lone surrogate, which is no character") from None
    if len(line) > MAX_LINE_BYTES:
        raise Refused(
            "too_large", f"feedback of {len(line)} bytes; at most {MAX_LINE_BYTES}: shorten the comment"
        )
    return feedback_id, line


def _number(value: Value) -> Value:
    # numpy's numbers are floats or have `item`, but `json` knows none of the latter: say it here.
    if not isinstance(value, bool | int | float):
        raise Refused("malformed", f"value is of type {type(value).__name__}, not a number or a boolean")
    if isinstance(value, float) and not math.isfinite(value):
        raise Refused("not_finite", f"value is {value}")
    return value


def _to_us(when: When) -> int:
    if isinstance(when, datetime):
        if when.tzinfo is None:
            raise Refused("time_invalid", f"happened_at={when} names no time zone: use datetime.now(UTC)")
        return (when - _EPOCH) // timedelta(microseconds=1)
    if isinstance(when, bool) or not isinstance(when, int | float) or not _EARLIEST_S <= when < _LATEST_S:
        raise Refused(
            "time_invalid", f"happened_at={when!r} is no time zone-aware datetime and no seconds since 1970"
        )
    return round(when * 1e6)


def _time_text(time_us: int) -> str:
    """RFC 3339 in UTC, to the microsecond."""
    try:
        moment = _EPOCH + timedelta(microseconds=time_us)
    except OverflowError:
        raise Refused("time_invalid", f"happened_at={time_us} us is outside of the calendar") from None
    return moment.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
