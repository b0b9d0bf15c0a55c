"""The in-memory twin of the object store: create-only writes, digests, listing in key order. Thread-safe."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from typing import NamedTuple

from rollwire.schemas.errors import DeltaCorrupt, ObjectConflict, ObjectMissing
from rollwire.streams.seams.clock import Clock, SystemClock
from rollwire.streams.seams.store import ObjectInfo

REFRESH_US = 12 * 3600 * 1_000_000
"""An object older than this is put again by `create`: the collector removes what nothing names after 24 h (law 3)."""


class _Object(NamedTuple):
    data: bytes
    modified_us: int


class MemoryStore:
    def __init__(self, clock: Clock | None = None) -> None:
        self._clock: Clock = clock if clock is not None else SystemClock()
        self._lock = threading.Lock()
        self._objects: dict[str, _Object] = {}

    def create(self, key: str, data: bytes) -> bool:
        now_us = self._clock.now_us()
        with self._lock:
            known = self._objects.get(key)
            if known is None:
                self._objects[key] = _Object(bytes(data), now_us)
                return True
            if known.data != data:
                raise ObjectConflict(f"{key!r} exists with other content")
            if now_us - known.modified_us > REFRESH_US:
                self._objects[key] = _Object(known.data, now_us)
            return False

    def get(self, key: str, *, sha256: str | None = None) -> bytes:
        data = self._at(key).data
        verify(key, data, sha256)
        return data

    def get_range(self, key: str, start: int, end: int) -> bytes:
        check_range(key, start, end)
        return self._at(key).data[start:end]

    def head(self, key: str) -> ObjectInfo | None:
        with self._lock:
            known = self._objects.get(key)
        return None if known is None else ObjectInfo(key, len(known.data), known.modified_us)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        with self._lock:
            found = sorted((k, o) for k, o in self._objects.items() if k.startswith(prefix))
        for key, known in found:
            yield ObjectInfo(key, len(known.data), known.modified_us)

    def delete(self, key: str) -> None:
        with self._lock:
            self._objects.pop(key, None)

    def purge(self, key: str) -> None:
        """There are no older versions here."""
        self.delete(key)

    def probe(self) -> None:
        """Conditions hold by construction."""

    def ensure_bucket(self) -> None:
        """Nothing to make."""

    def _at(self, key: str) -> _Object:
        with self._lock:
            known = self._objects.get(key)
        if known is None:
            raise ObjectMissing(f"{key!r} does not exist")
        return known


def verify(key: str, data: bytes, sha256: str | None) -> None:
    """Raises `DeltaCorrupt` where `data` does not have the digest that was asked for."""
    if sha256 is not None and (found := hashlib.sha256(data).hexdigest()) != sha256:
        raise DeltaCorrupt(f"{key!r}: {len(data)} bytes with SHA-256 {found}, {sha256} was published")


def check_range(key: str, start: int, end: int) -> None:
    if not 0 <= start < end:
        raise ValueError(f"{key!r}: [{start}, {end}) is no range of bytes")
