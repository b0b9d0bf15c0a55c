"""Replicas that hold parts, and ranks that each write theirs: chunks alone, checked against the digest of the whole."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest

from rollwire.kernels.delta.encode import Encoded, encode_chunks, encode_delta, seal, split_chunks
from rollwire.kernels.delta.format import read_head
from rollwire.kernels.delta.prepare import prepare_delta
from rollwire.kernels.delta.slices import prepare_chunks
from rollwire.kernels.digest import StateDigest
from rollwire.kernels.tensors import CHUNK_ELEMENTS, State, Tensor, part_of, tensor
from rollwire.schemas.errors import BaseMismatch, DeltaCorrupt, DigestMismatch, StateMismatch

ROWS = 2048
COLUMNS = 8 * CHUNK_ELEMENTS // ROWS


def states(seed: int = 0) -> tuple[State, State]:
    rng = np.random.default_rng(seed)
    size = ROWS * COLUMNS
    w = rng.integers(0, 2**16, size, dtype=np.uint16)
    moved = np.where(rng.random(size) < 0.01, w + np.uint16(1), w)
    b = rng.integers(0, 2**32, 500, dtype=np.uint32)
    c = b.copy()
    c[:9] ^= 1
    return (
        {"w": tensor("BF16", (ROWS, COLUMNS), w), "b": tensor("F32", (500,), b)},
        {"w": tensor("BF16", (ROWS, COLUMNS), moved), "b": tensor("F32", (500,), c)},
    )


def slice_of(state: State, rank: int, ranks: int) -> dict[str, Tensor]:
    size = state["w"].elements
    part = part_of(state["w"], size * rank // ranks, size * (rank + 1) // ranks)
    return {"w": part._replace(bits=part.bits.copy()), "b": state["b"]._replace(bits=state["b"].bits.copy())}


class Store:
    def __init__(self, shards: tuple[bytes, ...]) -> None:
        self.shards = shards
        self.fetched = 0

    def get(self, shard: int, start: int, end: int) -> bytes:
        self.fetched += end - start
        return self.shards[shard][start:end]


@pytest.mark.parametrize("coder", ["gap", "context"])
@pytest.mark.parametrize("shard_bytes", [1 << 30, 2000])
def test_a_slice_reads_its_chunks_and_knows_the_digest_of_the_whole(
    coder: Literal["gap", "context"], shard_bytes: int
) -> None:
    old, new = states()
    base = StateDigest.of(old)
    delta = encode_delta(old, new, base=base, coder=coder, shard_bytes=shard_bytes)
    heads = [read_head(shard[:head]) for shard, head in zip(delta.shards, delta.heads, strict=True)]
    for rank in range(4):
        store = Store(delta.shards)
        mine = slice_of(old, rank, 4)
        prepared = prepare_chunks(mine, base, heads, store.get, threads=2)
        assert prepared.digest.hex == delta.result.hex
        prepared.apply()
        wanted = slice_of(new, rank, 4)
        assert all((mine[name].bits == wanted[name].bits).all() for name in mine)
        assert mine["w"].bits.size == 2 * CHUNK_ELEMENTS
        payloads = sum(len(shard) for shard in delta.shards) - sum(delta.heads)
        assert store.fetched < 1.15 * payloads / 4
        prepared.undo()
        assert (mine["w"].bits == slice_of(old, rank, 4)["w"].bits).all()


def test_what_a_slice_refuses() -> None:
    old, new = states()
    base = StateDigest.of(old)
    delta = encode_delta(old, new, base=base)
    head = read_head(delta.shards[0])
    store = Store(delta.shards)
    mine = slice_of(old, 1, 4)
    before = mine["w"].bits.copy()
    with pytest.raises(BaseMismatch):
        prepare_chunks(mine, delta.result, head, store.get)
    with pytest.raises(DeltaCorrupt, match="came"):
        prepare_chunks(mine, base, head, lambda s, a, b: store.get(s, a, b)[:-1])
    with pytest.raises(DeltaCorrupt, match="damaged"):
        prepare_chunks(mine, base, head, lambda s, a, b: bytes(b - a))
    askew = Tensor("BF16", (ROWS, COLUMNS), mine["w"].bits[5:], mine["w"].start + 5)
    with pytest.raises(StateMismatch, match="chunks of"):
        prepare_chunks({"w": askew}, base, head, store.get)
    with pytest.raises(StateMismatch, match="b:"):
        prepare_chunks({"b": tensor("F16", (500,), bytes(1000))}, base, head, store.get)
    with pytest.raises(StateMismatch, match="elements are held"):
        prepare_delta(mine, base, delta.shards)
    nearly = slice_of(old, 1, 4)
    here = np.flatnonzero(nearly["w"].bits != slice_of(new, 1, 4)["w"].bits)
    nearly["w"].bits[int(here[0])] ^= np.uint16(2)
    with pytest.raises(DigestMismatch, match="w: chunk 2"):
        prepare_chunks(nearly, base, head, store.get)
    assert (mine["w"].bits == before).all()


def test_ranks_write_their_parts_of_one_delta() -> None:
    """What sharded trainers do: chunks by rank, sums to all, then shards that name the whole's result."""
    old, new = states()
    old, new = {"w": old["w"]}, {"w": new["w"]}
    base = StateDigest.of(old)
    size = old["w"].elements
    parts: list[Encoded] = []
    for rank in range(2):
        ends = size * rank // 2, size * (rank + 1) // 2
        mine = {"w": part_of(old["w"], *ends)}
        known = StateDigest.of(mine)
        parts.append(encode_chunks(mine, {"w": part_of(new["w"], *ends)}, base=known))
    result = base.copy()
    for chunk in (chunk for part in parts for chunk in part.chunks):
        result.set(chunk.name, chunk.chunk, chunk.total)
    assert result.hex == StateDigest.of(new).hex
    lists = [split_chunks(part.chunks, 20_000) for part in parts]
    count = sum(len(some) for some in lists)
    shards = [
        shard
        for rank, some in enumerate(lists)
        for shard, _ in seal(some, base.hex, result.hex, first=rank * len(lists[0]), of=count)
    ]
    live = {"w": old["w"]._replace(bits=old["w"].bits.copy())}
    prepared = prepare_delta(live, base, shards)
    prepared.apply()
    assert (live["w"].bits == new["w"].bits).all()
    assert prepared.digest.hex == result.hex


def test_digests_of_parts_join_and_check() -> None:
    old, new = states()
    whole = StateDigest.of(old)
    joined = StateDigest.of({"w": part_of(old["w"], 0, CHUNK_ELEMENTS)})
    with pytest.raises(StateMismatch, match="not known"):
        joined.hex  # noqa: B018  # asked for what it raises
    joined.fill(StateDigest.of({"w": part_of(old["w"], CHUNK_ELEMENTS, old["w"].elements), "b": old["b"]}))
    assert joined.hex == whole.hex
    assert StateDigest.from_sums(whole.table()).hex == whole.hex
    whole.check(slice_of(old, 2, 4))
    with pytest.raises(DigestMismatch, match="chunk 4"):
        whole.check(slice_of(new, 2, 4))
    with pytest.raises(DigestMismatch, match="w: chunk 0"):
        joined.fill(StateDigest.of({"w": part_of(new["w"], 0, 1)}))
