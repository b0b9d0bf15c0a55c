"""The object store of the simulation, with a fault at every call. Objects are never changed: that is checked here."""

from __future__ import annotations

from collections.abc import Iterator

from rollwire.ops.simulate.world import Process, World
from rollwire.schemas.errors import StoreUnavailable
from rollwire.streams.seams.store import ObjectInfo, ObjectStore


class ProcessStore:
    """The store as one process sees it; implements `rollwire.streams.seams.store.ObjectStore`."""

    def __init__(self, world: World, store: ObjectStore, process: Process) -> None:
        self._world = world
        self._inner = store
        self._process = process

    def create(self, key: str, data: bytes) -> bool:
        return self._world.effect(
            self._process, "create", lambda: self._inner.create(key, data), StoreUnavailable
        )

    def get(self, key: str, *, sha256: str | None = None) -> bytes:
        return self._world.effect(
            self._process, "get", lambda: self._inner.get(key, sha256=sha256), StoreUnavailable
        )

    def get_range(self, key: str, start: int, end: int) -> bytes:
        return self._world.effect(
            self._process, "get", lambda: self._inner.get_range(key, start, end), StoreUnavailable
        )

    def head(self, key: str) -> ObjectInfo | None:
        return self._world.effect(self._process, "head", lambda: self._inner.head(key), StoreUnavailable)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        return self._world.effect(self._process, "list", lambda: self._inner.list(prefix), StoreUnavailable)

    def delete(self, key: str) -> None:
        self._world.effect(self._process, "delete", lambda: self._inner.delete(key), StoreUnavailable)

    def probe(self) -> None:
        """Conditions hold by construction."""
