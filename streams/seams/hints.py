"""The hints seam: what the feedback gateways of a deployment share and may lose at any moment (law 1).

Two things: digests of what was acknowledged lately, and leases on quotas. Unlike `Cache`, a call here tells "not there" from
"nobody answered": no one may take silence for a repeat, or for an empty quota (C84). Calls are short, and while the other side
is away they cost nothing: after a failure none is tried for a while.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

WIDTH: Final = 16
"""Bytes of a name and of a digest: many of them travel as one string."""
NOTHING: Final = bytes(WIDTH)
"""In an answer, the digest of a name that is not known."""


class Lease(NamedTuple):
    """A token bucket that fills at `rate` up to `burst`, shared by whoever names it."""

    name: str
    rate: float  # tokens/s
    burst: int  # tokens
    spent: float  # tokens already used without a lease: taken at any rate, into debt if it must be
    want: int  # tokens to hand out now, as far as there are whole ones


class Leased(NamedTuple):
    granted: int
    wait_s: float  # until a whole token is there; 0 = now


class Hints(Protocol):
    """Thread-safe. None: nobody answered in time."""

    def digests(self, names: bytes) -> bytes | None:
        """`names`: n of `WIDTH` bytes, laid end to end; the answer: n digests, `NOTHING` where a name is not known."""
        ...

    def put_digests(self, names: bytes, digests: bytes, ttl_s: float) -> None:
        """Remembers them for `ttl_s`; a name that was there is replaced, its time begins anew."""
        ...

    def lease(self, leases: Sequence[Lease]) -> list[Leased] | None: ...

    def close(self) -> None: ...
