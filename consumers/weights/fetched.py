"""A store for one reader: counts what it reads, and fetches what it will ask for next while it works."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

from rollwire.schemas.records import LinkObject
from rollwire.streams.seams.store import ObjectInfo, ObjectStore

AHEAD_BYTES: Final = 256 << 20
THREADS: Final = 4


class FetchedStore:
    """An `ObjectStore`. Objects that were announced by `expect` come in parallel, in that order, each given out once; no
    more than `ahead_bytes` of them wait, or one if it is larger. `expect` and `get` are of one thread, ranges of any.

    What is announced by `expect_all` comes first and is not held back: for whoever is going to hold all of it anyway.
    """

    def __init__(self, store: ObjectStore, *, threads: int = THREADS, ahead_bytes: int = AHEAD_BYTES) -> None:
        self._store = store
        self._ahead_bytes = ahead_bytes
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="weights-fetch")
        self._lock = threading.Lock()
        self._queue: deque[LinkObject] = deque()
        self._coming: dict[str, tuple[LinkObject, Future[bytes]]] = {}
        self._ahead = 0
        self.read_bytes = 0

    def expect(self, objects: Sequence[LinkObject]) -> None:
        """What is asked for next, in order. Replaces what was expected before."""
        with self._lock:
            self._drop()
            self._queue.extend(objects)
            self._fill()

    def expect_all(self, objects: Sequence[LinkObject]) -> None:
        with self._lock:
            for entry in objects:
                self._start(entry)

    def get(self, key: str, *, sha256: str | None = None) -> bytes:
        with self._lock:
            coming = self._coming.pop(key, None)
        if coming is None or coming[0].sha256 != sha256:
            data = self._store.get(key, sha256=sha256)
        else:
            entry, future = coming
            try:
                data = future.result()
            finally:
                with self._lock:
                    self._ahead -= entry.size
                    self._fill()
        self.read_bytes += len(data)
        return data

    def get_range(self, key: str, start: int, end: int) -> bytes:
        data = self._store.get_range(key, start, end)
        with self._lock:  # ranges come several at a time
            self.read_bytes += len(data)
        return data

    def create(self, key: str, data: bytes) -> bool:
        return self._store.create(key, data)

    def head(self, key: str) -> ObjectInfo | None:
        return self._store.head(key)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        return self._store.list(prefix)

    def delete(self, key: str) -> None:
        self._store.delete(key)

    def probe(self) -> None:
        self._store.probe()

    def close(self) -> None:
        """Waits for nothing: what is on its way is thrown away."""
        with self._lock:
            self._drop()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _counted(self, data: bytes) -> bytes:
        with self._lock:  # ranges come by several threads
            self.read_bytes += len(data)
        return data

    def _fill(self) -> None:
        while self._queue and (self._ahead == 0 or self._ahead + self._queue[0].size <= self._ahead_bytes):
            self._start(self._queue.popleft())

    def _start(self, entry: LinkObject) -> None:
        if entry.key in self._coming:  # the same object twice: the second time it is asked for anew
            return
        self._ahead += entry.size
        future = self._pool.submit(self._store.get, entry.key, sha256=entry.sha256)
        self._coming[entry.key] = (entry, future)

    def _drop(self) -> None:
        self._queue.clear()
        for _, future in self._coming.values():
            future.cancel()
        self._coming.clear()
        self._ahead = 0
