"""Slices: ranges of anchors, chunks of deltas; the digest of the whole is followed though only parts are held."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import msgspec
import numpy as np
import pytest

from rollwire.consumers.weights.links import write_link
from rollwire.consumers.weights.manifest import decode_manifest
from rollwire.consumers.weights.parts import Choose, prepare_parts
from rollwire.consumers.weights.paths import anchor_step, delta_step, plan_path
from rollwire.consumers.weights.reader import Loaded, load_path
from rollwire.consumers.weights.snapshot import Held, SnapshotWriter
from rollwire.consumers.weights.sums import Layout, decode_sums, encode_sums
from rollwire.kernels.delta.encode import encode_delta
from rollwire.kernels.digest import StateDigest
from rollwire.kernels.tensors import CHUNK_ELEMENTS, State, Tensor, tensor
from rollwire.schemas.errors import BaseMismatch, DeltaCorrupt, DigestMismatch, StateMismatch
from rollwire.streams.seams.store_memory import MemoryStore

ROWS, WIDTH = 8, CHUNK_ELEMENTS  # a chunk a row


class Ranged(MemoryStore):
    """Counts the bytes that are read, and can damage what a range gives."""

    def __init__(self) -> None:
        super().__init__()
        self.counting = threading.Lock()
        self.read = 0
        self.ranges = 0
        self.whole: list[str] = []
        self.damage = ""

    def get(self, key: str, *, sha256: str | None = None) -> bytes:
        data = super().get(key, sha256=sha256)
        self.read += len(data)
        self.whole.append(key)
        return data

    def get_range(self, key: str, start: int, end: int) -> bytes:
        data = super().get_range(key, start, end)
        with self.counting:
            self.read += len(data)
            self.ranges += 1
        if self.damage and self.damage in key and start > 0:
            return data[:-1] + bytes([data[-1] ^ 1])
        return data


def make(seed: int) -> State:
    rng = np.random.default_rng(seed)
    return {
        "w": tensor("BF16", (ROWS, WIDTH), rng.integers(0, 1 << 16, ROWS * WIDTH, dtype=np.uint16)),
        "v": tensor("F32", (1000,), rng.integers(0, 1 << 32, 1000, dtype=np.uint32)),
        "empty": tensor("F16", (0, 4), b""),
        "step": tensor("I64", (), bytes(8)),
    }


def moved(state: State, seed: int) -> State:
    rng = np.random.default_rng([seed, 7])
    made: dict[str, Tensor] = {}
    for name, t in state.items():
        bits = t.bits.copy()
        if bits.size:
            at = rng.integers(0, bits.size, max(1, bits.size // 100))
            bits[at] ^= 1
        made[name] = t._replace(bits=bits)
    return made


def quarter(rank: int) -> Choose:
    """Rows [2 rank, 2 rank + 2) of w, all of the others."""

    def choose(layout: Layout) -> Mapping[str, tuple[int, int]]:
        whole = {name: (0, int(np.prod(shape))) for name, (_, shape) in layout.items()}
        return whole | {"w": (2 * rank * WIDTH, 2 * (rank + 1) * WIDTH)}

    return choose


class Plane:
    def __init__(self, versions: int) -> None:
        self.store = Ranged()
        self.states = [make(0)]
        writer = SnapshotWriter(
            self.store,
            model="m",
            lineage="L",
            shard_bytes=10_000,
            anchor_shard_bytes=2 << 20,
            threads=1,
            hf_config={"model_type": "m"},
        )
        self.held: list[Held] = [writer.write_first(0, 0, self.states[0], 1)]
        for version in range(1, versions):
            self.states.append(moved(self.states[-1], version))
            self.held.append(
                writer.write_next(self.held[-1], version, version, self.states[-1], 1, anchor=False)
            )
        self.events = [held.event for held in self.held]
        self.store.read = 0
        self.store.whole.clear()


def check(loaded: Loaded, state: State, rank: int) -> None:
    assert loaded.digest.hex == StateDigest.of(state).hex
    w = loaded.state["w"]
    assert (w.start, w.bits.size) == (2 * rank * WIDTH, 2 * WIDTH)
    assert np.array_equal(w.bits, state["w"].bits[w.start : w.start + w.bits.size])
    for name in ("v", "empty", "step"):
        assert loaded.state[name].bits.tobytes() == state[name].bits.tobytes()


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_a_slice_follows_from_the_anchor_through_deltas_and_links(rank: int) -> None:
    plane = Plane(5)
    store, states, events = plane.store, plane.states, plane.events
    delta = encode_delta(states[2], states[4], shard_bytes=60_000)
    skip = write_link(store, events[2], events[4], delta.shards, delta.heads, coder="gap", published_us=1)
    path = plan_path(events, [skip], None, 4, slice_share=0.25)
    assert [str(step) for step in path] == ["anchor 0", "delta 0>1", "delta 1>2", "skip 2>4"]
    loaded = load_path(store, path, None, choose=quarter(rank))
    check(loaded, states[4], rank)
    assert not [key for key in store.whole if "/deltas/" in key or key.endswith(".safetensors")]
    stored = events[0].full_bytes + sum(o.size for e in events[1:3] for o in e.objects) + skip.stored_bytes
    assert store.read < 0.29 * stored


def test_what_is_held_is_not_written_to() -> None:
    plane = Plane(3)
    held = load_path(plane.store, plan_path(plane.events, (), None, 1), None, choose=quarter(1))
    before = {name: t.bits.tobytes() for name, t in held.state.items()}
    path = plan_path(plane.events, (), 1, 2, slice_share=0.25)
    after = load_path(plane.store, path, held, choose=quarter(1))
    check(after, plane.states[2], 1)
    assert {name: t.bits.tobytes() for name, t in held.state.items()} == before
    check(held, plane.states[1], 1)


@pytest.mark.parametrize("where", ["anchors/", "deltas/"])
def test_a_damaged_range_is_found_by_its_chunk(where: str) -> None:
    plane = Plane(2)
    plane.store.damage = where
    error = DigestMismatch if where == "anchors/" else DeltaCorrupt
    with pytest.raises(error, match="chunk"):
        load_path(plane.store, plan_path(plane.events, (), None, 1), None, choose=quarter(2))


def test_sums_of_another_state_are_refused() -> None:
    plane = Plane(1)
    claim = plane.events[0].manifest
    manifest = decode_manifest(plane.store.get(claim.key))
    packed = encode_sums(plane.held[0].digest)
    assert decode_sums(packed, manifest).hex == plane.events[0].state_digest
    with pytest.raises(DigestMismatch, match="the chunk sums of version 0 are those of"):
        decode_sums(bytes([packed[0] ^ 1]) + packed[1:], manifest)
    for cut in (packed[:-16], packed + bytes(16)):
        with pytest.raises((DeltaCorrupt, StateMismatch)):
            decode_sums(cut, manifest)


@pytest.mark.parametrize(
    ("choice", "text"),
    [
        ({"x": (0, 1)}, "no tensor 'x'"),
        ({"w": (0, ROWS * WIDTH + 1)}, "cannot be held"),
        ({"w": (5, 3)}, "held"),
    ],
)
def test_an_impossible_slice_is_named(choice: dict[str, tuple[int, int]], text: str) -> None:
    plane = Plane(1)
    with pytest.raises(StateMismatch, match=text):
        load_path(plane.store, [anchor_step(plane.events[0])], None, choose=lambda _: choice)


def test_a_slice_is_rounded_out_to_the_grid_and_may_be_empty() -> None:
    plane = Plane(2)

    def choose(_: Layout) -> Mapping[str, tuple[int, int]]:
        return {"w": (WIDTH + 5, WIDTH + 6), "v": (3, 3)}

    loaded = load_path(plane.store, plan_path(plane.events, (), None, 1), None, choose=choose)
    assert (loaded.state["w"].start, loaded.state["w"].bits.size) == (WIDTH, WIDTH)
    assert loaded.state["v"].bits.size == 0
    assert loaded.digest.hex == plane.events[1].state_digest


def test_another_base_is_refused_before_a_payload_is_fetched() -> None:
    plane = Plane(3)
    held = load_path(plane.store, plan_path(plane.events, (), None, 0), None, choose=quarter(1))
    plane.store.ranges = 0
    before = {name: t.bits.tobytes() for name, t in held.state.items()}
    with pytest.raises(BaseMismatch, match="version 2 by delta 1>2"):
        load_path(plane.store, [delta_step(plane.events[2])], held, choose=quarter(1))
    assert plane.store.ranges == len(plane.events[2].objects)  # their heads
    assert {name: t.bits.tobytes() for name, t in held.state.items()} == before


def test_a_shard_of_another_delta_is_refused() -> None:
    plane = Plane(3)
    held = load_path(plane.store, plan_path(plane.events, (), None, 0), None, choose=quarter(1))
    mixed = [*plane.events[1].objects[:-1], plane.events[2].objects[-1]]
    assert len(mixed) > 1
    with pytest.raises((BaseMismatch, DeltaCorrupt)):
        prepare_parts(plane.store, held.state, held.digest, mixed)
    short = plane.events[1].objects[:-1]
    with pytest.raises(DeltaCorrupt, match="shards of a delta"):
        prepare_parts(plane.store, held.state, held.digest, short)
    cut = [msgspec.structs.replace(mixed[0], head_bytes=mixed[0].head_bytes + 1), *mixed[1:]]
    with pytest.raises(DeltaCorrupt, match="published were"):
        prepare_parts(plane.store, held.state, held.digest, cut)
