"""A lineage rebuilt from its snapshots and deltas, against fetching the same bytes and doing nothing with them.

The lineage is published as a trainer publishes: one snapshot, then a delta a version, of weights that move as real ones do
(`sync_weights`). Every version is rebuilt in one pass and checked, as `rollwire audit rebuild --all` does. The raw side asks the store
for the same objects, whole, those that the rebuild was seen to ask for, with the same client and as many at once; only
their sizes are looked at. A second raw side makes the very requests of the rebuild, which asks for a snapshot in parts.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Final, NamedTuple

from rollwire.consumers.audit.rebuild_deltas import DeltaRebuild
from rollwire.consumers.audit.rebuild_past import TOPICS, Past, read_past
from rollwire.consumers.version_publisher import VersionPublisher
from rollwire.consumers.weights.fetched import THREADS
from rollwire.consumers.weights.publisher import PublisherConfig
from rollwire.ops.bench.sync_weights import MovingWeights
from rollwire.schemas.errors import LogError
from rollwire.streams.seams.log import Log
from rollwire.streams.seams.scan import scan
from rollwire.streams.seams.store import ObjectInfo, ObjectStore

_MODEL: Final = "bench-replay"
_NO_ANCHORS: Final = 1_000_000


class Asked(NamedTuple):
    """An object, or bytes [start, end) of it."""

    key: str
    part: tuple[int, int] | None


class Sides(NamedTuple):
    """Seconds, and the bytes that both fetched."""

    rebuilt_s: float
    raw_s: float
    parts_s: float  # by the rebuild's own requests
    nbytes: int


def published(
    log: Log, store: ObjectStore, *, mb: int, versions: int, rate: float, told: Callable[[int], None]
) -> Past:
    """A new lineage of versions 0 to `versions`, as its topics tell it."""
    lineage = str(uuid.uuid4())
    weights = MovingWeights(mb * 1_000_000, rate=rate)
    publisher = VersionPublisher(
        log,
        store,
        model=_MODEL,
        lineage=lineage,
        ranks=0,
        name=f"bench-replay-{lineage}",
        config=PublisherConfig(anchor_every=_NO_ANCHORS, links=False),
    )
    with closing(publisher):
        publisher.start({name: t._replace(bits=t.bits.copy()) for name, t in weights.state.items()})
        for version in range(1, versions + 1):
            weights.step()
            publisher.publish_alone(weights.state, version, copy=True)
            told(version)
    for _ in scan(log, TOPICS, hidden=True):
        pass  # until the last transaction is to be read: a moment after its writer is told that it is committed
    past = read_past(log, lineage).past
    if past is None or past.newest != versions:
        raise LogError(f"of {versions} versions that were published the log has not all")
    return past


def measured(store: ObjectStore, past: Past) -> Sides:
    """One round: raw, then rebuilt. Raises `LogError` where a version does not come out as published."""
    seen = _Watched(store)
    rebuild(seen, past)  # which objects; what is compiled at first use
    raw_s = raw(store, whole(seen.asked))
    parts_s = raw(store, seen.asked)
    rebuilt_s = rebuild(store, past)
    return Sides(rebuilt_s, raw_s, parts_s, sum(seen.asked.values()))


def rebuild(store: ObjectStore, past: Past) -> float:
    began = time.perf_counter()
    with closing(DeltaRebuild(store, past)) as made:
        for one in made.versions(tuple(past.versions)):
            if not one.equal:
                raise LogError(f"version {one.event.version} did not come out as published: {one.findings}")
    return time.perf_counter() - began


def whole(asked: Mapping[Asked, int]) -> dict[Asked, int]:
    """The same objects, each by one request."""
    found: dict[Asked, int] = {}
    for one, size in asked.items():
        entry = Asked(one.key, None)
        found[entry] = found.get(entry, 0) + size
    return found


def raw(store: ObjectStore, asked: Mapping[Asked, int]) -> float:
    def size(one: Asked) -> int:
        return len(store.get(one.key) if one.part is None else store.get_range(one.key, *one.part))

    began = time.perf_counter()
    with ThreadPoolExecutor(THREADS) as pool:
        sizes = list(pool.map(size, asked))
    took = time.perf_counter() - began
    if sizes != list(asked.values()):
        raise LogError("the store gave other bytes than before")
    return took


class _Watched:
    """An `ObjectStore` that notes what is asked of it, in order, with its size."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self.asked: dict[Asked, int] = {}

    def get(self, key: str, *, sha256: str | None = None) -> bytes:
        data = self._store.get(key, sha256=sha256)
        with self._lock:
            self.asked[Asked(key, None)] = len(data)
        return data

    def get_range(self, key: str, start: int, end: int) -> bytes:
        data = self._store.get_range(key, start, end)
        with self._lock:
            self.asked[Asked(key, (start, end))] = len(data)
        return data

    def create(self, key: str, data: bytes) -> bool:
        raise LogError(f"a rebuild writes nothing, it would have made {key}")

    def head(self, key: str) -> ObjectInfo | None:
        return self._store.head(key)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        return self._store.list(prefix)

    def delete(self, key: str) -> None:
        raise LogError(f"a rebuild deletes nothing, it would have deleted {key}")

    def probe(self) -> None:
        self._store.probe()
