"""Prepared deltas: verified before a byte changes, written in place, undone, run backwards; both coders, every dtype."""

from __future__ import annotations

import struct
from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollwire.kernels.delta.apply import DeltaStage, apply_delta
from rollwire.kernels.delta.encode import encode_both, encode_chunks, encode_delta, seal
from rollwire.kernels.delta.format import CODER_CONTEXT, CODER_GAP, FLOATS, read_head
from rollwire.kernels.delta.prepare import prepare_delta
from rollwire.kernels.digest import StateDigest
from rollwire.kernels.tensors import CHUNK_ELEMENTS, LANE_BYTES, State, Tensor, tensor
from rollwire.schemas.errors import (
    BaseMismatch,
    DeltaCorrupt,
    DigestMismatch,
    FormatUnknown,
    StateMismatch,
    WeightError,
)

Coder = Literal["gap", "context"]
CODERS: tuple[Coder, ...] = ("gap", "context")


def raw_bits(state: State) -> dict[str, bytes]:
    return {name: t.bits.tobytes() for name, t in state.items()}


def copied(state: State) -> dict[str, Tensor]:
    return {name: t._replace(bits=t.bits.copy()) for name, t in state.items()}


def near(dtype: str, size: int, density: float, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """A tensor and its successor: small steps, some leaps, some signs, zeros and NaNs among the elements."""
    lane = LANE_BYTES[dtype]
    old = rng.integers(0, 256, size * lane, dtype=np.uint8).view(f"<u{lane}")
    special = np.array(
        [0, 1 << (8 * lane - 1), (1 << 8 * lane) - 1, (1 << (8 * lane - 1)) - 1], object
    ).astype(old.dtype)
    old = np.where(rng.random(size) < 0.2, rng.choice(special, size), old)
    step = rng.choice(np.array([1, -1, 2, -3, 1 << (8 * lane - 1)], object), size).astype(object)
    moved = np.array([(int(a) + int(b)) % (1 << 8 * lane) for a, b in zip(old, step, strict=True)], old.dtype)
    moved = np.where(rng.random(size) < 0.1, rng.choice(special, size), moved)
    return tensor(dtype, (size,), old), tensor(
        dtype, (size,), np.where(rng.random(size) < density, moved, old)
    )


@pytest.mark.parametrize("coder", CODERS)
@pytest.mark.parametrize("dtype", sorted(LANE_BYTES))
def test_a_thousand_random_pairs_of_every_dtype(dtype: str, coder: Coder) -> None:
    """Bit equality forwards, undone, and back; with a scalar and an empty tensor beside."""
    rng = np.random.default_rng(sorted(LANE_BYTES).index(dtype))
    old: dict[str, Tensor] = {"empty": tensor(dtype, (0, 3), b"")}
    new = dict(old)
    for i in range(1000):
        size = int(rng.integers(1, 60))
        shape = () if i % 10 == 0 else (size,)
        a, b = near(dtype, 1 if shape == () else size, float(rng.choice([0.02, 0.3, 1.0])), rng)
        old[f"t{i}"], new[f"t{i}"] = Tensor(dtype, shape, a.bits), Tensor(dtype, shape, b.bits)
    base = StateDigest.of(old)
    there, back = encode_both(old, new, base=base, coder=coder)
    assert there.shards == encode_delta(old, new, coder=coder, threads=3).shards
    assert {c for s in there.shards for c in read_head(s).columns.coder_K.tolist()} == {
        CODER_CONTEXT if coder == "context" and dtype in FLOATS else CODER_GAP
    }
    live = copied(old)
    prepared = prepare_delta(live, base, there.shards)
    assert raw_bits(live) == raw_bits(old)
    assert prepared.digest.hex == there.result.hex == StateDigest.of(new).hex
    assert prepared.changed == there.changed_elements
    prepared.apply()
    assert raw_bits(live) == raw_bits(new)
    prepared.undo()
    assert raw_bits(live) == raw_bits(old)
    prepared.apply()
    inverse = prepare_delta(live, prepared.digest, back.shards, threads=2)
    inverse.apply()
    assert raw_bits(live) == raw_bits(old)
    assert inverse.digest.hex == base.hex
    if coder == "gap" or dtype not in FLOATS:
        backwards = apply_delta(new, there.shards, backwards=True)
        assert raw_bits(backwards.state) == raw_bits(old)
        assert backwards.digest.hex == base.hex


@given(
    st.sampled_from(sorted(LANE_BYTES)),
    st.integers(1, 5000),
    st.sampled_from(CODERS),
    st.integers(0, 2**31),
    st.integers(1, 4),
)
@settings(max_examples=60, deadline=None)
def test_bytes_do_not_depend_on_threads_or_memory(
    dtype: str, size: int, coder: Coder, seed: int, threads: int
) -> None:
    """Strided, askew and read-only sources give the same delta as straight ones."""
    rng = np.random.default_rng(seed)
    a, b = near(dtype, size, 0.1, rng)
    straight = encode_delta({"w": a}, {"w": b}, coder=coder)
    lane = LANE_BYTES[dtype]
    shifted = np.zeros((size + 1) * lane + 1, np.uint8)
    askew = shifted[1 : 1 + size * lane].view(a.bits.dtype)
    askew[:] = a.bits
    wide = np.zeros((size, 2), b.bits.dtype)
    wide[:, 0] = b.bits
    wide.flags.writeable = False
    odd = encode_delta(
        {"w": Tensor(dtype, (size,), askew)},
        {"w": Tensor(dtype, (size,), wide[:, 0])},
        coder=coder,
        threads=threads,
    )
    assert odd.shards == straight.shards
    applied = apply_delta({"w": Tensor(dtype, (size,), askew)}, odd.shards)
    assert applied.state["w"].bits.tobytes() == b.bits.tobytes()


def big_pair(seed: int = 0) -> tuple[State, State]:
    rng = np.random.default_rng(seed)
    size = 2 * CHUNK_ELEMENTS + 1000
    old = rng.integers(0, 2**16, size, dtype=np.uint16)
    new = np.where(rng.random(size) < 0.01, old + np.uint16(1), old)
    other = rng.integers(0, 255, 1000, dtype=np.uint8)
    return (
        {"w": tensor("BF16", (size,), old), "q": tensor("U8", (10, 100), other)},
        {"w": tensor("BF16", (size,), new), "q": tensor("U8", (10, 100), other ^ (other > 250))},
    )


@pytest.mark.parametrize("coder", CODERS)
def test_several_chunks_lanes_shards_and_threads(coder: Coder) -> None:
    old, new = big_pair()
    delta = encode_delta(old, new, coder=coder, shard_bytes=1000)
    assert len(delta.shards) == 4
    assert delta.heads == tuple(read_head(shard).head_bytes for shard in delta.shards)
    live = copied(old)
    prepared = prepare_delta(live, StateDigest.of(old), reversed(delta.shards), threads=3)
    assert prepared.names == {"w", "q"}
    assert prepared.nbytes <= 8 * prepared.changed
    assert sum(change.positions_N.size for change in prepared.changes()) == prepared.changed
    prepared.apply()
    assert raw_bits(live) == raw_bits(new)


def test_prepared_for_one_state_writes_another_of_its_layout() -> None:
    old, new = big_pair()
    prepared = prepare_delta(old, StateDigest.of(old), encode_delta(old, new).shards)
    target = copied(old)
    prepared.apply(target)
    assert raw_bits(target) == raw_bits(new)
    with pytest.raises(StateMismatch, match=r"not of the layout"):
        prepared.apply({"w": target["w"]})
    frozen = copied(old)
    frozen["w"].bits.flags.writeable = False
    before = raw_bits(frozen)
    with pytest.raises(StateMismatch, match="read-only"):
        prepared.apply(frozen)
    assert raw_bits(frozen) == before


def test_tied_tensors_are_written_once_and_right() -> None:
    """C28: two names, one memory."""
    a, b = near("BF16", 1000, 0.1, np.random.default_rng(5))
    old, new = {"embed": a, "head": a}, {"embed": b, "head": b}
    bits = a.bits.copy()
    live = {name: a._replace(bits=bits) for name in old}
    prepared = prepare_delta(live, StateDigest.of(old), encode_delta(old, new).shards)
    prepared.apply()
    assert raw_bits(live) == raw_bits(new)
    prepared.undo()
    assert raw_bits(live) == raw_bits(old)


def test_a_context_delta_does_not_run_backwards() -> None:
    old, new = big_pair()
    delta = encode_delta(old, new, coder="context")
    with pytest.raises(WeightError, match="inverse"):
        prepare_delta(new, delta.result, delta.shards, backwards=True)


def test_c23_a_delta_is_for_one_base_in_each_direction() -> None:
    """C23."""
    old, new = big_pair()
    delta = encode_delta(old, new)
    with pytest.raises(BaseMismatch, match="base"):
        prepare_delta(new, delta.result, delta.shards)
    with pytest.raises(BaseMismatch, match="result"):
        prepare_delta(old, StateDigest.of(old), delta.shards, backwards=True)


@pytest.mark.parametrize("coder", CODERS)
def test_a_base_that_is_nearly_right_is_refused(coder: Coder) -> None:
    """The digest is believed, the memory differs by a bit of an element that changes: its chunk's sum tells."""
    old, new = big_pair()
    delta = encode_delta(old, new, coder=coder)
    live = copied(old)
    at = int(np.flatnonzero(old["w"].bits != new["w"].bits)[7])
    live["w"].bits[at] ^= np.uint16(1)
    before = raw_bits(live)
    with pytest.raises((DigestMismatch, DeltaCorrupt), match="w: chunk 0"):
        prepare_delta(live, StateDigest.of(old), delta.shards)
    assert raw_bits(live) == before


@pytest.mark.parametrize("coder", CODERS)
def test_every_damaged_byte_is_refused_before_anything_is_written(coder: Coder) -> None:
    rng = np.random.default_rng(2)
    a, b = near("BF16", 400, 0.05, rng)
    c, d = near("U8", 30, 0.5, rng)
    old, new = {"a": a, "c": c}, {"a": b, "c": d}
    shard = encode_delta(old, new, coder=coder).shards[0]
    digest, before = StateDigest.of(old), raw_bits(old)
    for at in range(len(shard)):
        for flip in (0x01, 0x80, 0xFF):
            bad = bytearray(shard)
            bad[at] ^= flip
            with pytest.raises((DeltaCorrupt, FormatUnknown)):
                prepare_delta(old, digest, [bytes(bad)])
    for length in range(len(shard)):
        with pytest.raises(DeltaCorrupt):
            prepare_delta(old, digest, [shard[:length]])
    with pytest.raises(DeltaCorrupt):
        prepare_delta(old, digest, [shard + b"\0"])
    assert raw_bits(old) == before


def test_a_chunk_in_two_shards_is_refused() -> None:
    """Each would be read against the base, and the last one written would win, whatever the sums say."""
    old, new = big_pair()
    base = StateDigest.of(old)
    encoded = encode_chunks(old, new, base=base)
    result = encode_delta(old, new).result
    shards = seal([list(encoded.chunks), list(encoded.chunks[:1])], base.hex, result.hex)
    with pytest.raises(DeltaCorrupt, match="q: chunk 0 is in two shards"):
        prepare_delta(old, base, [shard for shard, _ in shards])


def test_limits_are_checked_before_memory_is_taken() -> None:
    """A header may say anything: sizes are bounded by what was read."""
    old, new = big_pair()
    shard = encode_delta(old, new).shards[0]
    for at, value in ((104, 1 << 60), (112, 1 << 60), (112, 1 << 27), (96, 1 << 60), (88, 1 << 60)):
        bad = bytearray(shard)
        struct.pack_into("<Q", bad, at, value)
        with pytest.raises(DeltaCorrupt):
            read_head(bytes(bad))


def test_a_stage_goes_there_and_back_on_copies() -> None:
    old, new = big_pair()
    _, third = big_pair(seed=1)
    third = {"w": third["w"], "q": new["q"]}
    first, second = encode_delta(old, new), encode_delta(new, third)
    stage = DeltaStage(old, StateDigest.of(old), threads=2)
    stage.apply(first.shards)
    stage.apply(second.shards)
    assert raw_bits(stage.done().state) == raw_bits(third)
    stage.apply(second.shards, backwards=True)
    stage.apply(first.shards, backwards=True)
    done = stage.done()
    assert raw_bits(done.state) == raw_bits(old)
    assert done.digest.hex == first.base
