"""The context coder: exact on every bit pattern, near the entropy limit, and unmoved by any stream."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from rollwire.kernels.delta import context
from rollwire.kernels.delta.context import LAYOUTS, OK, ContextEncoder, decode_context
from rollwire.kernels.delta.gap import EncodedChunk, GapEncoder
from rollwire.kernels.delta.octaves import (
    BLOCK,
    CLASSES,
    at_least,
    due_classes,
    nth_set,
    nth_set_by_halves,
    pass_block,
)
from rollwire.kernels.digest import jit
from rollwire.kernels.tensors import CHUNK_ELEMENTS, LANE_BYTES

DTYPES = tuple(LAYOUTS)
STATUSES = {
    context.OK,
    context.OUT_OF_RANGE,
    context.NO_CHANGE,
    context.CUT,
    context.BAD_PARAMETER,
}
encoder = ContextEncoder()


def bits_of(rng: np.random.Generator, dtype: str, count: int) -> NDArray[Any]:
    """Any bit patterns of `dtype`: NaN payloads, infinities and subnormals among them."""
    lane = LANE_BYTES[dtype]
    return rng.integers(0, 256, count * lane, dtype=np.uint8).view(f"<u{lane}")


def specials(dtype: str) -> NDArray[Any]:
    """+0, -0, the least and largest subnormal, 1, the largest number, the infinities, two NaNs of each sign."""
    exponent_bits, mantissa_bits = LAYOUTS[dtype]
    sign = 1 << (exponent_bits + mantissa_bits)
    top = ((1 << exponent_bits) - 1) << mantissa_bits
    positive = [0, 1, (1 << mantissa_bits) - 1, top >> 1, top - 1, top, top + 1, sign - 1]
    return np.array([x | s for x in positive for s in (0, sign)], dtype=f"<u{LANE_BYTES[dtype]}")


def decoded(base_M: NDArray[Any], dtype: str, chunk: EncodedChunk) -> NDArray[Any]:
    positions_N = np.empty(chunk.changed, np.uint32)
    new_N = np.empty(chunk.changed, base_M.dtype)
    status = decode_context(base_M, dtype, np.frombuffer(chunk.payload, np.uint8), positions_N, new_N)
    assert status == OK
    assert np.all(np.diff(positions_N.astype(np.int64)) > 0)
    result_M = base_M.copy()
    result_M[positions_N] = new_N
    return result_M


def check(old_M: NDArray[Any], new_M: NDArray[Any], dtype: str) -> EncodedChunk:
    chunk = encoder.encode(old_M, new_M, dtype)
    assert chunk.changed == np.count_nonzero(old_M != new_M)
    if chunk.changed:
        assert np.array_equal(decoded(old_M, dtype, chunk), new_M)
    else:
        assert chunk.payload == b""
    return chunk


def moved(rng: np.random.Generator, old_M: NDArray[Any], share: float, far: int = 3) -> NDArray[Any]:
    """About `share` of the elements moved by 1 to `far` in their bits."""
    steps = rng.integers(1, far + 1, old_M.size).astype(old_M.dtype)
    return np.where(rng.random(old_M.size) < share, old_M + steps, old_M)


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    size=st.one_of(st.integers(1, 200), st.sampled_from([1023, 1024, 1025, 5000])),
    share=st.sampled_from([0.0, 0.002, 0.05, 0.5, 1.0]),
    kind=st.sampled_from(["any", "near", "special", "zeros", "equal"]),
)
def test_every_pair_comes_back_bit_for_bit(dtype: str, seed: int, size: int, share: float, kind: str) -> None:
    rng = np.random.default_rng(seed)
    old_M, new_M = bits_of(rng, dtype, size), bits_of(rng, dtype, size)
    if kind == "near":
        new_M = moved(rng, old_M, share)
    elif kind == "special":
        old_M, new_M = (rng.choice(specials(dtype), size) for _ in range(2))
    elif kind == "zeros":
        old_M = np.zeros_like(old_M)
    elif kind == "equal":
        old_M = np.full_like(old_M, old_M[0])
    check(old_M, np.where(rng.random(size) < share, new_M, old_M), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_step_between_special_values_is_exact(dtype: str) -> None:
    values = specials(dtype)
    check(np.repeat(values, values.size), np.tile(values, values.size), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("share", [0.001, 0.03, 1.0])
def test_whole_chunks(dtype: str, share: float) -> None:
    rng = np.random.default_rng(4)
    old_M = bits_of(rng, dtype, CHUNK_ELEMENTS)
    new_M = np.where(rng.random(old_M.size) < share, bits_of(rng, dtype, old_M.size), old_M)
    chunk = check(old_M, new_M, dtype)
    # Random bits have no short code: what is lost over them is bounded.
    assert len(chunk.payload) < chunk.changed * (LANE_BYTES[dtype] + 8) + 200


def test_changes_at_the_ends_of_blocks_and_of_the_chunk() -> None:
    rng = np.random.default_rng(5)
    for size in (1, BLOCK - 1, BLOCK, BLOCK + 1, 4 * BLOCK, 4 * BLOCK + 1, 5 * BLOCK - 1):
        old_M = bits_of(rng, "BF16", size)
        for at in {0, size - 1, min(size - 1, BLOCK - 1), min(size - 1, BLOCK)}:
            new_M = old_M.copy()
            new_M[at] ^= 1
            assert check(old_M, new_M, "BF16").changed == 1


def test_unaligned_and_read_only_memory() -> None:
    raw = np.random.default_rng(6).integers(0, 256, 2 * 1000 + 1, dtype=np.uint8).tobytes()
    old_M = np.frombuffer(raw, dtype="<u2", offset=1)
    new_M = np.array(old_M)
    new_M[::7] += np.uint16(1)
    check(old_M, new_M, "BF16")


def bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    bits = values.view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def gaussian_pair(size: int, move: float) -> tuple[NDArray[np.uint16], NDArray[np.uint16]]:
    """bf16 weights of deviation 0.02 before and after every one moved by about `move`."""
    rng = np.random.default_rng(7)
    w = (0.02 * rng.standard_normal(size)).astype(np.float32)
    return bf16(w), bf16((w + move * rng.standard_normal(size)).astype(np.float32))


def entropy_bytes(old_M: NDArray[np.uint16], new_M: NDArray[np.uint16]) -> float:
    """What changes, and by how much, given the old element's exponent: the limit of every such coder."""
    order = [
        np.where(x & 0x8000, 0xFFFF - x.astype(np.int64), x.astype(np.int64) | 0x8000) for x in (old_M, new_M)
    ]
    exponent, step = (old_M >> 7) & 255, order[1] - order[0]
    bits = 0.0
    for field in np.unique(exponent):
        _, counts = np.unique(step[exponent == field], return_counts=True)
        bits -= float((counts * np.log2(counts / counts.sum())).sum())
    return bits / 8


@pytest.mark.parametrize("move", [3e-7, 3e-6])
def test_near_the_limit_and_below_the_gap_coder(move: float) -> None:
    old_M, new_M = gaussian_pair(CHUNK_ELEMENTS, move)
    size = len(check(old_M, new_M, "BF16").payload)
    assert size <= 1.08 * entropy_bytes(old_M, new_M)
    assert size < 0.85 * len(GapEncoder().encode(old_M, new_M, "BF16").payload)


GOLDEN = "7408cdeaa7a682d4548e45c5382519616a9ba2248740c361ec929a8617a3fa5e2a72f72b43201f1402b9acf19833333313"


def test_a_stream_that_was_written_once_is_read_for_ever() -> None:
    i = np.arange(400)
    old_M = (0x3A00 + (i * i * 37) % 1400 + ((i % 3 == 0) << 15)).astype("<u2")
    new_M = np.where(i % 11 == 3, old_M + np.where(i % 5 == 0, 8, 1), old_M).astype("<u2")
    assert np.array_equal(decoded(old_M, "BF16", EncodedChunk(37, bytes.fromhex(GOLDEN))), new_M)


class Bits:
    """The stream as the documentation words it: one bit after the other, from each byte's lowest."""

    def __init__(self, payload: bytes) -> None:
        self._bits = [(byte >> k) & 1 for byte in payload for k in range(8)]
        self.at = 0

    def take(self, count: int) -> int:
        value = sum(bit << k for k, bit in enumerate(self._bits[self.at : self.at + count]))
        self.at += count
        return value

    def golomb(self, order: int) -> int:
        size = 0
        while not self.take(1):
            size += 1
        high = (1 << size) | self.take(size)
        return ((high - 1) << order) | self.take(order)

    def rice(self, k: int, escape_bits: int) -> int:
        q = 0
        while q < 16 and self.take(1):
            q += 1
        return self.take(escape_bits) if q == 16 else (q << k) | self.take(k)


def unzigzag(x: int) -> int:
    return -(x + 1) // 2 if x & 1 else x // 2


def read_plainly(old_M: NDArray[Any], dtype: str, payload: bytes) -> dict[int, int]:
    """A reader without any of the kernels: position -> new bits."""
    exponent_bits, mantissa_bits = LAYOUTS[dtype]
    width = 1 + exponent_bits + mantissa_bits
    sign, mask = 1 << (width - 1), (1 << width) - 1
    bits = Bits(payload)
    e = bits.take(11)
    field = [(int(x) >> mantissa_bits) & ((1 << exponent_bits) - 1) for x in old_M]
    members: list[list[int]] = [[] for _ in range(CLASSES)]
    for i, f in enumerate(field):
        members[min(max(f - e + 1, 0), CLASSES - 1)].append(i)
    found: dict[int, tuple[int, bool, int]] = {}  # position -> sign, wide, class
    count, k, parameters = 0, 0, [0] * CLASSES
    for c in range(CLASSES):
        count += unzigzag(bits.golomb(4))
        if not count:
            continue
        k += 1 + unzigzag(bits.golomb(0))
        wide = bits.golomb(0)
        r = 0
        if wide:
            r, parameters[c] = bits.golomb(0), bits.golomb(0)
        rank, own = -1, []
        for _ in range(count):
            rank += bits.rice(k, 20) + 1
            own.append((members[c][rank], bits.take(1)))
        marked, place = set(), -1
        for _ in range(wide):
            place += bits.rice(r, 20) + 1
            marked.add(place)
        found.update({p: (down, i in marked, c) for i, (p, down) in enumerate(own)})
    new: dict[int, int] = {}
    for position in sorted(found):
        down, far, c = found[position]
        magnitude = 1
        if far:
            m = parameters[c] + (max(e - 1 - max(field[position], 1), 0) if c == 0 else 0)
            magnitude = 2 + bits.rice(min(m, width - 1), width)
        old = int(old_M[position])
        place = (~old & mask if old & sign else old | sign) + (-magnitude if down else magnitude)
        place &= mask
        new[position] = place ^ sign if place & sign else ~place & mask
    assert len(payload) == -(-bits.at // 8)
    return new


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_plain_reader_of_the_documented_stream_agrees(dtype: str) -> None:
    rng = np.random.default_rng(8)
    for old_M, new_M in (
        (x := bits_of(rng, dtype, 700), moved(rng, x, 0.1, 9)),
        (x := np.sort(bits_of(rng, dtype, 300)), bits_of(rng, dtype, 300)),
    ):
        chunk = check(old_M, new_M, dtype)
        changed = np.flatnonzero(old_M != new_M)
        assert read_plainly(old_M, dtype, chunk.payload) == {int(i): int(new_M[i]) for i in changed}


def try_to_decode(base_M: NDArray[Any], dtype: str, payload: bytes, changed: int) -> int:
    positions_N, new_N = np.empty(changed, np.uint32), np.empty(changed, base_M.dtype)
    status = decode_context(base_M, dtype, np.frombuffer(payload, np.uint8), positions_N, new_N)
    assert status in STATUSES
    if status == OK and changed:
        assert np.all(np.diff(positions_N.astype(np.int64)) > 0)
        assert positions_N[-1] < base_M.size
        assert np.all(base_M[positions_N] != new_N)
    return status


@pytest.mark.parametrize("dtype", ["F8_E4M3", "BF16", "F32"])
def test_every_damaged_byte_and_every_cut_is_survived(dtype: str) -> None:
    rng = np.random.default_rng(9)
    old_M = bits_of(rng, dtype, 2000)
    chunk = check(old_M, moved(rng, old_M, 0.05, 5), dtype)
    for at in range(len(chunk.payload)):
        assert try_to_decode(old_M, dtype, chunk.payload[:at], chunk.changed) != OK
        for flip in (1, 0x80, 0xFF):
            damaged = bytearray(chunk.payload)
            damaged[at] ^= flip
            try_to_decode(old_M, dtype, bytes(damaged), chunk.changed)
    assert try_to_decode(old_M, dtype, chunk.payload + b"\0", chunk.changed) == context.CUT
    for changed in (0, 1, chunk.changed - 1, chunk.changed + 1, 10 * chunk.changed):
        assert try_to_decode(old_M, dtype, chunk.payload, changed) != OK


@settings(max_examples=400, deadline=None)
@given(
    payload=st.binary(max_size=300),
    changed=st.integers(0, 3000),
    size=st.integers(1, 2000),
    seed=st.integers(0, 99),
    dtype=st.sampled_from(DTYPES),
)
def test_any_bytes_are_survived(payload: bytes, changed: int, size: int, seed: int, dtype: str) -> None:
    try_to_decode(bits_of(np.random.default_rng(seed), dtype, size), dtype, payload, changed)


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32), size=st.integers(1, 3000))
def test_another_base_is_survived(seed: int, size: int) -> None:
    rng = np.random.default_rng(seed)
    old_M = bits_of(rng, "BF16", 1500)
    chunk = check(old_M, moved(rng, old_M, 0.1), "BF16")
    try_to_decode(bits_of(rng, "BF16", size), "BF16", chunk.payload, chunk.changed)


def test_c81_threads_encode_and_decode_side_by_side() -> None:
    pairs = [gaussian_pair(50_000, move) for move in (1e-7, 3e-7, 1e-6, 3e-6)] * 4
    wanted = [encoder.encode(old_M, new_M, "BF16") for old_M, new_M in pairs]

    def work(number: int) -> bool:
        old_M, new_M = pairs[number]
        chunk = ContextEncoder().encode(old_M, new_M, "BF16")
        return chunk == wanted[number] and np.array_equal(decoded(old_M, "BF16", chunk), new_M)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(len(pairs))))


@jit()
def _count_and_mask(array: Any, at: int, thresholds: Any, left: Any) -> Any:
    return pass_block(array, at, thresholds, left), at_least(array, at, thresholds[3]), due_classes(left)


@pytest.mark.parametrize("lane", [1, 2, 4, 8])
def test_masks_of_octaves_are_those_of_a_comparison_of_each_element(lane: int) -> None:
    rng = np.random.default_rng(10)
    array = rng.integers(0, 256, 200 * lane, dtype=np.uint8).view(f"<u{lane}")
    thresholds = np.sort(rng.integers(0, 1 << (8 * lane - 1), CLASSES - 1, dtype=np.uint64))
    magnitudes = array.astype(np.uint64) & np.uint64((1 << (8 * lane - 1)) - 1)
    for at in (0, 1, 7, 100, 200 - BLOCK):
        left = rng.integers(0, 12, CLASSES)
        block = magnitudes[at : at + BLOCK]
        counts = np.bincount(np.searchsorted(thresholds, block, side="right"), minlength=CLASSES)
        expected = left - counts
        below, mask, due = _count_and_mask(array, at, thresholds, left)
        assert np.array_equal(left, expected)
        assert (below < 0) == bool(np.any(expected < 0))
        assert int(due) == sum(1 << c for c in np.flatnonzero(expected < 0).tolist())
        assert int(mask) == sum(int(x >= thresholds[3]) << k for k, x in enumerate(block))


@settings(max_examples=200, deadline=None)
@given(bits=st.integers(1, 2**64 - 1), data=st.data())
def test_the_nth_set_bit(bits: int, data: st.DataObject) -> None:
    places = [k for k in range(64) if bits >> k & 1]
    n = data.draw(st.integers(0, len(places) - 1))
    for pick in (nth_set, nth_set_by_halves):
        assert int(pick(np.uint64(bits), n)) == 1 << places[n]
