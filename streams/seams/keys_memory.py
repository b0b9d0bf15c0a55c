"""The in-memory twin of the key store."""

from __future__ import annotations

import secrets
import threading

from rollwire.kernels.seal import KEY_BYTES
from rollwire.schemas.errors import Erased, KeyMissing
from rollwire.streams.seams.keys import DataKey, KeyState


class MemoryKeys:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._keys: dict[str, dict[int, bytes | None]] = {}  # by generation; None = destroyed

    def data_key(self, subject: str) -> DataKey:
        with self._lock:
            known = self._keys.setdefault(subject, {})
            last = max(known, default=0)
            key = known.get(last)
            if key is None:
                last, key = last + 1, secrets.token_bytes(KEY_BYTES)
                known[last] = key
            return DataKey(last, key)

    def key_of(self, subject: str, generation: int) -> bytes:
        with self._lock:
            known = self._keys.get(subject, {})
            if generation not in known:
                raise KeyMissing(missing(subject, generation))
            key = known[generation]
        if key is None:
            raise Erased(erased(subject, generation))
        return key

    def destroy(self, subject: str) -> int:
        with self._lock:
            known = self._keys.get(subject, {})
            for generation in known:
                known[generation] = None
            return max(known, default=0)

    def state(self, subject: str) -> KeyState:
        with self._lock:
            known = dict(self._keys.get(subject, {}))
        return KeyState(
            tuple(sorted(g for g, key in known.items() if key is not None)),
            tuple(sorted(g for g, key in known.items() if key is None)),
        )


def erased(subject: str, generation: int) -> str:
    return f"erased: the data key {generation} of {subject} was destroyed on request; what was sealed with it is gone"


def missing(subject: str, generation: int) -> str:
    return (
        f"there is no data key {generation} of {subject}, and no mark that it was destroyed: is this the key store "
        "(stack folder, bucket) that it was sealed with?"
    )
