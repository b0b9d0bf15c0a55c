"""Data keys that were asked for lately, kept in this process so that a seal costs no call to the store.

The price is stated: after an erasure a copy of the key lives here until `forget` is called (who follows the `erasures`
topic does) or `ttl_s` has passed, whichever comes first. What is sealed meanwhile with the destroyed key opens nowhere.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

from rollwire.schemas.errors import Erased
from rollwire.streams.seams.clock import Clock, SystemClock
from rollwire.streams.seams.keys import DataKey, KeyState, KeyStore
from rollwire.streams.seams.keys_memory import erased

_NEWEST = 0  # generations begin at 1: this entry holds what `data_key` gave


class CachedKeys:
    """A key store in front of another. Thread-safe; no lock is held while the other is asked."""

    def __init__(
        self, inner: KeyStore, clock: Clock | None = None, *, ttl_s: float = 60.0, entries: int = 20_000
    ) -> None:
        self._inner = inner
        self._clock: Clock = clock if clock is not None else SystemClock()
        self._ttl_s = ttl_s
        self._entries = entries
        self._lock = threading.Lock()
        # Least recently used first. The time is when the entry ends; None as the key = erased, which never changes.
        self._kept: OrderedDict[tuple[str, int], tuple[DataKey | None, float]] = OrderedDict()
        self._forgotten = (
            0  # calls of `forget`: what was asked before one and is answered after it is not kept
        )

    def data_key(self, subject: str) -> DataKey:
        known, found, before = self._look(subject, _NEWEST)
        if known and found is not None:
            return found
        made = self._inner.data_key(subject)
        self._keep(before, subject, _NEWEST, made)
        self._keep(before, subject, made.generation, made)
        return made

    def key_of(self, subject: str, generation: int) -> bytes:
        known, found, before = self._look(subject, generation)
        if known:
            if found is None:
                raise Erased(erased(subject, generation))
            return found.key
        try:
            key = self._inner.key_of(subject, generation)
        except Erased:
            self._keep(before, subject, generation, None)
            raise
        self._keep(before, subject, generation, DataKey(generation, key))
        return key

    def destroy(self, subject: str) -> int:
        try:
            return self._inner.destroy(subject)
        finally:
            self.forget(subject)

    def state(self, subject: str) -> KeyState:
        return self._inner.state(subject)

    def forget(self, subject: str) -> None:
        """Drops every key of this person. A call that is under way keeps nothing."""
        with self._lock:
            self._forgotten += 1
            for name in [name for name in self._kept if name[0] == subject]:
                del self._kept[name]

    def _look(self, subject: str, generation: int) -> tuple[bool, DataKey | None, int]:
        """Whether it is known, what it is, and how often `forget` was called until now."""
        name = (subject, generation)
        with self._lock:
            found = self._kept.get(name)
            if found is None:
                return False, None, self._forgotten
            kept, ends_s = found
            if kept is not None and ends_s <= self._clock.monotonic_s():
                del self._kept[name]
                return False, None, self._forgotten
            self._kept.move_to_end(name)
            return True, kept, self._forgotten

    def _keep(self, forgotten: int, subject: str, generation: int, key: DataKey | None) -> None:
        with self._lock:
            if key is not None and forgotten != self._forgotten:
                return
            self._kept[subject, generation] = (key, self._clock.monotonic_s() + self._ttl_s)
            self._kept.move_to_end((subject, generation))
            while len(self._kept) > self._entries:
                self._kept.popitem(last=False)
