"""The table of API keys in the object store, and the snapshot of it that a gateway answers by.

Each change is the next revision: one object, whole, created and never replaced; of two that change at once one meets an
`ObjectConflict`, reads again and tries again. A gateway lists the revisions every `poll_s` and reads the newest when it is new:
a change reaches every gateway within `poll_s` and one request of the store. While the store is away the last table holds, for
`trust_s`: so long at most a revoked key may live on, and after it every key is refused (503) until the store answers.
"""

from __future__ import annotations

import base64
import secrets
import threading
from collections.abc import Callable
from typing import Final

import msgspec
import structlog
from pydantic import BaseModel, ConfigDict, Field

from rollwire.producers.gateway.access import Caller, Refusal
from rollwire.producers.gateway.keys import ID_CHARS, SECRET_BYTES, KeyIndex, KeyTable
from rollwire.schemas.errors import FormatUnknown, ObjectConflict, ObjectMissing, StoreError, StoreUnavailable
from rollwire.streams.seams.clock import Clock
from rollwire.streams.seams.store import ObjectStore

_logger = structlog.get_logger("rollwire.gateway")
_TRIES: Final = 20
_KEPT: Final = 16
_KEPT_US: Final = 3600 * 1_000_000


class KeysConfig(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    folder: str = Field(
        default="gateway/keys", pattern=r"^[\w.-]+(/[\w.-]+)*$", description="where in the bucket"
    )
    poll_s: float = Field(default=2.0, gt=0, le=5.0, description="how often a gateway looks for a new table")
    trust_s: float = Field(default=900.0, gt=0, description="how long the last table holds without the store")


def read_table(store: ObjectStore, folder: str) -> KeyTable:
    """The newest revision; an empty table where there is none. Raises `StoreUnavailable`, `FormatUnknown`."""
    for _ in range(_TRIES):
        newest = max((info.key for info in store.list(f"{folder}/")), default=None)
        if newest is None:
            return KeyTable()
        try:
            return _decoded(newest, store.get(newest))
        except ObjectMissing:
            continue  # so old that it was removed in between: there is a newer one
    raise StoreUnavailable(f"{folder}: revisions are removed faster than they can be read")


def change_table(
    store: ObjectStore, folder: str, change: Callable[[KeyTable], KeyTable], now_us: int
) -> KeyTable:
    """Writes the next revision. `change` is called again when another change came first; its errors go up."""
    for _ in range(_TRIES):
        before = read_table(store, folder)
        after = msgspec.structs.replace(change(before), revision=before.revision + 1)
        try:
            store.create(_object(folder, after.revision), msgspec.json.encode(after))
        except ObjectConflict:
            continue
        _remove_old(store, folder, now_us)
        return after
    raise StoreUnavailable(f"{folder}: {_TRIES} changes by others came first; try again")


def _remove_old(store: ObjectStore, folder: str, now_us: int) -> None:
    """An hour is kept: whoever read a table that was the newest must not find its successor's name free again."""
    for info in sorted(store.list(f"{folder}/"))[:-_KEPT]:
        if now_us - info.modified_us > _KEPT_US:
            store.delete(info.key)


def new_secret() -> tuple[str, str]:
    """(key id, secret), from the system's source of randomness."""
    key_id = base64.b32encode(secrets.token_bytes(8)).decode().lower()[:ID_CHARS]
    return key_id, secrets.token_urlsafe(SECRET_BYTES)


class StoredKeys:
    """`Access` by the table in `store`. Thread-safe; `close` ends its thread. `store` should answer or fail within a
    second or two: each poll waits for it."""

    def __init__(self, store: ObjectStore, config: KeysConfig, clock: Clock) -> None:
        self._store = store
        self._config = config
        self._clock = clock
        self._index: KeyIndex | None = None
        self._read_s = 0.0
        self._stop = threading.Event()
        self.refresh()
        self._thread = threading.Thread(target=self._poll, name="gateway-keys", daemon=True)
        self._thread.start()

    def identify(
        self, authorization: str | None, origin: str | None, address_key: str | None = None
    ) -> Caller | Refusal:
        index = self._index
        if index is None or self._clock.monotonic_s() - self._read_s > self._config.trust_s:
            return Refusal(
                503, "keys_unavailable", "the keys cannot be read now", retry_after_s=self._config.poll_s
            )
        return index.identify(authorization, origin, address_key, self._clock.now_us())

    def allows_origin(self, origin: str) -> bool:
        index = self._index
        return index is not None and index.allows_origin(origin)

    @property
    def ready(self) -> bool:
        """Whether keys are known and trusted."""
        return self._index is not None and (self._clock.monotonic_s() - self._read_s <= self._config.trust_s)

    def refresh(self) -> bool:
        """Looks for a newer table now; whether the store answered."""
        asked_s = self._clock.monotonic_s()
        try:
            table = self._newer()
        except (StoreError, FormatUnknown) as failure:
            _logger.warning("gateway.keys_unavailable", error=str(failure))
            return False
        if table is not None:
            self._index = KeyIndex(table)
            _logger.info("gateway.keys", revision=table.revision, keys=len(table.keys))
        self._read_s = asked_s
        return True

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def _newer(self) -> KeyTable | None:
        index = self._index
        folder = self._config.folder
        newest = max((info.key for info in self._store.list(f"{folder}/")), default="")
        if index is not None and newest == (_object(folder, index.revision) if index.revision else ""):
            return None
        return read_table(self._store, folder)

    def _poll(self) -> None:
        while not self._stop.wait(self._config.poll_s):
            self.refresh()


def _object(folder: str, revision: int) -> str:
    return f"{folder}/{revision:012d}.json"


def _decoded(key: str, data: bytes) -> KeyTable:
    try:
        return msgspec.json.decode(data, type=KeyTable)
    except msgspec.MsgspecError as failure:
        raise FormatUnknown(
            f"{key!r} is no table of API keys that this release reads: {failure}; upgrade"
        ) from failure
