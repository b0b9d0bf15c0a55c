"""The object store seam: what Rollwire needs of S3.

`store_memory.MemoryStore` and `store_s3.S3Store` pass one behavioural suite (`tests/streams/seams/store_suite.py`).
Objects are content-addressed and never changed; all writes are create-only.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol, runtime_checkable


class ObjectInfo(NamedTuple):
    key: str
    size: int  # bytes
    modified_us: int


class ObjectStore(Protocol):
    """One bucket. Thread-safe."""

    def create(self, key: str, data: bytes) -> bool:
        """Put with `If-None-Match: *` and a SHA-256 that the store checks. True = written, False = the key was there
        with the same content (412 settled by digest; an object older than 12 h is put again: law 3).

        Raises `ObjectConflict` where the key holds other content, `StoreUnavailable` when retries are used up.
        """
        ...

    def get(self, key: str, *, sha256: str | None = None) -> bytes:
        """The whole object; `sha256` (hex) is verified. Raises `ObjectMissing`, `DeltaCorrupt` on a wrong digest."""
        ...

    def get_range(self, key: str, start: int, end: int) -> bytes:
        """Bytes [start, end)."""
        ...

    def head(self, key: str) -> ObjectInfo | None: ...

    def list(self, prefix: str) -> Iterator[ObjectInfo]: ...

    def delete(self, key: str) -> None: ...

    def probe(self) -> None:
        """Proves that conditions work; raises `StoreUnfit` with what to do where they do not."""
        ...


class PurgingStore(ObjectStore, Protocol):
    """A store that can prove that bytes are gone: what holds keys."""

    def purge(self, key: str) -> None:
        """Deletes the object with every version that the bucket keeps of it, and looks that none is left.

        Raises `StoreUnavailable` where that cannot be done or seen (no right to list versions, an object lock).
        """
        ...


@runtime_checkable
class HoldingStore(ObjectStore, Protocol):
    """A store that may keep objects from being deleted or replaced by anybody: S3's object lock."""

    def hold(self, key: str, until_us: int) -> bool:
        """Locks the object until then; nobody can take that back. False: the bucket has no object lock, nothing is done."""
        ...
