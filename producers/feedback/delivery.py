"""The bookkeeping between what waits and the courier, without threads or HTTP: what both clients' loops do between requests."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from rollwire.producers.feedback.answers import Accepted, Answer
from rollwire.producers.feedback.courier import Courier, Outcome, RefusedFeedback
from rollwire.producers.feedback.waiting import Taken, Waiting
from rollwire.schemas.errors import FeedbackError

OnRefused = Callable[[RefusedFeedback], None]

_ZIP_ABOVE = 1_024  # bytes: below, one packet is one packet


class FeedbackCounts(NamedTuple):
    """Events of this client. sent = accepted + refused + damaged + pending, what it found in its spool included."""

    sent: int  # taken by `send`, or found in the spool
    accepted: int  # by the gateway, which answers when the log has them; `repeated` are among them
    repeated: int  # that the gateway knew already
    refused: int  # for good, each handed to `on_refused`
    damaged: int  # lines of the spool that could not be read; their file is kept
    pending: int  # wait to be sent, or for an answer


class Post(NamedTuple):
    body: bytes
    headers: dict[str, str]


class Delivery:
    """Not thread-safe but for `counts`: one sender calls it."""

    def __init__(self, waiting: Waiting, max_events: int, on_refused: OnRefused | None) -> None:
        self._waiting = waiting
        self._max_events = max_events
        self._on_refused = on_refused
        self._taken: Taken | None = None
        self.courier = Courier(max_events)
        self._accepted = 0
        self._repeated = 0
        self._refused = 0
        self._damaged = 0
        self._behind = 0  # put behind the others: counted twice by what waits
        self._overtaken: set[bytes] = set()  # of them, those that still wait

    def next_post(self) -> Post | None:
        """The next request; None = nothing waits."""
        while self.courier.idle:
            self._settle()
            self._taken = self._waiting.take(self._max_events)
            if self._taken is None:
                return None
            self.courier.load(self._taken.lines)
        return make_post(self.courier.post())

    def answered(self, answer: Answer, now: float, chance: float) -> None:
        self._apply(self.courier.answered(answer, now, datetime.now(UTC), chance))
        if self.courier.idle:
            self._settle()

    def failed(self, why: str, now: float, chance: float) -> None:
        self.courier.failed(why, now, chance)

    def settled_up_to(self, added: int) -> bool:
        """Whether the first `added` events are settled."""
        return self._waiting.count().settled >= added and not self._overtaken

    def counts(self) -> FeedbackCounts:
        added = self._waiting.count().added
        behind = self._behind
        done = self._accepted + self._refused + self._damaged
        return FeedbackCounts(
            added - behind,
            self._accepted,
            self._repeated,
            self._refused,
            self._damaged,
            added - behind - done,
        )

    def _settle(self) -> None:
        if self._taken is not None:
            self._damaged += self._taken.damaged
            if self._taken.damaged:
                warn(f"{self._taken.damaged} lines of the spool are damaged: their file is kept as *.damaged")
            self._waiting.settle(self._taken)
            self._taken = None

    def _apply(self, outcome: Outcome) -> None:
        for line in outcome.behind:
            try:
                self._waiting.append(line)
            except FeedbackError:
                self.courier.keep(line)
                continue
            self._behind += 1
            self._overtaken.add(line)
        for line, word in outcome.settled:
            self._overtaken.discard(line)
            if isinstance(word, Accepted):
                self._accepted += 1
                self._repeated += word.repeated
                continue
            self._refused += 1
            event: dict[str, object] = json.loads(line)
            refused = RefusedFeedback(str(event["feedback_id"]), word.code, word.field, word.detail, event)
            if self._on_refused is None:
                where = f" in {word.field}" if word.field else ""
                warn(f"the gateway refused {refused.feedback_id}: {word.code}{where}: {word.detail}")
                continue
            try:
                self._on_refused(refused)
            except Exception as error:  # noqa: BLE001  the caller's code: what it does must not end the sending
                warn(f"on_refused failed for {refused.feedback_id}: {error!r}")


def make_post(lines: Sequence[bytes]) -> Post:
    """NDJSON, zipped where that saves anything."""
    body = b"\n".join(lines) + b"\n"
    headers = {"content-type": "application/x-ndjson"}
    if len(body) > _ZIP_ABOVE:
        zipper = zlib.compressobj(1, wbits=31)  # 31: a gzip header around the largest window
        body = zipper.compress(body) + zipper.flush()
        headers["content-encoding"] = "gzip"
    return Post(body, headers)


def warn(message: str) -> None:
    """By the standard library's logging, not structlog: this runs in other people's processes, whose logs they set up."""
    import logging

    logging.getLogger("rollwire.feedback").warning(message)
