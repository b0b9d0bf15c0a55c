"""Answers: problem details (RFC 9457) for what is not taken, a word on every event for what was read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from http import HTTPStatus
from typing import Any

import msgspec

from rollwire.producers.gateway.access import Refusal
from rollwire.producers.gateway.commit import CONFLICTING, NEW, REPEATED, Fate
from rollwire.producers.gateway.dialects.seam import PROBLEM, Answer
from rollwire.producers.gateway.records import Entry

CONFLICT = Refusal(
    409,
    "conflicting_repeat",
    "this id was acknowledged with other content; both are kept, the first one counts",
    "feedback_id",
)
_encode = msgspec.json.Encoder().encode


def problem(refusal: Refusal, request_id: str) -> Answer:
    """`{type, title, status, code, field, detail, request_id}`."""
    body: dict[str, Any] = {
        "type": "about:blank",
        "title": HTTPStatus(refusal.status).phrase,
        "status": refusal.status,
        "code": refusal.code,
        "field": refusal.field,
        "detail": refusal.detail,
        "request_id": request_id,
    }
    return Answer(refusal.status, _encode(body), PROBLEM, refusal.retry_after_s, refusal.status in (408, 413))


def single(result: Entry | Refusal, fates: Sequence[Fate], request_id: str) -> Answer:
    if isinstance(result, Refusal):
        return problem(result, request_id)
    fate = fates[0] if fates else NEW
    if fate == CONFLICTING:
        return problem(CONFLICT, request_id)
    # Ids are of characters that JSON takes as they are.
    return Answer(200, b'{%b,"request_id":"%b"}' % (_taken(result, fate), request_id.encode()))


def batch(results: Sequence[Entry | Refusal], fates: Sequence[Fate], request_id: str) -> Answer:
    """200 where every event is accepted, 400 where none is, else 207; `items` has a word on each event, in order."""
    words: list[bytes] = []
    accepted = 0
    of = iter(fates) if fates else _all_new()
    for result in results:
        refusal: Refusal | None
        if isinstance(result, Refusal):
            refusal = result
        else:
            fate = next(of)
            refusal = CONFLICT if fate == CONFLICTING else None
            if refusal is None:
                accepted += 1
                words.append(b"{%b}" % _taken(result, fate))
                continue
        index = len(words)
        words.append(_refused(refusal, index, result))
    refused = len(words) - accepted
    body = b'{"accepted":%d,"refused":%d,"request_id":"%b","items":[%b]}' % (
        accepted,
        refused,
        request_id.encode(),
        b",".join(words),
    )
    return Answer(200 if not refused else 207 if accepted else 400, body)


def _all_new() -> Iterator[Fate]:
    while True:
        yield NEW


def _taken(entry: Entry, fate: Fate) -> bytes:
    return b'"status":200,"feedback_id":"%b","id_source":"%b","repeated":%b' % (
        entry.key[1].encode(),
        entry.id_source.encode(),
        b"true" if fate == REPEATED else b"false",
    )


def _refused(refusal: Refusal, index: int, result: Entry | Refusal) -> bytes:
    place = f"items[{index}]"
    field = refusal.field
    if not field.startswith(place):
        field = f"{place}.{field}" if field else place
    word: dict[str, Any] = {
        "status": refusal.status,
        "code": refusal.code,
        "field": field,
        "detail": refusal.detail,
    }
    if not isinstance(result, Refusal):
        word["feedback_id"] = result.key[1]
    return _encode(word)
