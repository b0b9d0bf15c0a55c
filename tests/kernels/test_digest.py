"""The incremental digest against a plain-integer reference, and its laws."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollwire.kernels.digest import StateDigest, tensor_blake3, tensor_sum
from rollwire.kernels.tensors import LANE_BYTES, Tensor, tensor
from rollwire.schemas.errors import StateMismatch

MASK = 2**64 - 1


def _finish(z: int, p: int, q: int) -> int:
    z = (z ^ (z >> 32)) * p & MASK
    z = (z ^ (z >> 29)) * q & MASK
    return z ^ (z >> 32)


def _mix(index: int, bits: int) -> int:
    """The module's docstring, in plain integers."""
    key = (index + 1) * 0x9E3779B97F4A7C15 & MASK
    lo = _finish(bits ^ key, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
    turned = ((key << 32) | (key >> 32)) & MASK
    hi = _finish((bits + turned) & MASK, 0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53)
    return hi << 64 | lo


def random_tensor(dtype: str, size: int, seed: int) -> Tensor:
    data = np.random.default_rng(seed).integers(0, 256, size * LANE_BYTES[dtype], dtype=np.uint8)
    return tensor(dtype, (size,), data.tobytes())


@pytest.mark.parametrize("dtype", sorted(LANE_BYTES))
def test_sum_is_the_documented_one(dtype: str) -> None:
    t = random_tensor(dtype, 999, seed=1)
    expected = sum(_mix(i, int(bits)) for i, bits in enumerate(t.bits)) % 2**128
    assert tensor_sum(t) == expected


def test_sum_over_several_blocks() -> None:
    t = random_tensor("U8", (1 << 20) + 5, seed=2)
    first, second = t.bits[: 1 << 20], t.bits[1 << 20 :]
    head = tensor_sum(tensor("U8", (1 << 20,), first))
    tail = sum(_mix((1 << 20) + i, int(bits)) for i, bits in enumerate(second))
    assert tensor_sum(t) == (head + tail) % 2**128


@given(
    st.sampled_from(["U8", "BF16", "F32", "F64"]),
    st.integers(1, 300),
    st.integers(0, 2**31),
    st.floats(0, 1),
)
@settings(deadline=None)
def test_update_equals_recomputation(dtype: str, size: int, seed: int, density: float) -> None:
    rng = np.random.default_rng(seed)
    old, new = random_tensor(dtype, size, seed), random_tensor(dtype, size, seed + 1)
    chosen = np.flatnonzero(rng.random(size) < density).astype(np.uint64)
    bits = old.bits.copy()
    bits[chosen] = new.bits[chosen]
    digest = StateDigest.of({"w": old, "other": old})
    before = digest.copy()
    digest.update("w", chosen, old.bits[chosen], bits[chosen])
    assert digest.hex == StateDigest.of({"w": Tensor(dtype, (size,), bits), "other": old}).hex
    assert (digest.hex == before.hex) == bool((bits == old.bits).all())


def test_order_of_names_is_irrelevant_but_names_dtypes_and_shapes_count() -> None:
    a, b = random_tensor("BF16", 12, 1), random_tensor("BF16", 12, 2)
    digest = StateDigest.of({"a": a, "b": b}).hex
    assert StateDigest.of({"b": b, "a": a}).hex == digest
    others = [
        {"a": b, "b": a},
        {"a": a},
        {"a": a, "c": b},
        {"a": a, "b": Tensor("F16", (12,), b.bits)},
        {"a": a, "b": Tensor("BF16", (3, 4), b.bits)},
    ]
    assert digest not in {StateDigest.of(state).hex for state in others}
    assert tensor_blake3(a) != tensor_blake3(Tensor("F16", (12,), a.bits)) != tensor_blake3(b)


def test_swapped_elements_negative_zero_and_nan_payloads_change_it() -> None:
    plain = tensor("BF16", (4,), np.array([0x0000, 0x3F80, 0x7FC0, 0x0001], dtype=np.uint16))
    sums = {tensor_sum(plain)}
    for bits in ([0x8000, 0x3F80, 0x7FC0, 1], [0x3F80, 0, 0x7FC0, 1], [0, 0x3F80, 0x7FC1, 1]):
        sums.add(tensor_sum(tensor("BF16", (4,), np.array(bits, dtype=np.uint16))))
    assert len(sums) == 4


def test_empty_and_scalar_and_unaligned() -> None:
    assert tensor_sum(tensor("F32", (0, 4), b"")) == 0
    assert tensor_sum(tensor("I64", (), (7).to_bytes(8, "little"))) == _mix(0, 7)
    data = b"\0" + np.arange(8, dtype="<u4").tobytes()
    odd = tensor("F32", (8,), memoryview(data)[1:])
    assert tensor_sum(odd) == tensor_sum(tensor("F32", (8,), np.arange(8, dtype="<u4")))
    assert len(tensor_blake3(tensor("F32", (0, 4), b""))) == 64


def test_update_refuses_what_does_not_fit() -> None:
    digest = StateDigest.of({"a": random_tensor("BF16", 4, 0)})
    at = np.zeros(1, dtype=np.uint64)
    with pytest.raises(StateMismatch, match="not in this state"):
        digest.update("b", at, np.zeros(1, np.uint16), np.ones(1, np.uint16))
    with pytest.raises(StateMismatch, match="new bits"):
        digest.update("a", at, np.zeros(1, np.uint16), np.ones(1, np.uint32))


def test_golden_digest() -> None:
    """Published digests must hold for as long as the log is kept: this value never changes."""
    state = {
        "b": tensor("BF16", (2, 3), np.arange(6, dtype=np.uint16)),
        "a": tensor("F32", (), (1).to_bytes(4, "little")),
    }
    assert StateDigest.of(state).hex == "d6ea63751af0933f4d36fe938d7b8d105d1bf6200e0a324331ddc881b7556645"
