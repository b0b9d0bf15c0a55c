"""The clock seam: wall time for what is written down, monotonic time for what is measured."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def now_us(self) -> int:
        """Microseconds since the Unix epoch."""
        ...

    def monotonic_s(self) -> float: ...


class SystemClock:
    def now_us(self) -> int:
        return time.time_ns() // 1_000

    def monotonic_s(self) -> float:
        return time.monotonic()


class ManualClock:
    """A clock that moves when it is told to."""

    def __init__(self, now_us: int = 1_767_225_600_000_000) -> None:  # 2026-01-01T00:00:00Z
        self._now_us = now_us

    def now_us(self) -> int:
        return self._now_us

    def monotonic_s(self) -> float:
        return self._now_us / 1e6

    def advance(self, seconds: float) -> None:
        self._now_us += round(seconds * 1e6)
