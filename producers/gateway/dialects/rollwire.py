"""Rollwire's own API: `POST /v1/feedback`. A JSON object is one event; a JSON array, or NDJSON, is a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rollwire.producers.gateway import answers
from rollwire.producers.gateway.access import Refusal
from rollwire.producers.gateway.commit import Fate
from rollwire.producers.gateway.dialects.seam import Answer, Said
from rollwire.producers.gateway.item import may_be, parse_array, parse_lines, parse_one
from rollwire.producers.gateway.records import Entry

PATH: Final = "/v1/feedback"
_LINES: Final = frozenset(
    {"application/x-ndjson", "application/ndjson", "application/jsonl", "application/json-lines"}
)
# `navigator.sendBeacon` may say text/plain alone without asking first: then the form of the body says what it is.
_UNSAID: Final = frozenset({"text/plain", ""})
_JSON: Final = frozenset({"application/json", "text/plain", "text/json", ""})


class RollwireDialect:
    name = "rollwire"
    path = PATH

    def parse(self, body: bytes, media_type: str, max_items: int) -> Said | Refusal:
        if media_type in _LINES or (media_type in _UNSAID and _first_line_is_whole(body)):
            return _batch(parse_lines(body) if body.count(b"\n") < max_items else _too_many(max_items))
        if media_type not in _JSON:
            return Refusal(
                415,
                "media_type_unknown",
                f"Content-Type {media_type[:80]!r}: send application/json or application/x-ndjson",
            )
        if body[:64].lstrip()[:1] == b"[":
            items = parse_array(body) if may_be(body, max_items) else _too_many(max_items)
            if not isinstance(items, Refusal) and len(items) > max_items:
                items = _too_many(max_items)
            return _batch(items)
        return Said([parse_one(body)], False)

    def answer(
        self, said: Said, results: Sequence[Entry | Refusal], fates: Sequence[Fate], request_id: str
    ) -> Answer:
        if said.batch:
            return answers.batch(results, fates, request_id)
        return answers.single(results[0], fates, request_id)

    def problem(self, refusal: Refusal, request_id: str) -> Answer:
        return answers.problem(refusal, request_id)


def _batch(items: Sequence[object] | Refusal) -> Said | Refusal:
    if isinstance(items, Refusal):
        return items
    if not items:
        return Refusal(400, "empty", "a batch without events")
    return Said(items, True)  # type: ignore[arg-type]


def _first_line_is_whole(body: bytes) -> bool:
    """Of more than one line: an object that is spread over lines begins with one that it does not end in."""
    line, _, rest = body.strip().partition(b"\n")
    return bool(rest) and line.startswith(b"{") and line.rstrip().endswith(b"}")


def _too_many(most: int) -> Refusal:
    return Refusal(413, "too_many", f"more than {most} events in one request")
