"""The in-memory twin of the cache."""

from __future__ import annotations

import threading

from rollwire.streams.seams.clock import Clock, SystemClock


class MemoryCache:
    """Values expire by the clock that is given. Thread-safe."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock: Clock = clock if clock is not None else SystemClock()
        self._lock = threading.Lock()
        self._values: dict[str, tuple[bytes, float | None]] = {}

    def set(self, key: str, value: bytes, ttl_s: float | None = None) -> None:
        ends = None if ttl_s is None else self._clock.monotonic_s() + ttl_s
        with self._lock:
            self._values[key] = (bytes(value), ends)

    def get(self, key: str) -> bytes | None:
        with self._lock:
            value, ends = self._values.get(key, (None, None))
        return None if ends is not None and ends <= self._clock.monotonic_s() else value

    def set_many(self, values: dict[str, bytes]) -> None:
        for key, value in values.items():
            self.set(key, value)

    def get_prefix(self, prefix: str) -> dict[str, bytes]:
        with self._lock:
            keys = sorted(key for key in self._values if key.startswith(prefix))
        return {key: value for key in keys if (value := self.get(key)) is not None}

    def purge(self, text: str) -> int | None:
        with self._lock:
            found = [k for k, (value, _) in self._values.items() if text in k or text.encode() in value]
            for key in found:
                del self._values[key]
        return len(found)

    def close(self) -> None:
        with self._lock:
            self._values.clear()
