"""One event as said, judged: a draft of the record, or why not. Pure: the clock and the caller are arguments.

Order of the checks: ids, text, time, then the rules' (`schemas.rules.check_value`). Nothing is clamped, trimmed or rounded.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime, timedelta
from hashlib import blake2b, sha256
from hmac import digest as hmac_digest
from typing import Final, NamedTuple

import msgspec
from msgspec import UNSET

from rollwire.producers.gateway.access import Refusal
from rollwire.producers.gateway.item import Item
from rollwire.schemas.errors import Refused
from rollwire.schemas.ids import opened_us, parse_rollout_id
from rollwire.schemas.rules import Rules, check_value

_ID: Final = re.compile(r"[A-Za-z0-9._:-]{1,128}")
# None has a place in a name; a comment has lines and tabs, but no NUL: it breaks readers that end texts there (C74).
_NAME_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f]")
_EARLIEST_S: Final = 946_684_800  # 2000-01-01; as in `schemas.validate`
_LATEST_S: Final = 4_102_444_800
_RFC3339: Final = re.compile(r"\d{4}-\d\d-\d\d[Tt ]\d\d:\d\d:\d\d(\.\d{1,9})?([Zz]|[+-]\d\d:\d\d)", re.ASCII)
_EPOCH: Final = datetime.fromisoformat("1970-01-01T00:00:00+00:00")
_MICROSECOND: Final = timedelta(microseconds=1)
MAX_NAME: Final = 256  # characters of a label or a subject


class Context(NamedTuple):
    """What is known of a request beside its body."""

    tenant: str
    key_id: str
    dialect: str
    secret: bytes  # of pseudonyms and digests
    pseudonym: Callable[[str, str], str]  # (tenant, subject) -> 32 hex digits
    max_comment_bytes: int
    max_skew_us: int


class Draft(msgspec.Struct, frozen=True, gc=False):
    """An accepted event before its comment is sealed."""

    feedback_id: str
    id_source: str  # "client" | "content"
    group_id: str
    rollout_id: str
    signal: str
    value: float | None
    label: str | None
    happened_us: int
    subject: str  # pseudonym; "" = none
    comment: str | None  # plain
    digest: bytes  # 16 bytes, of all that the caller said


def judge(item: Item, context: Context, rules: Rules, now_us: int) -> Draft | Refusal:
    """The draft of `item`, or the refusal with the field that is wrong. `now_us`: when it was received."""
    try:
        group_id, _ = parse_rollout_id(item.rollout_id)
    except Refused as refused:
        return Refusal(400, refused.reason, refused.detail, "rollout_id")
    feedback_id, subject, label, comment = item.feedback_id, item.subject, item.label, item.comment
    if feedback_id is UNSET or feedback_id is None:
        feedback_id = ""
    elif _ID.fullmatch(feedback_id) is None:
        return Refusal(400, "id_invalid", "1 to 128 of A-Z a-z 0-9 . _ : -", "feedback_id")
    if label is UNSET:
        label = None
    if label is not None and (wrong := _name(label, "label")):
        return wrong
    if subject is UNSET or subject is None:
        subject = ""
    elif wrong := _name(subject, "subject"):
        return wrong
    if comment is UNSET:
        comment = None
    if comment is not None and (wrong := _comment(comment, subject, context)):
        return wrong
    happened = item.happened_at
    happened_us, said_when = now_us, ""
    if happened is not UNSET and happened is not None:
        try:
            happened_us = _us_of(happened)
            said_when = str(happened_us)
        except (ValueError, OverflowError):
            return Refusal(
                400,
                "time_invalid",
                "RFC 3339 with a zone (2026-01-31T12:00:00Z), or seconds since 1970",
                "happened_at",
            )
    if wrong := _in_time(group_id, happened_us, now_us, context.max_skew_us, rules.horizon_us):
        return wrong
    try:
        value = check_value(rules, item.signal, _number(item.value, item.signal, rules), label)
    except Refused as refused:
        return Refusal(400, refused.reason, refused.detail, refused.field)
    if value is None and comment is None:
        return Refusal(400, "value_missing", f"signal {item.signal!r} is a text: give a comment", "comment")
    said = (
        f"{item.rollout_id}\0{item.signal}\0{value!r}\0{label!r}\0{subject}\0{said_when}\0{comment!r}"
    ).encode()
    id_source = "client"
    if not feedback_id:
        id_source = "content"
        feedback_id = (
            "sha256:" + hmac_digest(context.secret, f"{context.tenant}\0".encode() + said, sha256).hex()
        )
    return Draft(
        feedback_id,
        id_source,
        group_id,
        item.rollout_id,
        item.signal,
        value,
        label,
        happened_us,
        context.pseudonym(context.tenant, subject) if subject else "",
        comment,
        blake2b(said, digest_size=16, key=context.secret).digest(),
    )


def _name(text: str, field: str) -> Refusal | None:
    if not text or len(text) > MAX_NAME:
        return Refusal(400, "text_invalid", f"1 to {MAX_NAME} characters", field)
    if _NAME_CONTROL.search(text):
        return Refusal(400, "text_invalid", "a control character", field)
    return None


def _comment(text: str, subject: str, context: Context) -> Refusal | None:
    if not text:
        return Refusal(400, "text_invalid", "empty: leave it out", "comment")
    if "\0" in text:
        return Refusal(400, "text_invalid", "a NUL character", "comment")
    if len(text) > context.max_comment_bytes or len(text.encode()) > context.max_comment_bytes:
        return Refusal(413, "too_large", f"more than {context.max_comment_bytes} bytes of UTF-8", "comment")
    if not subject:
        return Refusal(
            400,
            "missing_field",
            "a comment is sealed with its person's key: name the person, however you like",
            "subject",
        )
    return None


def _us_of(happened: str | float) -> int:
    """Microseconds since the epoch. Raises `ValueError` or `OverflowError`."""
    if isinstance(happened, str):
        if _RFC3339.fullmatch(happened) is None:
            raise ValueError("not RFC 3339")
        return (datetime.fromisoformat(happened.upper()) - _EPOCH) // _MICROSECOND
    if not _EARLIEST_S <= happened < _LATEST_S:
        raise ValueError("not seconds since 1970")
    return round(happened * 1e6)


def _in_time(group_id: str, happened_us: int, now_us: int, skew_us: int, horizon_us: int) -> Refusal | None:
    opened = opened_us(group_id)
    if opened > now_us + skew_us:
        return Refusal(400, "time_invalid", "the rollout's id was made in the future", "rollout_id")
    if opened < now_us - horizon_us:
        return Refusal(400, "late", f"the rollout is older than {horizon_us // 1_000_000} s", "rollout_id")
    if happened_us > now_us + skew_us:
        return Refusal(400, "time_invalid", "in the future", "happened_at")
    if happened_us < opened - skew_us:
        return Refusal(400, "time_invalid", "before its rollout was opened", "happened_at")
    return None


def _number(value: object, signal: str, rules: Rules) -> float | None:
    """The value as a number. true and false are numbers of boolean signals only (C71)."""
    if value is UNSET:
        return None
    if value is True or value is False:
        known = rules.signals.get(signal)
        if known is not None and known.kind != "boolean":
            raise Refused("wrong_type", f"{signal!r} takes a number, not {str(value).lower()}", field="value")
        return float(value)
    if isinstance(value, float):
        return value
    raise Refused("wrong_type", "a number or a boolean", field="value")
