"""What an answer of the gateway means for the events that were asked about. Pure.

An event is settled by the gateway's own word on it alone; anything else (no answer, a proxy's page, a word that is not
understood) leaves its outcome unknown, and it is sent again under its id.
"""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

_MAX_RETRY_AFTER_S: Final = (
    300.0  # a clock that is wrong, or a typing error, must not silence a client for a day
)


# Where the event stood in its request says nothing to who sent it.
_PLACE: Final = re.compile(r"^items\[\d+\]\.?")


class Answer(NamedTuple):
    """One HTTP answer. `retry_after` is the header as it came."""

    status: int
    body: bytes
    retry_after: str | None = None


class Accepted(NamedTuple):
    repeated: bool  # the gateway had it already: a retry whose first answer was lost


class Refusal(NamedTuple):
    code: str
    field: str
    detail: str


class Unsettled(NamedTuple):
    """To be sent again."""


Word = Accepted | Refusal | Unsettled


class Words(NamedTuple):
    """One word for each event, in order."""

    items: tuple[Word, ...]
    after_s: float | None  # the gateway's wish for those that are unsettled


class Later(NamedTuple):
    """The whole request is to be sent again."""

    why: str
    after_s: float | None
    faulty: bool = False  # it failed *on* something (500), which may be in the request


class Split(NamedTuple):
    """The whole request is refused, and more than one event was in it: which of them it is, smaller ones will tell."""

    why: str


class Closed(NamedTuple):
    """Every request is turned away, whatever is in it: a key, an address or a version is wrong."""

    why: str


Reading = Words | Later | Split | Closed


def read_answer(answer: Answer, count: int, now: datetime) -> Reading:
    """What `answer` says on a request of `count` events. `now` is only used where Retry-After is a date."""
    status = answer.status
    body = _json(answer.body)
    after_s = retry_after_s(answer.retry_after, now)
    said = _problem(status, body)
    if status in (408, 425, 429) or status >= 500:
        return Later(said, after_s, faulty=status == 500)
    if status in (401, 403):
        return Closed(f"{said}: check the key")
    if 300 <= status < 400 or status in (404, 405, 410):
        return Closed(f"{said}: check the address")
    words = _words(body, count)
    if words is not None:
        return Words(words, after_s)
    if status < 300:
        return Later(f"{said}, which says nothing of the events: is this address a gateway's?", after_s)
    return Words((_refusal(status, body),), None) if count == 1 else Split(said)


def retry_after_s(text: str | None, now: datetime) -> float | None:
    """Seconds of a Retry-After header (RFC 9110, 10.2.3: seconds or a date), at most 300; None without a usable one."""
    if text is None:
        return None
    if text.strip().isdigit():
        seconds = float(text)
    else:
        from email.utils import parsedate_to_datetime

        try:
            moment = parsedate_to_datetime(text)
        except ValueError:
            return None
        seconds = ((moment if moment.tzinfo else moment.replace(tzinfo=UTC)) - now).total_seconds()
    return min(max(seconds, 0.0), _MAX_RETRY_AFTER_S)


def _json(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


def _words(body: Any, count: int) -> tuple[Word, ...] | None:
    """The gateway's words on each event; None where the body is not that."""
    if not isinstance(body, dict):
        return None
    items = body.get("items")
    if isinstance(items, list):
        return tuple(_word(item) for item in items) if len(items) == count else None
    return (_word(body),) if count == 1 and "feedback_id" in body and "code" not in body else None


def _word(item: Any) -> Word:
    if not isinstance(item, dict):
        return Unsettled()
    status = item.get("status")
    if "code" not in item:
        return Accepted(item.get("repeated") is True) if "feedback_id" in item else Unsettled()
    if not isinstance(status, int) or status in (408, 425, 429) or status >= 500:
        return Unsettled()
    return _refusal(status, item)


def _refusal(status: int, body: Any) -> Refusal:
    said = body if isinstance(body, dict) else {}
    field = _PLACE.sub("", str(said.get("field") or ""))
    return Refusal(str(said.get("code") or f"http_{status}"), field, str(said.get("detail") or ""))


def _problem(status: int, body: Any) -> str:
    said = f"the gateway answered {status}"
    if isinstance(body, dict) and body.get("code"):
        said += f" {body['code']}"
        if body.get("detail"):
            said += f" ({str(body['detail'])[:200]})"
    return said
