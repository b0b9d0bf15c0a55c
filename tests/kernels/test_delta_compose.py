"""Composed gap deltas are the direct ones, byte for byte."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollwire.kernels.delta.apply import apply_delta
from rollwire.kernels.delta.compose import compose_deltas
from rollwire.kernels.delta.encode import encode_delta
from rollwire.kernels.tensors import CHUNK_ELEMENTS, LANE_BYTES, State, tensor
from rollwire.schemas.errors import BaseMismatch, DeltaCorrupt, StateMismatch, WeightError


def walk(dtype: str, size: int, steps: int, seed: int) -> list[State]:
    """States that follow one another by small steps, some of which lead back."""
    rng = np.random.default_rng(seed)
    lane = LANE_BYTES[dtype]
    bits = rng.integers(0, 256, size * lane, dtype=np.uint8).view(f"<u{lane}")
    states: list[State] = [{"w": tensor(dtype, (size,), bits), "still": tensor(dtype, (), bytes(lane))}]
    for _ in range(steps):
        moved = bits + rng.integers(-2, 3, size).astype(bits.dtype)
        bits = np.where(rng.random(size) < rng.choice([0.001, 0.1, 0.9]), moved, bits)
        bits = np.where(rng.random(size) < 0.3, states[0]["w"].bits, bits)
        states.append({**states[0], "w": tensor(dtype, (size,), bits)})
    return states


@given(st.sampled_from(sorted(LANE_BYTES)), st.integers(1, 3000), st.integers(2, 5), st.integers(0, 2**31))
@settings(max_examples=100, deadline=None)
def test_a_composed_delta_is_the_direct_one(dtype: str, size: int, steps: int, seed: int) -> None:
    states = walk(dtype, size, steps, seed)
    deltas = [encode_delta(a, b).shards for a, b in pairwise(states)]
    composed = compose_deltas(*deltas)
    direct = encode_delta(states[0], states[-1])
    assert composed.shards == direct.shards
    assert (composed.changed_elements, composed.heads) == (direct.changed_elements, direct.heads)
    applied = apply_delta(states[0], composed.shards)
    assert applied.state["w"].bits.tobytes() == states[-1]["w"].bits.tobytes()


def test_several_chunks_shards_and_threads() -> None:
    states = walk("BF16", 3 * CHUNK_ELEMENTS + 77, 4, seed=1)
    deltas = [encode_delta(a, b, shard_bytes=1).shards for a, b in pairwise(states)]
    assert all(len(shards) >= 3 for shards in deltas)
    direct = encode_delta(states[0], states[-1], shard_bytes=1)
    composed = compose_deltas(*(shards[::-1] for shards in deltas), (), shard_bytes=1, threads=2)
    assert composed.shards == direct.shards


def test_there_and_back_is_nothing() -> None:
    a, b = walk("F32", 500, 1, seed=3)
    composed = compose_deltas(encode_delta(a, b).shards, encode_delta(b, a).shards)
    assert composed.shards == ()
    assert composed.base == composed.result == encode_delta(a, b).base


def test_what_does_not_compose_is_named() -> None:
    states = walk("BF16", 20_000, 3, seed=4)
    first, second, third = (encode_delta(a, b).shards for a, b in pairwise(states))
    with pytest.raises(BaseMismatch, match="delta 1 is for base"):
        compose_deltas(first, third)
    with pytest.raises(WeightError, match="do not compose"):
        compose_deltas(first, encode_delta(states[1], states[2], coder="context").shards)
    with pytest.raises(DeltaCorrupt, match=r"2 of 1"):
        compose_deltas(first, (*second, *second))
    damaged = bytearray(second[0])
    damaged[-1] ^= 1
    with pytest.raises(DeltaCorrupt, match=r"damaged"):
        compose_deltas(first, [bytes(damaged)])
    other = {"w": tensor("F16", (20_000,), states[2]["w"].bits), "still": tensor("F16", (), bytes(2))}
    moved = {**other, "w": tensor("F16", (20_000,), states[3]["w"].bits)}
    with pytest.raises((StateMismatch, BaseMismatch)):
        compose_deltas(first, second, encode_delta(other, moved).shards)
