"""The cache seam: Redis. Holds only what may be lost (law 1); every call may fail and the caller goes on."""

from __future__ import annotations

from typing import Protocol


class Cache(Protocol):
    def set(self, key: str, value: bytes, ttl_s: float | None = None) -> None: ...

    def get(self, key: str) -> bytes | None: ...

    def set_many(self, values: dict[str, bytes]) -> None: ...

    def get_prefix(self, prefix: str) -> dict[str, bytes]: ...

    def purge(self, text: str) -> int | None:
        """Deletes every entry whose key or value holds `text`; how many, None where the cache did not answer. Reads all of
        it: for what is rare, like an erasure."""
        ...

    def close(self) -> None: ...
