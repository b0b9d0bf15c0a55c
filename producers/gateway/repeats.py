"""What was acknowledged lately, by any gateway: a hint that answers most repeats at once. The stream removes the others.

An id is remembered after the broker's acknowledgement only, never claimed before: whatever dies in between leaves nothing
behind, and the retry is a first attempt like any other (C84). Redis away means that nothing is known of it, not that it was
there. After `ttl_s`, or once a later id has displaced it, a repeat is accepted again and attribution drops it by its own marks.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Final

from pydantic import BaseModel, ConfigDict, Field

from rollwire.producers.gateway.access import FeedbackKey, LocalRepeats
from rollwire.streams.seams.hints import NOTHING, WIDTH, Hints

_UNTOLD: Final = 100_000  # ids that wait to be told
_CLOSE_S: Final = 2.0
_GATHER_S: Final = 0.02  # between two tellings: one for each write would cost more than the writes' own work


class RepeatsConfig(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    size: int = Field(default=100_000, ge=0, description="ids that a gateway remembers itself")
    ttl_s: float = Field(default=3_600.0, gt=0, description="how long Redis remembers an id for all gateways")


class CachedRepeats:
    """`Repeats`: this process's latest ids, then `hints`. For one thread. Digests are `WIDTH` bytes, and not all zero.

    A thread of its own tells `hints` what to remember, so that the next write to the log need not wait for that; `close` ends it.
    """

    def __init__(self, hints: Hints, config: RepeatsConfig) -> None:
        self._hints = hints
        self._config = config
        self._local = LocalRepeats(config.size)
        # Of the ids that were asked for last: most are remembered next.
        self._named: dict[FeedbackKey, bytes] = {}
        self._lock = threading.Condition()
        self._names = bytearray()  # to be told, with
        self._digests = bytearray()
        self._closed = False
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._tell, name="gateway-repeats", daemon=True)
        self._thread.start()

    def known(self, ids: Sequence[FeedbackKey]) -> Mapping[FeedbackKey, bytes]:
        found = dict(self._local.known(ids))
        others = [key for key in ids if key not in found]
        named = list(map(_name, others))
        self._named = dict(zip(others, named, strict=True))
        if others and (answer := self._hints.digests(b"".join(named))) is not None:
            for index, key in enumerate(others):
                digest = answer[index * WIDTH : (index + 1) * WIDTH]
                if digest != NOTHING:
                    found[key] = digest
        return found

    def remember(self, digests: Mapping[FeedbackKey, bytes]) -> None:
        if any(len(digest) != WIDTH for digest in digests.values()):
            raise ValueError(f"a digest is {WIDTH} bytes")
        self._local.remember(digests)
        named = self._named
        names = b"".join([named.get(key) or _name(key) for key in digests])
        with self._lock:
            if names and len(self._names) < _UNTOLD * WIDTH:  # a hint may be lost, memory may not
                self._names += names
                self._digests += b"".join(digests.values())
                self._lock.notify()

    def close(self) -> None:
        self._ending.set()
        with self._lock:
            self._closed = True
            self._lock.notify()
        self._thread.join(_CLOSE_S)

    def _tell(self) -> None:
        while True:
            with self._lock:
                while not self._names and not self._closed:
                    self._lock.wait()
                if not self._names:
                    return
                names, digests = bytes(self._names), bytes(self._digests)
                self._names.clear()
                self._digests.clear()
            self._hints.put_digests(names, digests, self._config.ttl_s)
            self._ending.wait(_GATHER_S)


def _name(key: FeedbackKey) -> bytes:
    # Neither part may hold a "/" (a tenant and an id are of [A-Za-z0-9._:-]), so that two pairs never read the same.
    return blake2b(f"{key[0]}/{key[1]}".encode(), digest_size=WIDTH).digest()
