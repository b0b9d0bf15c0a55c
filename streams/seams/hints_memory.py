"""The in-memory twin of the hints."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence

from rollwire.streams.seams.clock import Clock, SystemClock
from rollwire.streams.seams.hints import NOTHING, WIDTH, Lease, Leased


def lease_from(tokens: float, lease: Lease) -> tuple[float, Leased]:
    """What `tokens` (refilled already) leave for a lease: (the tokens after it, what it is granted)."""
    left = tokens - lease.spent
    granted = max(0, min(lease.want, math.floor(left)))
    left -= granted
    return left, Leased(granted, max(0.0, (1.0 - left) / lease.rate))


class MemoryHints:
    """Time passes by the clock that is given. `away` = nobody answers. Thread-safe."""

    def __init__(self, clock: Clock | None = None) -> None:
        self.away = False
        self._clock: Clock = clock if clock is not None else SystemClock()
        self._lock = threading.Lock()
        self._digests: dict[bytes, tuple[bytes, float]] = {}
        self._buckets: dict[str, tuple[float, float]] = {}

    def digests(self, names: bytes) -> bytes | None:
        if self.away:
            return None
        now_s = self._clock.monotonic_s()
        with self._lock:
            found = [self._digests.get(names[at : at + WIDTH]) for at in range(0, len(names), WIDTH)]
        return b"".join(NOTHING if hit is None or hit[1] <= now_s else hit[0] for hit in found)

    def put_digests(self, names: bytes, digests: bytes, ttl_s: float) -> None:
        if self.away:
            return
        ends_s = self._clock.monotonic_s() + ttl_s
        with self._lock:
            for at in range(0, len(names), WIDTH):
                self._digests[names[at : at + WIDTH]] = (digests[at : at + WIDTH], ends_s)

    def lease(self, leases: Sequence[Lease]) -> list[Leased] | None:
        if self.away:
            return None
        now_s = self._clock.monotonic_s()
        answers: list[Leased] = []
        with self._lock:
            for lease in leases:
                tokens, at_s = self._buckets.get(lease.name, (float(lease.burst), now_s))
                tokens = min(float(lease.burst), tokens + max(0.0, now_s - at_s) * lease.rate)
                tokens, leased = lease_from(tokens, lease)
                self._buckets[lease.name] = (tokens, now_s)
                answers.append(leased)
        return answers

    def close(self) -> None:
        with self._lock:
            self._digests.clear()
            self._buckets.clear()
