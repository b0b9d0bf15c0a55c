"""`rollwire bench catchup`: what a replica fetches that is 100 versions behind, against one delta made just for it.

The weights are synthetic and drift as in training: gaussian, fp32 masters under Adam with independent gaussian gradients,
cast to bf16 each step. They are published as the trainer does (a delta each, a snapshot in so many, skip links composed of what
they lead over) into a store in memory that counts. The replica plans and loads as every follower does.

Figures:

    catchup.objects           objects fetched from version 0 to version 100; the worst of the learning rates
    catchup.bytes_ratio       their bytes over a freshly encoded direct delta's; the worst of the learning rates
    catchup.worst_objects     the same for the worst start in 0..63, each 100 behind
    catchup.worst_bytes_ratio
    catchup.lr<rate>.<...>    these of one learning rate, and
    catchup.lr<rate>.chain_ratio  bytes of the hundred single deltas over the direct one's
    catchup.lr<rate>.load_ms      version 0 to 100: fetch from memory, decode, verify; the fastest of three
    catchup.lr<rate>.delta_pct    a single delta against the weights, mean
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollwire.consumers.weights.link_chain import compose_link
from rollwire.consumers.weights.links import skips_due
from rollwire.consumers.weights.paths import PathStep, plan_path
from rollwire.consumers.weights.publisher import PublisherConfig
from rollwire.consumers.weights.reader import Loaded, load_path, shards_of
from rollwire.consumers.weights.snapshot import Held, SnapshotWriter
from rollwire.kernels.delta.encode import encode_delta
from rollwire.kernels.digest import StateDigest
from rollwire.kernels.tensors import State, tensor
from rollwire.ops.bench.delta import to_bf16
from rollwire.ops.figures import Figure
from rollwire.schemas.errors import DigestMismatch
from rollwire.schemas.records import WeightLink, WeightVersion
from rollwire.streams.seams.store_memory import MemoryStore

BEHIND: Final = 100
STARTS: Final = 64  # after which the places of the skip links repeat
RATES: Final = (1e-6, 1e-5)
WARM: Final = 10  # Adam steps before version 0
_WIDTH: Final = 1024


class Counted(MemoryStore):
    def __init__(self) -> None:
        super().__init__()
        self.objects = 0
        self.bytes = 0

    def get(self, key: str, *, sha256: str | None = None) -> bytes:
        data = super().get(key, sha256=sha256)
        self.objects += 1
        self.bytes += len(data)
        return data


class Published(NamedTuple):
    store: Counted
    held: list[Held]
    links: list[WeightLink]

    @property
    def events(self) -> list[WeightVersion]:
        return [held.event for held in self.held]


class Caught(NamedTuple):
    objects: int
    bytes: int
    direct: int  # bytes of a delta that was made for this

    @property
    def ratio(self) -> float:
        return self.bytes / self.direct


def bench_catchup(
    *, mib: int = 4, seed: int = 0, starts: int = STARTS, rates: Sequence[float] = RATES
) -> list[Figure]:
    """All figures; `mib`: size of the weights. Raises `DigestMismatch` where a replica gets other bits."""
    figures: list[Figure] = []
    near: list[Caught] = []
    far: list[Caught] = []
    for rate in rates:
        plane = publish(mib, rate, seed, BEHIND + starts)
        first, load_ms = fetched(plane)
        planned = [by_plan(plane, start) for start in range(starts)]
        near.append(first)
        far += planned
        name = f"catchup.lr{rate:.0e}".replace("e-0", "e-")
        chain = sum(held.event.stored_bytes for held in plane.held[1 : BEHIND + 1])
        full = plane.held[0].event.full_bytes
        figures += [
            Figure(name=f"{name}.objects", value=first.objects, unit="objects", baseline=BEHIND),
            Figure(name=f"{name}.bytes_ratio", value=first.ratio, unit="of direct"),
            Figure(name=f"{name}.worst_objects", value=max(c.objects for c in planned), unit="objects"),
            Figure(name=f"{name}.worst_bytes_ratio", value=max(c.ratio for c in planned), unit="of direct"),
            Figure(name=f"{name}.chain_ratio", value=chain / first.direct, unit="of direct"),
            Figure(name=f"{name}.direct_pct", value=100 * first.direct / full, unit="% of full"),
            Figure(name=f"{name}.delta_pct", value=100 * chain / BEHIND / full, unit="% of full"),
            Figure(name=f"{name}.load_ms", value=load_ms, unit="ms"),
        ]
    return [
        Figure(name="catchup.objects", value=max(c.objects for c in near), unit="objects", baseline=BEHIND),
        Figure(name="catchup.bytes_ratio", value=max(c.ratio for c in near), unit="of direct"),
        Figure(
            name="catchup.worst_objects", value=max(c.objects for c in far), unit="objects", baseline=BEHIND
        ),
        Figure(name="catchup.worst_bytes_ratio", value=max(c.ratio for c in far), unit="of direct"),
        *figures,
    ]


def publish(mib: int, rate: float, seed: int, versions: int) -> Published:
    """Versions 0 to `versions`, as a trainer leaves them in the store."""
    config = PublisherConfig()
    store = Counted()
    writer = SnapshotWriter(
        store,
        model="bench",
        lineage="bench",
        shard_bytes=config.shard_bytes,
        anchor_shard_bytes=config.anchor_shard_bytes,
        threads=1,
        hf_config=None,
    )
    weights = Drifting(max(1, (mib << 20) // (2 * _WIDTH)), rate, seed)
    held = [writer.write_first(0, 0, weights.state(), 0)]
    links: list[WeightLink] = []
    for version in range(1, versions + 1):
        weights.step()
        anchor = version % config.anchor_every == 0
        held.append(writer.write_next(held[-1], version, version, weights.state(), 0, anchor=anchor))
        for base, _ in skips_due(version, 0):
            links.append(compose_link(store, [h.event for h in held], links, base, version, published_us=0))
    return Published(store, held, links)


class Drifting:
    """Masters [rows, 1024] under Adam, past its first dense steps."""

    def __init__(self, rows: int, rate: float, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._w: NDArray[np.float32] = self._rng.standard_normal((rows, _WIDTH), dtype=np.float32)
        self._w *= np.float32(0.02)
        self._m, self._v = np.zeros_like(self._w), np.zeros_like(self._w)
        self._rate = rate
        self._steps = 0
        for _ in range(WARM):
            self.step()

    def step(self) -> None:
        self._steps += 1
        g = self._rng.standard_normal(self._w.shape, dtype=np.float32)
        self._m *= np.float32(0.9)
        self._m += np.float32(0.1) * g
        self._v *= np.float32(0.999)
        g *= g
        g *= np.float32(0.001)
        self._v += g
        spread = np.sqrt(self._v / np.float32(1 - 0.999**self._steps)) + np.float32(1e-8)
        self._w -= np.float32(self._rate / (1 - 0.9**self._steps)) * self._m / spread

    def state(self) -> State:
        matrix = to_bf16(self._w)
        return {
            f"layers.{i}.weight": tensor("BF16", part.shape, part)
            for i, part in enumerate(np.array_split(matrix, -(-matrix.shape[0] // 1024)))
        }


def fetched(plane: Published) -> tuple[Caught, float]:
    """Really goes from version 0 to `BEHIND`; and the milliseconds of it."""
    base = plane.held[0]
    path = plan_path(plane.events, plane.links, 0, BEHIND)
    load_ms, loaded = float("inf"), Loaded(base.state, base.digest)
    for _ in range(3):  # the first one may compile
        plane.store.objects = plane.store.bytes = 0
        start = time.perf_counter()
        loaded = load_path(plane.store, path, Loaded(base.state, base.digest))
        load_ms = min(load_ms, (time.perf_counter() - start) * 1e3)
    if StateDigest.of(loaded.state).hex != plane.held[BEHIND].event.state_digest:
        raise DigestMismatch("the replica has other bits than the trainer")
    return Caught(plane.store.objects, plane.store.bytes, _direct(plane, 0)), load_ms


def by_plan(plane: Published, start: int) -> Caught:
    """What `fetched` would read from another start, by the sizes of the objects."""
    path = plan_path(plane.events, plane.links, start, start + BEHIND)
    sizes = [size for step in path for size in _sizes(plane, step)]
    return Caught(len(sizes), sum(sizes), _direct(plane, start))


def _sizes(plane: Published, step: PathStep) -> list[int]:
    if step.full:
        return (
            [step.event.full_bytes]
            if step.event.anchor is None
            else [step.event.anchor.size, step.event.full_bytes]
        )
    return [] if step.kind == "same" else [shard.size for shard in shards_of(plane.store, step.source)]


def _direct(plane: Published, start: int) -> int:
    old, new = plane.held[start], plane.held[start + BEHIND]
    return sum(map(len, encode_delta(old.state, new.state, base=old.digest).shards))
