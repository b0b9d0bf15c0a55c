"""Writes the gap coder's stream (`gap` documents it): finds what differs, chooses the parameters, packs the bits.

Legend: N changed elements, W 64-bit words.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from rollwire.kernels.bits import bit_length, put, trailing_zeros
from rollwire.kernels.digest import jit
from rollwire.kernels.tensors import CHUNK_ELEMENTS

POSITION_BITS: Final = CHUNK_ELEMENTS.bit_length() - 1
# At most: gap 34, sign 1, exception's gap 34, excess 129, a change; head and count.
WORST_WORDS: Final = CHUNK_ELEMENTS * 200 // 64 + 16

_U0, _U1, _U2, _U6, _U63, _U64 = (np.uint64(n) for n in (0, 1, 2, 6, 63, 64))
_U16, _U18, _U32 = np.uint64(16), np.uint64(18), np.uint64(32)
_ONES = np.uint64(0xFFFF)


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
    words[word] = pending
    end = fill + count
    full = end >> _U6
    # Without a branch, which nothing could foretell.
    pending = (pending & (full - _U1)) | (((symbol >> (_U63 - fill)) >> _U1) & (_U0 - full))
    return word + full, pending, end & _U63


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
        word, pending, fill = _push(words, word, pending, fill, symbol, count_n)
    words[word] = pending
    return (word << _U6) | fill


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
