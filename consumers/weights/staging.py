"""From a wanted version to a verified state: plans, fetches, and learns from what failed. Of one thread.

A step that proves unusable is left out of the next plan, which then leads over another way if there is one; where none is
left, everything gets another chance, later.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from rollwire.consumers.weights.follow import Follow
from rollwire.consumers.weights.paths import PathStep, StepKey, plan_path
from rollwire.consumers.weights.reader import Loaded, load_path
from rollwire.schemas.errors import ObjectConflict, ObjectMissing, StoreError, WeightError
from rollwire.schemas.records import WeightVersion
from rollwire.streams.seams.clock import Clock
from rollwire.streams.seams.store import ObjectInfo, ObjectStore


class SubscriberConfig(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    poll_s: float = Field(default=0.1, gt=0, description="How long one look at the log waits for news.")
    backoff_s: float = Field(
        default=0.2, gt=0, description="Pause after a first failure; doubles from there."
    )
    backoff_max_s: float = Field(default=10.0, gt=0, description="The longest pause between tries.")
    close_s: float = Field(default=10.0, gt=0, description="How long `close` waits for the last reports.")


def backoff(failures: int, config: SubscriberConfig) -> float:
    """Seconds to wait after the `failures`-th failure in a row (1, 2, ...)."""
    return float(min(config.backoff_s * 2.0 ** min(failures - 1, 30), config.backoff_max_s))


class Held(NamedTuple):
    """What is there to build on."""

    event: WeightVersion
    loaded: Loaded


class Got(NamedTuple):
    loaded: Loaded
    stage_ms: float
    fetched_bytes: int


class Failed(NamedTuple):
    reason: str
    refused: bool  # the bytes are wrong, not just away: worth a report


class Staging:
    def __init__(self, store: ObjectStore, clock: Clock, config: SubscriberConfig) -> None:
        self._store = CountedStore(store)
        self._clock = clock
        self._config = config
        self._avoid: set[StepKey] = set()
        self._failures = 0
        self._retry_at = 0.0

    @property
    def due(self) -> bool:
        """Whether the pause after a failure is over."""
        return self._clock.monotonic_s() >= self._retry_at

    def news(self) -> None:
        """An event came: it may be the way out."""
        self._retry_at = 0.0

    def later(self) -> int:
        """Something failed that only time can heal; the number of failures in a row."""
        self._failures += 1
        self._retry_at = self._clock.monotonic_s() + backoff(self._failures, self._config)
        return self._failures

    def done(self) -> None:
        """The version is where it belongs: what failed on the way is forgotten."""
        self._avoid.clear()
        self._failures = 0

    def load(self, follow: Follow, wanted: WeightVersion, held: Held | None) -> Got | Failed:
        """`held` is not written to."""
        started, before = self._clock.monotonic_s(), self._store.read_bytes
        base = held if held is not None and held.event.lineage == wanted.lineage else None
        entered: list[PathStep] = []
        try:
            path = plan_path(
                follow.events(wanted.lineage),
                follow.links(wanted.lineage),
                None if base is None else base.event.version,
                wanted.version,
                avoid=self._avoid,
            )
            loaded = load_path(
                self._store, path, None if base is None else base.loaded, entering=entered.append
            )
        except (WeightError, ObjectMissing, ObjectConflict) as error:
            if entered:
                self._avoid.add(entered[-1].key)
            else:
                self._avoid.clear()
                self.later()
            return Failed(f"{type(error).__name__}: {error}", refused=True)
        except StoreError as error:
            self.later()
            return Failed(f"version {wanted.version}: {error}", refused=False)
        return Got(loaded, (self._clock.monotonic_s() - started) * 1e3, self._store.read_bytes - before)


class CountedStore:
    """An `ObjectStore` that counts what is read through it."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self.read_bytes = 0

    def create(self, key: str, data: bytes) -> bool:
        return self._store.create(key, data)

    def get(self, key: str, *, sha256: str | None = None) -> bytes:
        data = self._store.get(key, sha256=sha256)
        self.read_bytes += len(data)
        return data

    def get_range(self, key: str, start: int, end: int) -> bytes:
        data = self._store.get_range(key, start, end)
        self.read_bytes += len(data)
        return data

    def head(self, key: str) -> ObjectInfo | None:
        return self._store.head(key)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        return self._store.list(prefix)

    def delete(self, key: str) -> None:
        self._store.delete(key)

    def probe(self) -> None:
        self._store.probe()
