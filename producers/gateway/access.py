"""Who calls the gateway, how much they may send, and what they sent before: the three doors every request passes.

`Access` is asked on the event loop for every request, `Quotas` as well; `Repeats` on the commit thread, once a batch.
None of them waits for the network: keys are a snapshot that another thread polls, quotas are spent from blocks that another
thread leases, repeats are looked up with a deadline of milliseconds and are a hint, never the truth (law 1).

The in-process versions below need neither store nor Redis: for one gateway by itself, and for tests. `keys.StoredKeys`,
`quotas.LeasedQuotas` and `repeats.CachedRepeats` are shared by all gateways of a deployment.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Final, Literal, NamedTuple, Protocol

from rollwire.producers.gateway.origins import origin_allowed

Scope = Literal["feedback:write", "feedback:read", "metrics"]
SCOPES: Final[tuple[Scope, ...]] = ("feedback:write", "feedback:read", "metrics")

AccessCode = Literal[
    "key_missing",  # 401: neither an Authorization header nor a publishable key in the address
    "key_malformed",  # 401: not `Bearer rw_<key id>_<secret>`
    "key_unknown",  # 401: no such key, or another secret: one answer for both
    "key_revoked",  # 401
    "key_expired",  # 401: after its expiry, or a secret that was rotated away
    "key_not_yet",  # 401: before its first moment
    "key_in_address",  # 401: a secret key in the address, where logs keep it; only publishable ones may stand there
    "scope_missing",  # 403
    "origin_refused",  # 403: a page of an origin that the key does not list, or a secret key in a browser
    "keys_unavailable",  # 503: the keys could not be read for longer than the last known ones are trusted
]

FeedbackKey = tuple[str, str]  # (tenant, feedback id): what a repeat is a repeat of


class Caller(NamedTuple):
    """Who a request is from, once its key is accepted."""

    key_id: str
    tenant: str
    scopes: frozenset[Scope]
    rate: float = 1_000.0  # events/s
    burst: int = 10_000  # events at once after a pause
    publishable: bool = False  # stands in a page for anyone to read: writes only, from its origins only


class Refusal(NamedTuple):
    """Why a request, or one event of it, is not taken. `field` is a path into the body ("items[3].value"; "" = none)."""

    status: int
    code: str
    detail: str
    field: str = ""
    retry_after_s: float | None = None


class Access(Protocol):
    def identify(
        self, authorization: str | None, origin: str | None, address_key: str | None = None
    ) -> Caller | Refusal:
        """Whose key this is. `authorization` and `origin` are the headers as they came; `address_key` is a key given in
        the address, as `navigator.sendBeacon` must (it sets no header): publishable keys only."""
        ...

    def allows_origin(self, origin: str) -> bool:
        """Whether a page of this origin may ask at all: what a preflight is answered with, which carries no key."""
        ...


class Quotas(Protocol):
    def take(self, caller: Caller, n: int, now_s: float) -> float | None:
        """Spends `n` events of the caller's quota; None = go on, else seconds until it is worth trying again.
        `now_s` is monotonic. Never waits."""
        ...


class Repeats(Protocol):
    def known(self, ids: Sequence[FeedbackKey]) -> Mapping[FeedbackKey, bytes]:
        """Digests of the content under those of the ids that were acknowledged before, as far as is remembered. What is
        missing here may be a repeat all the same: the stream decides (law 4)."""
        ...

    def remember(self, digests: Mapping[FeedbackKey, bytes]) -> None:
        """To be called after the broker's acknowledgement only: what is remembered earlier turns a retry of a failed
        attempt into a repeat, and the event is lost."""
        ...


def lacks(caller: Caller, scope: Scope) -> Refusal | None:
    if scope in caller.scopes:
        return None
    return Refusal(403, "scope_missing", f"the key {caller.key_id} has no scope {scope}")


class OpenAccess:
    """Everyone is one caller; pages of the origins that are given as well. For a gateway that only this machine reaches."""

    def __init__(
        self,
        tenant: str = "default",
        *,
        rate: float = 1e9,
        burst: int = 1_000_000_000,
        origins: tuple[str, ...] = (),
    ) -> None:
        self._origins = origins
        self._caller = Caller("", tenant, frozenset(SCOPES), rate, burst)

    def identify(
        self, authorization: str | None, origin: str | None, address_key: str | None = None
    ) -> Caller | Refusal:
        if origin is not None and not self.allows_origin(origin):
            return Refusal(403, "origin_refused", f"pages of {origin} may not call this gateway")
        return self._caller

    def allows_origin(self, origin: str) -> bool:
        return origin_allowed(origin, self._origins)


class LocalQuotas:
    """A token bucket a key, in this process alone. For one thread.

    A request larger than the burst passes when the bucket is full and leaves it in debt, so that no batch is refused for ever.
    """

    def __init__(self) -> None:
        self._buckets: dict[str, tuple[float, float]] = {}  # key id -> tokens, and when they were counted

    def take(self, caller: Caller, n: int, now_s: float) -> float | None:
        tokens, counted_s = self._buckets.get(caller.key_id, (float(caller.burst), now_s))
        tokens = min(float(caller.burst), tokens + max(0.0, now_s - counted_s) * caller.rate)
        missing = min(n, caller.burst) - tokens
        if missing <= 0:
            tokens -= n
        self._buckets[caller.key_id] = (tokens, now_s)
        return None if missing <= 0 else missing / caller.rate


class LocalRepeats:
    """The last `size` acknowledged ids, in this process alone. For one thread."""

    def __init__(self, size: int = 100_000) -> None:
        self._size = size
        # By order of insertion. A plain dict would look through all that was ever removed to find its first.
        self._digests: OrderedDict[FeedbackKey, bytes] = OrderedDict()

    def known(self, ids: Sequence[FeedbackKey]) -> Mapping[FeedbackKey, bytes]:
        digests = self._digests
        return {key: digests[key] for key in ids if key in digests}

    def remember(self, digests: Mapping[FeedbackKey, bytes]) -> None:
        for key, digest in digests.items():
            self._digests.pop(key, None)
            self._digests[key] = digest
        while len(self._digests) > self._size:
            self._digests.popitem(last=False)
