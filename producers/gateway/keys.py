"""API keys: what one is, how they change, and whose a request is. Pure; `key_store` keeps the table in the object store.

A key is shown as `rw_<key id>_<secret>`, a publishable one as `rwp_<key id>_<secret>`. The secret is 256 random bits and is
stored as its SHA-256 alone: a slow password hash protects secrets that people chose and that can be guessed; nobody guesses
256 bits, and a slow hash would cost every request milliseconds and give strangers a way to burn them. Secrets are compared in
constant time; a wrong secret and an unknown id get one answer.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Callable, Sequence
from typing import Final, Literal, NamedTuple

import msgspec

from rollwire.producers.gateway.access import SCOPES, Caller, Refusal, Scope
from rollwire.producers.gateway.origins import origin_allowed, parse_origins
from rollwire.schemas.errors import ConfigError
from rollwire.schemas.validate_feedback import TENANT

SECRET_BYTES: Final = 32
ID_CHARS: Final = 12
OVERLAP_S: Final = 24 * 3600.0
"""How long a rotated secret still opens the door, unless told otherwise."""
_SHOWN: Final = re.compile(r"(rwp?)_([a-z2-7]{12})_([A-Za-z0-9_-]{43})", re.ASCII)
_TENANT_CHARS: Final = 64
_NOBODY: Final = "0" * 64
_MAX_SECRETS: Final = 2
_REMEMBERED: Final = 4_096


class Secret(msgspec.Struct, frozen=True):
    sha256: str  # hex
    made_us: int
    ends_us: int | None = None  # None = until it is rotated or the key ends


class ApiKey(msgspec.Struct, frozen=True):
    key_id: str
    tenant: str
    scopes: tuple[Scope, ...]
    rate: float  # events/s
    burst: int  # events
    secrets: tuple[Secret, ...]  # newest first
    made_us: int
    publishable: bool = False
    origins: tuple[str, ...] = ()  # of a publishable key
    not_before_us: int | None = None
    expires_us: int | None = None
    revoked_us: int | None = None
    note: str = ""  # for people


class KeyTable(msgspec.Struct, frozen=True):
    format: Literal[1] = (
        1  # a newer table may restrict keys in ways that this release would not see: it is refused
    )
    revision: int = 0
    change: str = ""  # what this revision did, for people
    keys: tuple[ApiKey, ...] = ()


class NewKey(NamedTuple):
    """What `add_key` is asked for; times are microseconds since the epoch."""

    tenant: str
    scopes: tuple[Scope, ...] = ("feedback:write",)
    rate: float = 1_000.0
    burst: int = 10_000
    origins: tuple[str, ...] = ()  # given: the key is publishable
    not_before_us: int | None = None
    expires_us: int | None = None
    note: str = ""


def add_key(table: KeyTable, key_id: str, secret: str, new: NewKey, now_us: int) -> KeyTable:
    """Raises `ConfigError` for a key that could never be used, or may not be made."""
    if not TENANT.fullmatch(new.tenant) or len(new.tenant) > _TENANT_CHARS:
        raise ConfigError(
            f"tenant {new.tenant!r}: a letter or digit, then letters, digits, '.', '_', ':' and '-', {_TENANT_CHARS} in all"
        )
    unknown = sorted(set(new.scopes) - set(SCOPES))
    if unknown or not new.scopes:
        raise ConfigError(f"scopes {', '.join(unknown) or '(none)'}: there are {', '.join(SCOPES)}")
    if not 0 < new.rate <= 1e9 or not 0 < new.burst <= 1_000_000_000:
        raise ConfigError("rate and burst must be above 0, and at most 1e9")
    if new.expires_us is not None and new.expires_us <= max(now_us, new.not_before_us or 0):
        raise ConfigError("the key would expire before its first moment")
    origins = parse_origins(new.origins)
    if origins and set(new.scopes) != {"feedback:write"}:
        raise ConfigError(
            "a publishable key stands in pages for anyone to read: its scope is feedback:write alone"
        )
    if any(key.key_id == key_id for key in table.keys):
        raise ConfigError(f"there is a key {key_id} already")
    key = ApiKey(
        key_id=key_id,
        tenant=new.tenant,
        scopes=tuple(scope for scope in SCOPES if scope in new.scopes),
        rate=new.rate,
        burst=new.burst,
        secrets=(Secret(digest_of(secret), now_us),),
        made_us=now_us,
        publishable=bool(origins),
        origins=origins,
        not_before_us=new.not_before_us,
        expires_us=new.expires_us,
        note=new.note,
    )
    return msgspec.structs.replace(table, change=f"add {key_id}", keys=(*table.keys, key))


def rotate_key(
    table: KeyTable, key_id: str, secret: str, now_us: int, overlap_s: float = OVERLAP_S
) -> KeyTable:
    """A second secret, and the end of the first after `overlap_s`: both are valid in between. A third one is refused until
    the oldest has ended, so that a rotation run twice by accident cuts nobody off."""

    def rotated(key: ApiKey) -> ApiKey:
        valid = tuple(s for s in key.secrets if s.ends_us is None or s.ends_us > now_us)
        if key.revoked_us is not None:
            raise ConfigError(f"key {key_id} is revoked: add a new one")
        if len(valid) >= _MAX_SECRETS:
            raise ConfigError(f"key {key_id} has two valid secrets already: the older one must end first")
        ends_us = now_us + round(overlap_s * 1e6)
        older = tuple(msgspec.structs.replace(s, ends_us=ends_us) for s in valid)
        return msgspec.structs.replace(key, secrets=(Secret(digest_of(secret), now_us), *older))

    return _changed(table, key_id, rotated, "rotate")


def revoke_key(table: KeyTable, key_id: str, now_us: int) -> KeyTable:
    """The key stays in the table, so that its holder is told why and its id is not given again."""

    def revoked(key: ApiKey) -> ApiKey:
        return key if key.revoked_us is not None else msgspec.structs.replace(key, revoked_us=now_us)

    return _changed(table, key_id, revoked, "revoke")


def _changed(table: KeyTable, key_id: str, change: Callable[[ApiKey], ApiKey], word: str) -> KeyTable:
    if all(key.key_id != key_id for key in table.keys):
        raise ConfigError(f"there is no key {key_id}; `rollwire gateway-keys list` shows which there are")
    keys = tuple(change(key) if key.key_id == key_id else key for key in table.keys)
    return msgspec.structs.replace(table, change=f"{word} {key_id}", keys=keys)


def digest_of(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def shown(key_id: str, secret: str, *, publishable: bool) -> str:
    return f"{'rwp' if publishable else 'rw'}_{key_id}_{secret}"


class KeyIndex:
    """A table made ready to be asked by every request. What it says never changes.

    Headers whose key and secret were found right are remembered, for the next request of the same caller: those that hold no
    right secret never are. A look-up compares a header only where its keyed hash is equal already, so its time tells nothing.
    """

    def __init__(self, table: KeyTable) -> None:
        self.revision = table.revision
        self._keys = {key.key_id: key for key in table.keys}
        self._callers = {key.key_id: _caller(key) for key in table.keys}
        self._origins = frozenset(o for key in table.keys if key.revoked_us is None for o in key.origins)
        self._known: dict[str, tuple[ApiKey, Secret]] = {}  # by Authorization

    def allows_origin(self, origin: str) -> bool:
        return origin_allowed(origin, self._origins)

    def identify(
        self, authorization: str | None, origin: str | None, address_key: str | None, now_us: int
    ) -> Caller | Refusal:
        known = self._known.get(authorization) if authorization is not None else None
        if known is not None:
            return _admitted(*known, origin, now_us) or self._callers[known[0].key_id]
        given = address_key
        if authorization is not None:
            scheme, _, rest = authorization.partition(" ")
            given = rest.strip(" ") if scheme.lower() == "bearer" else ""
        if given is None:
            return _unauthorized("key_missing", "send Authorization: Bearer rw_<key id>_<secret>")
        parts = _SHOWN.fullmatch(given)
        if parts is None:
            return _unauthorized("key_malformed", "a key has the form Bearer rw_<key id>_<secret>")
        kind, key_id, secret = parts.groups()
        key = self._keys.get(key_id)
        matched = _matching(() if key is None else key.secrets, digest_of(secret))
        if key is None or matched is None or key.publishable != (kind == "rwp"):
            return _unauthorized("key_unknown", "no such key, or another secret")
        if authorization is None and not key.publishable:
            return _unauthorized(
                "key_in_address",
                "a secret key in an address stays in logs: send it in Authorization, and rotate it",
            )
        if authorization is not None and len(self._known) < _REMEMBERED:
            self._known[authorization] = key, matched
        return _admitted(key, matched, origin, now_us) or self._callers[key_id]


def _admitted(key: ApiKey, secret: Secret, origin: str | None, now_us: int) -> Refusal | None:
    return _in_time(key, secret, now_us) or _from_there(key, origin)


_NOBODIES: Final = (Secret(_NOBODY, 0),) * _MAX_SECRETS


def _matching(secrets: Sequence[Secret], digest: str) -> Secret | None:
    """Compares with as many digests for an unknown id as for a known one."""
    found = None
    for secret in (*secrets, *_NOBODIES[len(secrets) :]):
        if hmac.compare_digest(secret.sha256, digest) and secret.sha256 != _NOBODY:
            found = secret
    return found


def _in_time(key: ApiKey, secret: Secret, now_us: int) -> Refusal | None:
    if key.revoked_us is not None:
        return _unauthorized("key_revoked", f"the key {key.key_id} was revoked")
    if key.not_before_us is not None and now_us < key.not_before_us:
        return _unauthorized("key_not_yet", f"the key {key.key_id} is not valid yet")
    if key.expires_us is not None and now_us >= key.expires_us:
        return _unauthorized("key_expired", f"the key {key.key_id} has expired")
    if secret.ends_us is not None and now_us >= secret.ends_us:
        return _unauthorized("key_expired", f"this secret of the key {key.key_id} was rotated away")
    return None


def _from_there(key: ApiKey, origin: str | None) -> Refusal | None:
    if not key.publishable:
        if origin is None:
            return None
        return Refusal(
            403, "origin_refused", "a secret key came from a browser: use a publishable one, and rotate this"
        )
    if origin is None:
        return Refusal(403, "origin_refused", "a publishable key is for pages: the request names no Origin")
    if origin_allowed(origin, key.origins):
        return None
    return Refusal(403, "origin_refused", f"the key {key.key_id} does not list the origin {origin[:100]}")


def _unauthorized(code: str, detail: str) -> Refusal:
    return Refusal(401, code, detail)


def _caller(key: ApiKey) -> Caller:
    return Caller(key.key_id, key.tenant, frozenset(key.scopes), key.rate, key.burst, key.publishable)
