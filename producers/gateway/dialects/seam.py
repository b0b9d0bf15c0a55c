"""The dialect seam: what differs between the APIs that feedback may arrive by. The record inside is one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from rollwire.producers.gateway.access import Refusal
from rollwire.producers.gateway.commit import Fate
from rollwire.producers.gateway.item import Parsed
from rollwire.producers.gateway.records import Entry

JSON = b"application/json"
PROBLEM = b"application/problem+json"


class Said(msgspec.Struct, frozen=True, gc=False):
    """What a request says: its events in order, each well-formed or refused."""

    items: Sequence[Parsed]
    batch: bool  # whether the answer is one of a batch, also where there is one event


class Answer(msgspec.Struct, frozen=True, gc=False):
    status: int
    body: bytes
    media_type: bytes = JSON
    retry_after_s: float | None = None
    close: bool = False  # the connection ends with it: its request was not read to the end
    headers: tuple[tuple[bytes, bytes], ...] = ()


class Dialect(Protocol):
    """Stateless."""

    @property
    def name(self) -> str:
        """`Feedback.dialect` of its events."""
        ...

    @property
    def path(self) -> str:
        """Where it is posted to."""
        ...

    def parse(self, body: bytes, media_type: str, max_items: int) -> Said | Refusal:
        """`body` as it is after inflating; `media_type` without parameters, in lower case, "" where none was sent."""
        ...

    def answer(
        self, said: Said, results: Sequence[Entry | Refusal], fates: Sequence[Fate], request_id: str
    ) -> Answer:
        """Every event was decided. `fates` are those of the entries among `results`, in order; () = all are new."""
        ...

    def problem(self, refusal: Refusal, request_id: str) -> Answer:
        """The whole request is not taken."""
        ...
