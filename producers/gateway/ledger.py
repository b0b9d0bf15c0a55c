"""What became of every event that was received: the five numbers of law 7, and what the gateway shows of itself.

    received = accepted + refused + shed + pending        at every moment

An event is counted when its request was read: `received` and `pending`; by its answer it leaves `pending`. What cannot be
told apart into events (no JSON, no key) counts as one. Only the event loop's thread touches these.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from typing import Final

SECONDS: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
EVENTS: Final = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1_000.0, 2_000.0, 5_000.0)


class Histogram:
    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


class Ledger:
    def __init__(self, started_us: int = 0) -> None:
        self.started_us = started_us  # Unix time from which on it counts
        self.received = 0
        self.accepted = 0
        self.refused: Counter[str] = Counter()  # by code
        self.shed: Counter[str] = Counter()  # by code
        self.pending = 0
        self.repeated = 0  # of the accepted: nothing was written, the first one counts
        self.late = 0  # acknowledged by the broker after their caller was told that the outcome is unknown
        self.latency = Histogram(SECONDS)  # whole request to answer
        self.commit = Histogram(SECONDS)  # one write
        self.commit_events = Histogram(EVENTS)

    def begin(self, events: int) -> None:
        self.received += events
        self.pending += events

    def accept(self, events: int, repeated: int) -> None:
        """`repeated`: how many of them were in the log before."""
        self.accepted += events
        self.repeated += repeated
        self.pending -= events

    def refuse(self, code: str, events: int = 1) -> None:
        self.refused[code] += events
        self.pending -= events

    def drop(self, code: str, events: int) -> None:
        """Answered 429, 500 or 503."""
        self.shed[code] += events
        self.pending -= events

    @property
    def gap(self) -> int:
        """0 is the only good value."""
        return self.received - self.accepted - self.refused.total() - self.shed.total() - self.pending
