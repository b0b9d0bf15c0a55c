"""From a wanted version to a verified state: plans, fetches, and learns from what failed. Of one thread.

A step that proves unusable is left out of the next plan, which then leads over another way if there is one; where none is
left, everything gets another chance, later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from rollwire.consumers.weights.fetched import FetchedStore
from rollwire.consumers.weights.follow import Follow
from rollwire.consumers.weights.paths import PathStep, StepKey, plan_path
from rollwire.consumers.weights.reader import Loaded, load_path
from rollwire.schemas.errors import ObjectConflict, ObjectMissing, StoreError, WeightError
from rollwire.schemas.records import LinkObject, WeightVersion
from rollwire.streams.seams.clock import Clock
from rollwire.streams.seams.store import ObjectStore

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


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


class Got(NamedTuple, Generic[T]):
    value: T
    stage_ms: float
    fetched_bytes: int


class Failed(NamedTuple):
    reason: str
    refused: bool  # the bytes are wrong, not just away: worth a report


class Go(Protocol[T_co]):
    """Goes a path from what is held; as `load_path`, whose errors it raises."""

    def __call__(
        self,
        store: ObjectStore,
        path: Sequence[PathStep],
        base: Loaded | None,
        /,
        *,
        entering: Callable[[PathStep], None] | None = None,
    ) -> T_co: ...


class Staging:
    def __init__(
        self,
        store: ObjectStore,
        clock: Clock,
        config: SubscriberConfig,
        *,
        whole: bool = True,
        share: float = 1.0,
    ) -> None:
        """`whole=False`: parts of the tensors are held, `share` of them, in (0, 1]."""
        self._store = FetchedStore(store)
        self._whole = whole
        self._share = share
        self._clock = clock
        self._config = config
        self._avoid: set[StepKey] = set()
        self._failures = 0
        self._retry_at = 0.0

    def close(self) -> None:
        self._store.close()

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

    def load(self, follow: Follow, wanted: WeightVersion, held: Held | None) -> Got[Loaded] | Failed:
        """`held` is not written to."""
        return self.attempt(follow, wanted, held, load_path)

    def attempt(self, follow: Follow, wanted: WeightVersion, held: Held | None, go: Go[T]) -> Got[T] | Failed:
        """Plans the cheapest way from `held` to `wanted` and has `go` go it."""
        started, before = self._clock.monotonic_s(), self._store.read_bytes
        base = held if held is not None and held.event.lineage == wanted.lineage else None
        entered: list[PathStep] = []
        try:
            path = self._plan(follow, wanted, None if base is None else base.event.version)
            if self._whole:  # a slice reads ranges of objects
                self._store.expect(objects_of(path))
            made = go(self._store, path, None if base is None else base.loaded, entering=entered.append)
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
        finally:
            self._store.expect(())
        return Got(made, (self._clock.monotonic_s() - started) * 1e3, self._store.read_bytes - before)

    def _plan(self, follow: Follow, wanted: WeightVersion, have: int | None) -> list[PathStep]:
        for events, links in (
            follow.near(wanted.lineage, have, wanted.version),
            (follow.events(wanted.lineage), follow.links(wanted.lineage)),
        ):
            try:
                return plan_path(
                    events, links, have, wanted.version, avoid=self._avoid, slice_share=self._share
                )
            except WeightError as error:
                problem = error
        raise problem


def objects_of(path: Sequence[PathStep]) -> list[LinkObject]:
    """What a path will read, as far as events and links say it: of anchors the manifest does."""
    return [entry for step in path if step.kind not in ("anchor", "same") for entry in step.source.objects]
