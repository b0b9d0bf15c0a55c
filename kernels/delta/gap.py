"""The gap coder: positions of changed elements as gaps, changes as signed steps, in one bit stream a chunk.

    head     5 bits g, 5 bits e, 6 bits m: the parameters below
    count    E + 1 in Elias' gamma code; E = exceptions, the changes by more than one step
    changes  for each: the gap in Rice code with parameter g, then one bit, 1 = downwards.
             The gap is the number of unchanged elements since the last changed one, or since the chunk's start
    excess   for each exception: the number of changes since the last exception, in Rice code with parameter e, then
             |step| - 2 in exponential Golomb code of order m

A step is `new - old` modulo 2^(8 lane), read as a signed number, and never 0. `old` and `new` are the elements' bits, for
floating-point dtypes as sign-ordered integers, so that neighbours differ by 1 ULP across 0 as well: bits with the sign bit
set are inverted, others get their sign bit set. Every mapping is a bijection on bit patterns: -0.0 and NaN payloads are exact,
and a delta runs backwards by subtracting. Steps add up, so deltas compose without either state.

    Rice, k          q ones (q = x >> k) and a zero, then the k low bits of x; from q = 16 on: 16 ones and x in 18 bits
    Elias' gamma     n - 1 zeros, then the n bits of x from the highest, which is 1: written as the 1, then the low n - 1 bits
    exp. Golomb, k   (x >> k) + 1 in Elias' gamma, then the k low bits of x

Parameters are the chunk's own, and the encoder's choice. Bits fill bytes from the lowest; the last byte ends in zeros.

Legend: N changed elements, M elements of a chunk, W 64-bit words.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollwire.kernels.bits import peek, trailing_zeros
from rollwire.kernels.delta.changes import gather
from rollwire.kernels.delta.format import FLOATS
from rollwire.kernels.delta.gap_write import WORST_WORDS, diff_lanes, pack_lanes
from rollwire.kernels.digest import jit, lanes, plain
from rollwire.kernels.memory import address_of
from rollwire.kernels.tensors import CHUNK_ELEMENTS, LANE_BYTES

OK: Final = 0
OUT_OF_RANGE: Final = 1  # a changed element lies beyond the chunk
NO_CHANGE: Final = 2  # a changed element does not change
CUT: Final = 3  # the stream ends before its changes do, or goes on after them
BAD_PARAMETER: Final = 4  # a parameter or a count that no encoder writes

_HEAD_BITS: Final = 16

_U0, _U1, _U2, _U63, _U16, _U18 = (np.uint64(n) for n in (0, 1, 2, 63, 16, 18))


class EncodedChunk(NamedTuple):
    changed: int
    payload: bytes


class Diff(NamedTuple):
    """Changed elements of a chunk, in scratch: valid until the next diff of this encoder. Elements fill 64 bits."""

    positions_N: NDArray[np.uint32]  # in the chunk, ascending
    old_N: NDArray[np.uint64]
    new_N: NDArray[np.uint64]


@jit()
def steps_lanes(
    old_N: NDArray[np.uint64], new_N: NDArray[np.uint64], lane: int, floats: bool, steps_N: NDArray[np.uint64]
) -> None:
    width = np.uint64(8 * lane)
    mask = ~_U0 if lane == 8 else (_U1 << width) - _U1
    sign = _U1 << (width - _U1)
    if floats:
        for n in range(old_N.size):
            steps_N[n] = (ordered(new_N[n], sign, mask) - ordered(old_N[n], sign, mask)) & mask
    else:
        for n in range(old_N.size):
            steps_N[n] = (new_N[n] - old_N[n]) & mask


@jit()
def ordered(bits: np.uint64, sign: np.uint64, mask: np.uint64) -> np.uint64:
    flip = mask if bits & sign else sign
    return bits ^ flip


@jit()
def unordered(value: np.uint64, sign: np.uint64, mask: np.uint64) -> np.uint64:
    flip = sign if value & sign else mask
    return value ^ flip


@jit()
def parse_lanes(
    payload: NDArray[np.uint8],
    elements: int,
    lane: int,
    positions_N: NDArray[np.uint32],
    steps_N: NDArray[Any],
) -> int:
    """Reads a chunk's stream: positions and steps. Never reads beyond `payload`, whatever it holds."""
    # A private copy in words with zeros behind: a symbol may run past the end, which is noticed after it.
    words = np.zeros(payload.size // 8 + 5, np.uint64)
    for i in range(payload.size >> 3):
        word = _U0
        for k in range(8):
            word |= np.uint64(payload[8 * i + k]) << np.uint64(8 * k)
        words[i] = word
    for i in range(payload.size & ~7, payload.size):
        words[i >> 3] |= np.uint64(payload[i]) << np.uint64(8 * (i & 7))
    end = np.uint64(8 * payload.size)
    if end < np.uint64(_HEAD_BITS + 1):
        return CUT
    width = np.uint64(8 * lane)
    mask = ~_U0 if lane == 8 else (_U1 << width) - _U1
    g, e, m = (
        words[0] & np.uint64(31),
        (words[0] >> np.uint64(5)) & np.uint64(31),
        (words[0] >> np.uint64(10)) & _U63,
    )
    if g > np.uint64(17) or e > np.uint64(17) or m >= width:
        return BAD_PARAMETER
    window = peek(words, _U16)
    low_bits = trailing_zeros(window)
    if low_bits > _U18:
        return BAD_PARAMETER
    exceptions = np.int64((_U1 << low_bits) | ((window >> (low_bits + _U1)) & ((_U1 << low_bits) - _U1))) - 1
    at = _U16 + low_bits + low_bits + _U1
    if exceptions > positions_N.size or at > end:
        return BAD_PARAMETER
    size = np.int64(elements)
    low_mask = (_U1 << g) - _U1
    position = np.int64(-1)
    for n in range(positions_N.size):
        window = peek(words, at)
        q = trailing_zeros(~window)
        if q < _U16:
            window >>= q + _U1
            gap = (q << g) | (window & low_mask)
            window >>= g
            at += q + g + _U2
        else:
            gap = (window >> _U16) & np.uint64((1 << 18) - 1)
            window >>= np.uint64(34)
            at += np.uint64(35)
        if at > end:
            return CUT
        position += np.int64(gap) + 1
        if position >= size:
            return OUT_OF_RANGE
        positions_N[n] = position
        steps_N[n] = mask if window & _U1 else _U1
    low_mask = (_U1 << e) - _U1
    rank = np.int64(-1)
    for _ in range(exceptions):
        window = peek(words, at)
        q = trailing_zeros(~window)
        if q < _U16:
            gap = (q << e) | ((window >> (q + _U1)) & low_mask)
            at += q + e + _U1
        else:
            gap = (window >> _U16) & np.uint64((1 << 18) - 1)
            at += np.uint64(34)
        if at > end:
            return CUT
        rank += np.int64(gap) + 1
        if rank >= positions_N.size:
            return OUT_OF_RANGE
        low_bits = trailing_zeros(peek(words, at))
        if low_bits > _U63:
            return CUT
        at += low_bits + _U1
        if at > end:
            return CUT
        high = (_U1 << low_bits) | (peek(words, at) & ((_U1 << low_bits) - _U1))
        at += low_bits
        if at > end:
            return CUT
        excess = ((high - _U1) << m) | (peek(words, at) & ((_U1 << m) - _U1))
        at += m
        if at > end or low_bits + m > width:
            return CUT
        magnitude = (excess + _U2) & mask
        if magnitude == _U0:
            return NO_CHANGE
        steps_N[rank] = ((~magnitude + _U1) & mask) if np.uint64(steps_N[rank]) == mask else magnitude
    return OK if end - at < np.uint64(8) else CUT


@jit()
def follow_steps(
    old_N: NDArray[Any], lane: int, floats: bool, backwards: bool, steps_N: NDArray[Any]
) -> None:
    """Turns steps into the elements that they lead to, in place."""
    width = np.uint64(8 * lane)
    mask = ~_U0 if lane == 8 else (_U1 << width) - _U1
    sign = _U1 << (width - _U1)
    turn = ~_U0 if backwards else _U0  # -x is ~x + 1
    if floats:
        for n in range(old_N.size):
            step = (np.uint64(steps_N[n]) ^ turn) - turn
            steps_N[n] = unordered((ordered(np.uint64(old_N[n]), sign, mask) + step) & mask, sign, mask)
    else:
        for n in range(old_N.size):
            step = (np.uint64(steps_N[n]) ^ turn) - turn
            steps_N[n] = (np.uint64(old_N[n]) + step) & mask


@cache
def _diff_kernel() -> Callable[..., Any]:
    u4, u8 = lanes(4, readonly=False), lanes(8, readonly=False)
    return jit(f"int64({lanes(8)}, {lanes(8)}, uint64, uint64, int64, {u4}, {u4}, {u8}, {u8})")(
        plain(diff_lanes)
    )


@cache
def _steps_kernel() -> Callable[..., Any]:
    return jit(f"void({lanes(8)}, {lanes(8)}, int64, boolean, {lanes(8, readonly=False)})")(
        plain(steps_lanes)
    )


@cache
def _pack_kernel() -> Callable[..., Any]:
    u4 = lanes(4, readonly=False)
    return jit(f"uint64({lanes(4)}, {lanes(8)}, int64, {u4}, {u4}, {lanes(8, readonly=False)})")(
        plain(pack_lanes)
    )


@cache
def _parse_kernel(lane: int) -> Callable[..., Any]:
    return jit(f"int64({lanes(1)}, int64, int64, {lanes(4, readonly=False)}, {lanes(lane, readonly=False)})")(
        plain(parse_lanes)
    )


@cache
def _follow_kernel(lane: int) -> Callable[..., Any]:
    return jit(f"void({lanes(lane)}, int64, boolean, boolean, {lanes(lane, readonly=False)})")(
        plain(follow_steps)
    )


def words_of(bits_M: NDArray[Any]) -> NDArray[np.uint64]:
    """The lanes as 64-bit words, the last one filled up with zeros (equal on both sides: never a change)."""
    per_word = 8 // bits_M.dtype.itemsize
    if bits_M.size % per_word or not bits_M.flags.c_contiguous or address_of(bits_M) % 8:
        padded = np.zeros(-(-bits_M.size // per_word) * per_word, dtype=bits_M.dtype)
        padded[: bits_M.size] = bits_M
        bits_M = padded
    return bits_M.view(np.uint64)


class GapEncoder:
    """Scratch for one chunk at a time: 14 MiB, of which only touched pages cost memory. One a thread."""

    def __init__(self) -> None:
        self._found, self._positions, self._ranks, self._numbers = np.empty(
            (4, CHUNK_ELEMENTS + 8), dtype=np.uint32
        )
        self._old, self._new, self._steps = np.empty((3, CHUNK_ELEMENTS), dtype=np.uint64)
        self._words = np.empty(WORST_WORDS, dtype=np.uint64)

    def diff(self, old_M: NDArray[Any], new_M: NDArray[Any]) -> Diff:
        """What differs between two chunks of equal lanes."""
        n = _diff_kernel()(
            words_of(old_M),
            words_of(new_M),
            0,
            0,
            old_M.dtype.itemsize,
            self._found,
            self._positions,
            self._old,
            self._new,
        )
        return Diff(self._positions[:n], self._old[:n], self._new[:n])

    def pack(self, diff: Diff, dtype: str) -> bytes:
        """The payload of these changes; at least one."""
        lane = LANE_BYTES[dtype]
        steps_N = self._steps[: diff.old_N.size]
        _steps_kernel()(diff.old_N, diff.new_N, lane, dtype in FLOATS, steps_N)
        return self.pack_steps(diff.positions_N, steps_N, lane)

    def pack_steps(self, positions_N: NDArray[np.uint32], steps_N: NDArray[np.uint64], lane: int) -> bytes:
        """The payload of these steps, none of them 0, in order of position; at least one."""
        bits = int(_pack_kernel()(positions_N, steps_N, lane, self._ranks, self._numbers, self._words))
        return self._words[: bits // 64 + 1].view(np.uint8)[: -(-bits // 8)].tobytes()

    def encode(self, old_M: NDArray[Any], new_M: NDArray[Any], dtype: str) -> EncodedChunk:
        """Two chunks of at most `CHUNK_ELEMENTS` lanes of `dtype`. The payload of equal ones is empty."""
        diff = self.diff(old_M, new_M)
        return EncodedChunk(diff.positions_N.size, self.pack(diff, dtype) if diff.positions_N.size else b"")


def parse_gap(
    payload: NDArray[np.uint8], elements: int, positions_N: NDArray[np.uint32], steps_N: NDArray[Any]
) -> int:
    """A payload's positions and steps, without either state; N is the number of changes. Returns a status.

    `steps_N`: lanes of the chunk's dtype. The content of both outputs is undefined on any status but `OK`.
    """
    lane = steps_N.dtype.itemsize
    return int(_parse_kernel(lane)(payload, elements, lane, positions_N, steps_N))


def decode_gap(
    base_M: NDArray[Any],
    dtype: str,
    payload: NDArray[np.uint8],
    positions_N: NDArray[np.uint32],
    new_N: NDArray[Any],
    *,
    backwards: bool = False,
) -> int:
    """The changed positions of a chunk and the elements there after the delta, from the chunk `base_M` before it.

    `backwards`: from the chunk after it to the elements before. Outputs have the length of the stated number of
    changes; returns a status, and on any but `OK` they are undefined. Reads and writes stay within the arrays, whatever
    the payload holds.
    """
    status = parse_gap(payload, base_M.size, positions_N, new_N)
    if status == OK:
        old_N = np.empty_like(new_N)
        gather(base_M, positions_N, old_N)
        _follow_kernel(old_N.dtype.itemsize)(old_N, old_N.dtype.itemsize, dtype in FLOATS, backwards, new_N)
    return status
