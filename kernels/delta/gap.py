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

Rice's parameters are the best of the chunk by exact count. Bits fill bytes from the lowest; the last byte ends in zeros.

Legend: N changed elements, M elements of a chunk, W 64-bit words.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollwire.kernels.bits import bit_length, peek, put, trailing_zeros
from rollwire.kernels.delta.changes import gather
from rollwire.kernels.delta.format import FLOATS
from rollwire.kernels.digest import jit, lanes, plain
from rollwire.kernels.tensors import CHUNK_ELEMENTS, LANE_BYTES

OK: Final = 0
OUT_OF_RANGE: Final = 1  # a changed element lies beyond the chunk
NO_CHANGE: Final = 2  # a changed element does not change
CUT: Final = 3  # the stream ends before its changes do, or goes on after them
BAD_PARAMETER: Final = 4  # a parameter or a count that no encoder writes

POSITION_BITS: Final = CHUNK_ELEMENTS.bit_length() - 1
_ESCAPE: Final = 16
_HEAD_BITS: Final = 16
# At most: gap 34, sign 1, exception's gap 34, excess 129, a change; head and count.
WORST_WORDS: Final = CHUNK_ELEMENTS * 200 // 64 + 16

_U0, _U1, _U2, _U6, _U63, _U64 = (np.uint64(n) for n in (0, 1, 2, 6, 63, 64))
_U16, _U18, _U32 = np.uint64(16), np.uint64(18), np.uint64(32)
_ONES = np.uint64(0xFFFF)


class EncodedChunk(NamedTuple):
    changed: int
    payload: bytes


class Diff(NamedTuple):
    """Changed elements of a chunk, in scratch: valid until the next diff of this encoder. Elements fill 64 bits."""

    positions_N: NDArray[np.uint32]  # in the chunk, ascending
    old_N: NDArray[np.uint64]
    new_N: NDArray[np.uint64]


@jit()
def diff_lanes(
    old_W: NDArray[np.uint64],
    new_W: NDArray[np.uint64],
    old_tail: np.uint64,
    new_tail: np.uint64,
    lane: int,
    words: NDArray[np.uint32],
    positions: NDArray[np.uint32],
    old: NDArray[np.uint64],
    new: NDArray[np.uint64],
) -> int:
    """Collects changed words without a branch, which runs at the memory's speed, then the changed lanes in them.

    Tails: the elements that fill no whole word, with zeros behind.
    """
    found = 0
    for word in range(old_W.size):
        words[found] = word
        found += old_W[word] != new_W[word]
    words[found] = old_W.size
    width = np.uint64(8 * lane)
    mask = ~_U0 if lane == 8 else (_U1 << width) - _U1
    log_width = bit_length(width) - _U1
    per_word = np.uint64(8 // lane)
    n = 0
    for i in range(found + 1):
        word = int(words[i])
        a, b = old_tail, new_tail
        if i < found:
            a, b = old_W[word], new_W[word]
        left = a ^ b
        first = np.uint64(word) * per_word
        while left:
            place = trailing_zeros(left) >> log_width
            shift = place << log_width
            left &= ~(mask << shift)
            positions[n] = first + place
            old[n] = (a >> shift) & mask
            new[n] = (b >> shift) & mask
            n += 1
    return n


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
def best_rice(numbers_N: NDArray[np.uint32], count: int) -> np.uint64:
    """The Rice parameter that codes the first `count` of these numbers in the fewest bits, found downhill from their mean."""
    total = _U0
    for n in range(count):
        total += np.uint64(numbers_N[n])
    mean = total // np.uint64(count)
    parameter = min(bit_length(mean), np.uint64(POSITION_BITS - 1))
    best = _rice_bits(numbers_N, count, parameter)
    while parameter > _U0:
        cost = _rice_bits(numbers_N, count, parameter - _U1)
        if cost > best:
            break
        best, parameter = cost, parameter - _U1
    return parameter


@jit()
def _rice_bits(numbers_N: NDArray[np.uint32], count: int, k: np.uint64) -> np.uint64:
    # An escape costs 34 bits, counted as 17 + k: near enough, since it is rare where k is good.
    cost = np.uint64(count) * (k + _U1)
    for n in range(count):
        cost += min(np.uint64(numbers_N[n]) >> k, _U16)
    return cost


@jit()
def put_rice(words: NDArray[np.uint64], at: np.uint64, x: np.uint64, k: np.uint64) -> np.uint64:
    q = x >> k
    if q < _U16:
        low = x & ((_U1 << k) - _U1)
        return put(words, at, ((_U1 << q) - _U1) | (low << (q + _U1)), q + _U1 + k)
    return put(words, at, _ONES | (x << _U16), _U16 + _U18)


@jit()
def put_gamma(words: NDArray[np.uint64], at: np.uint64, x: np.uint64) -> np.uint64:
    """x >= 1."""
    low_bits: np.uint64 = bit_length(x) - _U1
    at = put(words, at, _U0, low_bits & _U32)
    at = put(words, at, _U1 << (low_bits & np.uint64(31)), (low_bits & np.uint64(31)) + _U1)
    at = put_bits(words, at, x & ((_U1 << low_bits) - _U1), low_bits)
    return at  # noqa: RET504  # typed here: compiled helpers are not


@jit()
def put_bits(words: NDArray[np.uint64], at: np.uint64, x: np.uint64, count: np.uint64) -> np.uint64:
    """Up to 64 bits."""
    if count > _U32:
        at = put(words, at, x & np.uint64(0xFFFFFFFF), _U32)
        return put(words, at, x >> _U32, count - _U32)
    return put(words, at, x, count)


@jit()
def pack_lanes(
    positions_N: NDArray[np.uint32],
    steps_N: NDArray[np.uint64],
    lane: int,
    ranks: NDArray[np.uint32],
    numbers: NDArray[np.uint32],
    words: NDArray[np.uint64],
) -> np.uint64:
    """Writes a chunk's stream into `words`; returns its length in bits. `ranks`, `numbers`: scratch of N."""
    width = np.uint64(8 * lane)
    mask = ~_U0 if lane == 8 else (_U1 << width) - _U1
    sign = _U1 << (width - _U1)
    size = positions_N.size
    exceptions = 0
    for n in range(size):
        ranks[exceptions] = n
        exceptions += (steps_N[n] != _U1) & (steps_N[n] != mask)
    e, m = _U0, _U0
    if exceptions:
        numbers[0] = ranks[0]
        for n in range(1, exceptions):
            numbers[n] = ranks[n] - ranks[n - 1] - 1
        e = best_rice(numbers, exceptions)
        m = _best_order(ranks, exceptions, steps_N, sign, mask)
    numbers[0] = positions_N[0]
    for n in range(1, size):
        numbers[n] = positions_N[n] - positions_N[n - 1] - 1
    g = best_rice(numbers, size)
    words[0] = g | (e << np.uint64(5)) | (m << np.uint64(10))
    at: np.uint64 = put_gamma(words, _U16, np.uint64(exceptions + 1))
    at = _put_changes(words, at, numbers, size, steps_N, sign, g)
    if exceptions:
        at = _put_exceptions(words, at, ranks, exceptions, steps_N, sign, mask, e, m)
    return at


@jit()
def _excess(step: np.uint64, sign: np.uint64, mask: np.uint64) -> np.uint64:
    """|step| - 2"""
    return (((~step + _U1) & mask) if step & sign else step) - _U2


@jit()
def _best_order(
    ranks: NDArray[np.uint32], count: int, steps_N: NDArray[np.uint64], sign: np.uint64, mask: np.uint64
) -> np.uint64:
    """The order of the exponential Golomb code, from how many numbers have how many bits."""
    lengths = np.zeros(65, np.int64)
    longest = 0
    for i in range(count):
        bits = int(bit_length(_excess(steps_N[ranks[i]], sign, mask)))
        lengths[bits] += 1
        longest = max(longest, bits)
    best, order = np.int64(1) << 62, _U0
    for k in range(min(longest + 1, 64)):
        cost = np.int64(0)
        for b in range(longest + 1):
            cost += lengths[b] * (max(k, b) + max(0, b - k))
        if cost < best:
            best, order = cost, np.uint64(k)
    return order


@jit()
def _put_changes(
    words: NDArray[np.uint64],
    at: np.uint64,
    gaps: NDArray[np.uint32],
    count: int,
    steps_N: NDArray[np.uint64],
    sign: np.uint64,
    g: np.uint64,
) -> np.uint64:
    """The gaps and signs: as `put_rice` and `put` one after the other, with the open word in a register."""
    word, fill = at >> _U6, at & _U63
    pending = words[word] & ((_U1 << fill) - _U1)
    low_mask = (_U1 << g) - _U1
    for n in range(count):
        gap = np.uint64(gaps[n])
        down = _U1 if steps_N[n] & sign else _U0
        q = gap >> g
        if q < _U16:
            count_n = q + g + _U2
            symbol = (((_U1 << q) - _U1) | ((gap & low_mask) << (q + _U1))) | (down << (q + g + _U1))
        else:
            count_n = np.uint64(35)
            symbol = (_ONES | (gap << _U16)) | (down << np.uint64(34))
        pending |= symbol << fill
        end = fill + count_n
        if end >= _U64:
            words[word] = pending
            word += _U1
            pending = (symbol >> (_U63 - fill)) >> _U1
        fill = end & _U63
    words[word] = pending
    return (word << _U6) | fill


@jit()
def _push(
    words: NDArray[np.uint64],
    word: np.uint64,
    pending: np.uint64,
    fill: np.uint64,
    symbol: np.uint64,
    count: np.uint64,
) -> tuple[np.uint64, np.uint64, np.uint64]:
    """As `put`, with the open word in a register: (word, pending, fill) after it. Up to 63 bits."""
    pending |= symbol << fill
    end = fill + count
    if end >= _U64:
        words[word] = pending
        word += _U1
        pending = (symbol >> (_U63 - fill)) >> _U1
    return word, pending, end & _U63


@jit()
def _put_exceptions(
    words: NDArray[np.uint64],
    at: np.uint64,
    ranks: NDArray[np.uint32],
    count: int,
    steps_N: NDArray[np.uint64],
    sign: np.uint64,
    mask: np.uint64,
    e: np.uint64,
    m: np.uint64,
) -> np.uint64:
    word, fill = at >> _U6, at & _U63
    pending = words[word] & ((_U1 << fill) - _U1)
    low_e, low_m = (_U1 << e) - _U1, (_U1 << m) - _U1
    following = 0
    for i in range(count):
        rank = int(ranks[i])
        gap = np.uint64(rank - following)
        following = rank + 1
        q = gap >> e
        if q < _U16:
            symbol = ((_U1 << q) - _U1) | ((gap & low_e) << (q + _U1))
            word, pending, fill = _push(words, word, pending, fill, symbol, q + _U1 + e)
        else:
            word, pending, fill = _push(words, word, pending, fill, _ONES | (gap << _U16), np.uint64(34))
        excess = _excess(steps_N[rank], sign, mask)
        high = (excess >> m) + _U1
        n = bit_length(high) - _U1
        if n + n + m < np.uint64(57):
            symbol = (
                (_U1 << n) | ((high & ((_U1 << n) - _U1)) << (n + _U1)) | ((excess & low_m) << (n + n + _U1))
            )
            word, pending, fill = _push(words, word, pending, fill, symbol, n + n + _U1 + m)
        else:
            words[word] = pending
            after = put_gamma(words, (word << _U6) | fill, high)
            after = put_bits(words, after, excess & low_m, m)
            word, fill = after >> _U6, after & _U63
            pending = words[word] & ((_U1 << fill) - _U1)
    words[word] = pending
    return (word << _U6) | fill


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
    if bits_M.size % per_word or bits_M.ctypes.data % 8:
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
