"""Decides what is sent when, and what becomes of each event: the pure core that all clients share.

The shell hands over events (`load`), asks what to post (`post`), and says what came of it (`answered`, `failed`). Time
(seconds, monotonic) and chance (in [0, 1)) are arguments.

Retries wait `min(cap, base * 2^n)` times chance ("full jitter", M. Brooker, "Exponential Backoff And Jitter", AWS 2015), and
on top what the gateway asked for, so that clients that were all told the same do not come back all at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Final, NamedTuple

from rollwire.producers.feedback.answers import (
    Accepted,
    Answer,
    Closed,
    Later,
    Refusal,
    Split,
    Unsettled,
    Word,
    read_answer,
)

RETRY_BASE_S: Final = 0.2
RETRY_CAP_S: Final = 30.0
# A single event that the gateway fails on (500) this often goes behind the others.
_TRIES_OF_ONE: Final = 3


class RefusedFeedback(NamedTuple):
    """An event that the gateway refused for good; sending it again would not help."""

    feedback_id: str
    code: str  # machine-readable: "unknown_signal", "value_out_of_range", "conflicting_repeat", ...
    field: str  # of the event, "" = the whole
    detail: str  # for people
    event: dict[str, object]  # as it was sent


class Settled(NamedTuple):
    line: bytes
    word: Accepted | Refusal


class Outcome(NamedTuple):
    settled: tuple[Settled, ...] = ()
    behind: tuple[bytes, ...] = ()  # to be appended to what waits: no event may hold up the others


def backoff_s(
    failures: int, chance: float, *, base_s: float = RETRY_BASE_S, cap_s: float = RETRY_CAP_S
) -> float:
    """The wait after the n-th failure in a row (n >= 1)."""
    return float(min(cap_s, base_s * 2.0 ** min(failures - 1, 32)) * chance)


class Courier:
    """One batch at a time. `trouble` says why the last request did not settle its events, "" = it did; `closed` that no
    request will until a person did something."""

    def __init__(self, max_events: int) -> None:
        self._max_events = max_events
        self._size = max_events
        self._hand: list[bytes] = []
        self._sent = 0
        self._failures = 0
        self._tries_of_one = 0
        self._not_before = 0.0  # own patience
        self._asked_until = 0.0  # the gateway's wish: nobody's hurry goes before it
        self.trouble = ""
        self.closed = False
        self.begun = 0  # requests
        self.ended = 0  # of them, whichever way

    @property
    def idle(self) -> bool:
        """Everything that was loaded is settled."""
        return not self._hand

    def load(self, lines: Sequence[bytes]) -> None:
        self._hand.extend(lines)

    def wait_s(self, now: float) -> float:
        """Until the next post may go; 0 = now."""
        return max(0.0, self._not_before - now, self._asked_until - now)

    def hurry(self) -> None:
        """The next post need not wait for chance, only for what the gateway asked: somebody waits, or is about to leave."""
        self._not_before = 0.0

    def keep(self, line: bytes) -> None:
        """An event of `Outcome.behind` for which there was no room elsewhere."""
        self._hand.insert(0, line)

    def post(self) -> tuple[bytes, ...]:
        """The events of the next request. The same ones again until `answered` or `failed` was called."""
        self.begun += 1
        self._sent = min(self._size, len(self._hand))
        return tuple(self._hand[: self._sent])

    def answered(self, answer: Answer, now: float, clock: datetime, chance: float) -> Outcome:
        outcome = self._read(answer, now, clock, chance)
        self.ended += 1  # last: another thread that sees it counted sees what it meant
        return outcome

    def _read(self, answer: Answer, now: float, clock: datetime, chance: float) -> Outcome:
        reading = read_answer(answer, self._sent, clock)
        if isinstance(reading, Closed):
            self.closed = True
            self._retry(reading.why, None, now, chance)
            return Outcome()
        self.closed = False
        if isinstance(reading, Split):
            self._size = max(1, self._sent // 2)
            self.trouble = reading.why
            return Outcome()
        if isinstance(reading, Later):
            return self._later(reading, now, chance)
        return self._words(reading.items, reading.after_s, now, chance)

    def failed(self, why: str, now: float, chance: float) -> None:
        """There was no answer: not sent, or sent and the outcome unknown."""
        self._retry(why, None, now, chance)
        self.ended += 1

    def _words(self, words: Sequence[Word], after_s: float | None, now: float, chance: float) -> Outcome:
        sent, rest = self._hand[: self._sent], self._hand[self._sent :]
        settled: list[Settled] = []
        left: list[bytes] = []
        for line, word in zip(sent, words, strict=True):
            if isinstance(word, Unsettled):
                left.append(line)
            else:
                settled.append(Settled(line, word))
        self._hand = left + rest
        self._tries_of_one = 0
        if left and not settled:
            self._retry("the gateway took none of the events for now", after_s, now, chance)
            return Outcome()
        self._failures = 0
        self.trouble = ""
        self._size = min(self._max_events, self._size * 2)
        if left:
            self._retry(f"the gateway left {len(left)} of {len(sent)} events for later", after_s, now, chance)
        return Outcome(tuple(settled))

    def _later(self, later: Later, now: float, chance: float) -> Outcome:
        self._retry(later.why, later.after_s, now, chance)
        if not later.faulty:
            return Outcome()
        if self._sent > 1:
            self._size = self._sent // 2
            return Outcome()
        self._tries_of_one += 1
        if self._tries_of_one < _TRIES_OF_ONE:
            return Outcome()
        self._tries_of_one = 0
        return Outcome(behind=(self._hand.pop(0),))

    def _retry(self, why: str, after_s: float | None, now: float, chance: float) -> None:
        self._failures += 1
        self.trouble = why
        self._asked_until = now + (after_s or 0.0)
        self._not_before = self._asked_until + backoff_s(self._failures, chance)
