"""The context coder: an element's chance to change follows from its own exponent, which the receiver has.

A step of the optimiser is about as long for small weights as for large ones, a step between neighbouring numbers is not:
so elements are classed by the octave of |old| (12 classes: below 2^e, ten octaves from there, and the rest), and each
class codes the gaps between its changes, counted in elements of the class, with a Golomb-Rice parameter of its own. No
tables of statistics: a chunk of a few changes costs a few bytes. One bit stream a chunk:

    e         11 bits: the exponent field below which class 0 lies. Class c ends below e + c
    for each class c:
      changes   n: zigzag(n - n of the class before) in exponential Golomb code of order 4
      and, where n > 0:
      k         zigzag(k - k of the last such class - 1) + 1 in Elias' gamma code
      x         E, the changes by more than one step, in exponential Golomb code of order 0; where E > 0 then two
                parameters r and m, each + 1 in Elias' gamma code
      gaps      n times: unchanged elements of the class before this one, in Rice code of parameter k; 1 bit, 1 = downwards
      marks     E times: the class's changes by one step before this one, in Rice code of parameter r
    excess    of each change by more than one step, by position: |step| - 2 in Rice code of its class's parameter m, in class 0
              plus the octaves between |old| and e

Steps, their signs and the order of bits are those of the gap coder (`gap`): sign-ordered integers, so +0 to -0 is a step
of 1, and NaN payloads are exact. The element before the delta is needed to read one, so a context delta runs one way only.

    Rice, k          q ones (q = x >> k) and a zero, then the k low bits of x; from q = 16 on 16 ones, and x in 20 bits,
                     an excess in as many as an element has

Legend: N changed elements, M elements of a chunk, C classes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rollwire.kernels.bits import bit_length, peek, put, trailing_zeros
from rollwire.kernels.delta.gap import EncodedChunk, GapEncoder, ordered, unordered
from rollwire.kernels.delta.octaves import BLOCK, CLASSES, at_least, pass_block, popcount
from rollwire.kernels.digest import aligned, jit, lanes
from rollwire.kernels.tensors import CHUNK_ELEMENTS

# Scalars of compiled code: their width is the signatures' and not the type checkers' business.
_Int: TypeAlias = Any  # int64
_Word: TypeAlias = Any  # uint64

OK: Final = 0
OUT_OF_RANGE: Final = 1  # a changed element lies beyond the chunk
NO_CHANGE: Final = 2  # a changed element does not change
CUT: Final = 3  # the stream ends before its changes do, or goes on after them
BAD_PARAMETER: Final = 4  # a parameter or a count that no encoder writes

# Bits of the exponent and of the mantissa.
LAYOUTS: Final[dict[str, tuple[int, int]]] = {
    "F8_E4M3": (4, 3),
    "F8_E5M2": (5, 2),
    "F16": (5, 10),
    "BF16": (8, 7),
    "F32": (8, 23),
    "F64": (11, 52),
}

_E_BITS, _ESCAPE_BITS, _FIRST_ORDER = np.uint64(11), np.uint64(20), np.uint64(4)
_MAX_PARAMETER = np.uint64(20)
# At most, a change: gap 36, sign 1, mark 36, excess 16 + 64; and 12 heads of five numbers below 64 bits.
_WORDS: Final = CHUNK_ELEMENTS * 160 // 64 + 64
_SAMPLE: Final = 8  # populations are counted over one block of so many

_U0, _U1, _U2, _U16, _U32, _U63, _U64 = (np.uint64(n) for n in (0, 1, 2, 16, 32, 63, 64))
_ONES = np.uint64(0xFFFF)
_FAR = np.int64(1) << 62


@jit()
def _word(x: _Int) -> _Word:
    return np.uint64(x)


@jit()
def _low(count: _Word) -> _Word:
    return (_U1 << count) - _U1


@jit()
def _zigzag(x: _Int) -> _Word:
    return np.uint64((x << 1) ^ (x >> 63))


@jit()
def _unzigzag(x: _Word) -> _Int:
    return np.int64(x >> _U1) ^ -np.int64(x & _U1)


@jit()
def _put_rice(words: NDArray[np.uint64], at: _Word, x: _Word, k: _Word, escape: np.uint64) -> _Word:
    q = x >> k
    if q < _U16:
        at = put(words, at, _low(q), q + _U1)
        return _put_wide(words, at, x & _low(k), k)
    return _put_wide(words, put(words, at, _ONES, _U16), x, escape)


@jit()
def _put_wide(words: NDArray[np.uint64], at: _Word, x: _Word, count: _Word) -> _Word:
    """Up to 64 bits."""
    if count > _U32:
        at = put(words, at, x & np.uint64(0xFFFFFFFF), _U32)
        return put(words, at, x >> _U32, count - _U32)
    return put(words, at, x, count)


@jit()
def _put_golomb(words: NDArray[np.uint64], at: _Word, x: _Word, order: _Word) -> _Word:
    """Exponential Golomb code of numbers below 2^30; order 0 of x is Elias' gamma code of x + 1."""
    high = (x >> order) + _U1
    size = bit_length(high) - _U1
    at = put(words, at, _U1 << size, size + _U1)
    at = put(words, at, high & _low(size), size)
    return put(words, at, x & _low(order), order)


@jit()
def _thresholds(e: _Int, exponent_bits: int, mantissa_bits: int) -> NDArray[np.uint64]:
    limits_C = np.empty(CLASSES - 1, np.uint64)
    for c in range(CLASSES - 1):
        # An exponent field that no number has: nothing lies above.
        field = min(e + c, np.int64(1) << exponent_bits)
        limits_C[c] = np.uint64(field) << np.uint64(mantissa_bits)
    return limits_C


@jit()
def _class(old: _Word, e: _Int, exponent_bits: int, mantissa_bits: int) -> _Int:
    field = np.int64((old >> np.uint64(mantissa_bits)) & _low(np.uint64(exponent_bits)))
    return min(max(field - e + 1, 0), CLASSES - 1)


@jit()
def _octaves_below(old: _Word, e: _Int, exponent_bits: int, mantissa_bits: int) -> _Word:
    """For an element of class 0: how many octaves lie between its own and class 1."""
    field = np.int64((old >> np.uint64(mantissa_bits)) & _low(np.uint64(exponent_bits)))
    return np.uint64(max(e - 1 - max(field, 1), 0))


def _choose(
    old_M: NDArray[Any], positions_N: NDArray[np.uint32], exponent_bits: int, mantissa_bits: int
) -> _Int:
    """The e that splits the chunk into classes of the least entropy, populations estimated from a sample."""
    fields = 1 << exponent_bits
    low, shift = _low(np.uint64(exponent_bits)), np.uint64(mantissa_bits)
    changed = np.zeros(fields + CLASSES + 1, np.float64)
    field: _Int
    least: _Int = fields
    most: _Int = 0
    for n in range(positions_N.size):
        field = np.int64((np.uint64(old_M[positions_N[n]]) >> shift) & low)
        changed[field] += 1.0
        least, most = min(least, field), max(most, field)
    held = np.zeros(fields + CLASSES + 1, np.float64)
    stride = _SAMPLE if old_M.size >= 64 * BLOCK * _SAMPLE else 1
    for start in range(0, old_M.size, BLOCK * stride):
        for i in range(start, min(start + BLOCK, old_M.size)):
            held[np.int64((np.uint64(old_M[i]) >> shift) & low)] += stride
    # Sums over all fields up to one, so that a class is a difference.
    for field in range(fields + CLASSES):
        held[field] = max(held[field], changed[field])
        held[field + 1] = max(held[field + 1], changed[field + 1])
        if field:
            held[field] += held[field - 1]
            changed[field] += changed[field - 1]
    best = np.inf
    chosen: _Int = np.int64(1)
    for e in range(max(1, least - CLASSES), max(most, 1) + 1):
        cost = 0.0
        for c in range(CLASSES):
            below = e + c - 2
            end = fields + CLASSES - 1 if c == CLASSES - 1 else min(e + c - 1, fields + CLASSES - 1)
            population = held[end] - (held[below] if c else 0.0)
            hits = changed[end] - (changed[below] if c else 0.0)
            if 0.0 < hits < population:
                rate = hits / population
                cost -= hits * np.log2(rate) + (population - hits) * np.log2(1.0 - rate)
        if cost < best:
            best, chosen = cost, np.int64(e)
    return chosen


def _rank(
    old_M: NDArray[Any],
    tail: NDArray[Any],
    positions_N: NDArray[np.uint32],
    e: _Int,
    exponent_bits: int,
    mantissa_bits: int,
    classes_N: NDArray[np.uint8],
    gaps_N: NDArray[np.uint32],
) -> None:
    """The class of each changed element, and the unchanged ones of it before. `tail`: [64] scratch of the last block."""
    limits_C = _thresholds(e, exponent_bits, mantissa_bits)
    left_C, following_C = np.zeros(CLASSES, np.int64), np.zeros(CLASSES, np.int64)
    n = 0
    whole = old_M.size // BLOCK * BLOCK
    for start in range(0, old_M.size, BLOCK):
        if n == positions_N.size:
            break
        if start == whole:
            tail[:] = 0
            for i in range(start, old_M.size):
                tail[i - start] = old_M[i]
            block, first = tail, 0
        else:
            block, first = old_M, start
        while n < positions_N.size and positions_N[n] < start + BLOCK:
            position = np.int64(positions_N[n])
            c = _class(np.uint64(old_M[position]), e, exponent_bits, mantissa_bits)
            members = ~_U0 if c == 0 else at_least(block, first, limits_C[c - 1])
            if c < CLASSES - 1:
                members &= ~at_least(block, first, limits_C[c])
            rank = np.int64(popcount(members & _low(np.uint64(position - start)))) - left_C[c]
            classes_N[n] = c
            gaps_N[n] = rank - following_C[c]
            following_C[c] = rank + 1
            n += 1
        pass_block(block, first, limits_C, left_C)


@jit()
def _rice_parameter(count: _Int, total: _Int) -> _Int:
    """Near the best Rice parameter for numbers of this mean: the one whose quotient is about 1."""
    k = np.int64(0)
    while k < 63 and (count << (k + 1)) * 45 < total * 31 + count * 31:
        k += 1
    return k


@jit()
def _cost(x: _Word, k: _Word, escape: _Word) -> _Int:
    q = x >> k
    return np.int64(q + _U1 + k) if q < _U16 else np.int64(_U16 + escape)


@jit()
def _magnitude(step: _Word, sign: _Word, mask: _Word) -> _Word:
    return ((~step + _U1) & mask) if step & sign else step


def _write(
    old_M: NDArray[Any],
    positions_N: NDArray[np.uint32],
    steps_N: NDArray[np.uint64],
    classes_N: NDArray[np.uint8],
    gaps_N: NDArray[np.uint32],
    order_N: NDArray[np.uint32],
    e: _Int,
    exponent_bits: int,
    mantissa_bits: int,
    words: NDArray[np.uint64],
) -> _Word:
    """Writes the stream into `words`; returns its length in bits. `order_N`: scratch."""
    width = np.uint64(1 + exponent_bits + mantissa_bits)
    mask = _low(width) if width < _U64 else ~_U0
    sign = _U1 << (width - _U1)
    # Changes by class, in order of position within one: a counting sort.
    first_C = np.zeros(CLASSES + 1, np.int64)
    for n in range(positions_N.size):
        first_C[classes_N[n] + 1] += 1
    for c in range(CLASSES):
        first_C[c + 1] += first_C[c]
    next_C = first_C.copy()
    for n in range(positions_N.size):
        order_N[next_C[classes_N[n]]] = n
        next_C[classes_N[n]] += 1

    words[0] = np.uint64(e)
    at = _E_BITS
    parameters_C = np.zeros(CLASSES, np.uint64)
    m: _Word
    since: _Int
    exceptions = 0
    before, k_before = np.int64(0), np.int64(0)
    for c in range(CLASSES):
        count = first_C[c + 1] - first_C[c]
        at = _put_golomb(words, at, _zigzag(count - before), _FIRST_ORDER)
        before = count
        if count == 0:
            continue
        wide, gaps, marks, since, excess_total = 0, np.int64(0), np.int64(0), np.int64(0), 0.0
        for i in range(first_C[c], first_C[c + 1]):
            n = order_N[i]
            gaps += gaps_N[n]
            magnitude = _magnitude(steps_N[n], sign, mask)
            if magnitude == _U1:
                since += 1
            else:
                wide += 1
                marks += since
                since = 0
                shift = (
                    _octaves_below(np.uint64(old_M[positions_N[n]]), e, exponent_bits, mantissa_bits)
                    if c == 0
                    else _U0
                )
                excess_total += float((magnitude - _U2) >> min(shift, _U63))
        exceptions += wide
        guess_k = _rice_parameter(count, gaps)
        guess_r = _rice_parameter(np.int64(max(wide, 1)), marks)
        guess_m = np.int64(0)
        while (
            guess_m < 63 and wide * float(_U1 << np.uint64(guess_m + 1)) * 45.0 < (excess_total + wide) * 31.0
        ):
            guess_m += 1
        # The guess and its neighbours by exact cost.
        cost = np.zeros(9, np.int64)
        since = np.int64(0)
        for i in range(first_C[c], first_C[c + 1]):
            n = order_N[i]
            magnitude = _magnitude(steps_N[n], sign, mask)
            for d in range(3):
                cost[d] += _cost(np.uint64(gaps_N[n]), np.uint64(max(guess_k + d - 1, 0)), _ESCAPE_BITS)
            if magnitude == _U1:
                since += 1
                continue
            shift = (
                _octaves_below(np.uint64(old_M[positions_N[n]]), e, exponent_bits, mantissa_bits)
                if c == 0
                else _U0
            )
            for d in range(3):
                cost[3 + d] += _cost(np.uint64(since), np.uint64(max(guess_r + d - 1, 0)), _ESCAPE_BITS)
                m = min(shift + _word(max(guess_m + d - 1, 0)), width - _U1)
                cost[6 + d] += _cost(magnitude - _U2, m, width)
            since = 0
        k = np.uint64(max(guess_k + _least_of_3(cost, 0) - 1, 0))
        r = np.uint64(max(guess_r + _least_of_3(cost, 3) - 1, 0))
        m = min(np.uint64(max(guess_m + _least_of_3(cost, 6) - 1, 0)), width - _U1)
        parameters_C[c] = m
        at = _put_golomb(words, at, _zigzag(np.int64(k) - k_before - 1), _U0)
        k_before = np.int64(k)
        at = _put_golomb(words, at, np.uint64(wide), _U0)
        if wide:
            at = _put_golomb(words, at, r, _U0)
            at = _put_golomb(words, at, m, _U0)
        for i in range(first_C[c], first_C[c + 1]):
            n = order_N[i]
            at = _put_rice(words, at, np.uint64(gaps_N[n]), k, _ESCAPE_BITS)
            at = put(words, at, _U1 if steps_N[n] & sign else _U0, _U1)
        if wide:
            since = np.int64(0)
            for i in range(first_C[c], first_C[c + 1]):
                if _magnitude(steps_N[order_N[i]], sign, mask) == _U1:
                    since += 1
                else:
                    at = _put_rice(words, at, np.uint64(since), r, _ESCAPE_BITS)
                    since = 0
    if exceptions:
        for n in range(positions_N.size):
            magnitude = _magnitude(steps_N[n], sign, mask)
            if magnitude != _U1:
                own = np.int64(classes_N[n])
                shift = (
                    _octaves_below(np.uint64(old_M[positions_N[n]]), e, exponent_bits, mantissa_bits)
                    if own == 0
                    else _U0
                )
                m = min(parameters_C[own] + shift, width - _U1)
                at = _put_rice(words, at, magnitude - _U2, m, width)
    return at


@jit()
def _least_of_3(cost: NDArray[np.int64], start: int) -> _Int:
    best = start
    for i in range(start + 1, start + 3):
        if cost[i] < cost[best]:
            best = i
    return np.int64(best - start)


@jit()
def _get_golomb(words: NDArray[np.uint64], at: _Word, order: _Word) -> tuple[_Word, np.uint64]:
    """The number and the bit after it; a number of 2^30 and more has no code, and comes as 2^40."""
    window = peek(words, at)
    size = trailing_zeros(window)
    if size > np.uint64(30):
        return _U1 << np.uint64(40), at
    window >>= size + _U1
    x = (((_U1 << size) | (window & _low(size))) - _U1) << order
    window = peek(words, at + size + size + _U1)
    return x | (window & _low(order)), at + size + size + _U1 + order


@jit()
def _get_rice(words: NDArray[np.uint64], at: _Word, k: _Word, escape: np.uint64) -> tuple[_Word, np.uint64]:
    q = trailing_zeros(~peek(words, at))
    if q < _U16:
        at += q + _U1
        return (q << k) | (peek(words, at) & _low(k)), at + k
    at += _U16
    x = peek(words, at)
    return (x & _low(escape) if escape < _U64 else x), at + escape


def _decode(
    base_M: NDArray[Any],
    tail: NDArray[Any],
    exponent_bits: int,
    mantissa_bits: int,
    payload: NDArray[np.uint8],
    positions_N: NDArray[np.uint32],
    new_N: NDArray[Any],
) -> int:
    width = np.uint64(1 + exponent_bits + mantissa_bits)
    mask = _low(width) if width < _U64 else ~_U0
    sign = _U1 << (width - _U1)
    # A private copy in words with zeros behind: a symbol may run past the end, which is noticed after it.
    words = np.zeros(payload.size // 8 + 12, np.uint64)
    for i in range(payload.size >> 3):
        word = _U0
        for b in range(8):
            word |= np.uint64(payload[8 * i + b]) << np.uint64(8 * b)
        words[i] = word
    for i in range(payload.size & ~7, payload.size):
        words[i >> 3] |= np.uint64(payload[i]) << np.uint64(8 * (i & 7))
    end = np.uint64(8 * payload.size)
    total = np.int64(positions_N.size)

    e = np.int64(words[0] & _low(_E_BITS))
    if not 1 <= e < (1 << exponent_bits):
        return BAD_PARAMETER
    at = _E_BITS
    gaps_N, flags_N = np.empty(total, np.uint32), np.empty(total, np.uint8)  # by class
    next_C, last_C = np.zeros(CLASSES, np.int64), np.zeros(CLASSES, np.int64)
    parameters_C = np.zeros(CLASSES, np.uint64)
    filled, before, k_before = np.int64(0), np.int64(0), np.int64(0)
    for c in range(CLASSES):
        x, at = _get_golomb(words, at, _FIRST_ORDER)
        count = before + _unzigzag(x)
        if not 0 <= count <= total - filled:
            return BAD_PARAMETER
        before = count
        next_C[c], last_C[c] = filled, filled + count
        if count == 0:
            if at > end:
                return CUT
            continue
        x, at = _get_golomb(words, at, _U0)
        k_before += 1 + _unzigzag(x)
        x, at = _get_golomb(words, at, _U0)
        wide = np.int64(x)
        if not (0 <= k_before <= np.int64(_MAX_PARAMETER) and wide <= count):
            return BAD_PARAMETER
        r = _U0
        if wide:
            r, at = _get_golomb(words, at, _U0)
            parameters_C[c], at = _get_golomb(words, at, _U0)
            if r > _MAX_PARAMETER or parameters_C[c] >= width:
                return BAD_PARAMETER
        if at > end:
            return CUT
        k = np.uint64(k_before)
        for i in range(filled, filled + count):
            x, at = _get_rice(words, at, k, _ESCAPE_BITS)
            gaps_N[i] = x
            flags_N[i] = peek(words, at) & _U1
            at += _U1
            if at > end:
                return CUT
        last: _Int = filled - 1
        for _ in range(wide):
            x, at = _get_rice(words, at, r, _ESCAPE_BITS)
            if at > end:
                return CUT
            last += np.int64(x) + 1
            if last >= filled + count:
                return OUT_OF_RANGE
            flags_N[last] |= 2
        filled += count
    if filled != total:
        return BAD_PARAMETER

    limits_C = _thresholds(e, exponent_bits, mantissa_bits)
    left_C = np.empty(CLASSES, np.int64)
    for c in range(CLASSES):
        left_C[c] = np.int64(gaps_N[next_C[c]]) if next_C[c] < last_C[c] else _FAR
    n = np.int64(0)
    whole = base_M.size // BLOCK * BLOCK
    for start in range(0, base_M.size, BLOCK):
        if start == whole:
            tail[:] = 0
            for i in range(start, base_M.size):
                tail[i - start] = base_M[i]
            block, first = tail, 0
        else:
            block, first = base_M, start
        if pass_block(block, first, limits_C, left_C) >= 0:
            continue
        hits = _U0
        for c in range(CLASSES):
            if left_C[c] >= 0:
                continue
            members = ~_U0 if c == 0 else at_least(block, first, limits_C[c - 1])
            if c < CLASSES - 1:
                members &= ~at_least(block, first, limits_C[c])
            held = np.int64(popcount(members))
            rank = left_C[c] + held  # within the block
            ahead = next_C[c]
            while rank < held:
                hits |= _nth_set(members, rank)
                ahead += 1
                rank = rank + 1 + np.int64(gaps_N[ahead]) if ahead < last_C[c] else _FAR
            left_C[c] = rank - held if rank < _FAR else _FAR
        while hits:
            position = start + np.int64(trailing_zeros(hits))
            hits &= hits - _U1
            # In the padding behind the last element, class 0 has members that are not there.
            if position >= base_M.size:
                return OUT_OF_RANGE
            old = np.uint64(base_M[position])
            c = _class(old, e, exponent_bits, mantissa_bits)
            flags = flags_N[next_C[c]]
            next_C[c] += 1
            magnitude = _U1
            if flags & 2:
                shift = _octaves_below(old, e, exponent_bits, mantissa_bits) if c == 0 else _U0
                excess, at = _get_rice(words, at, min(parameters_C[c] + shift, width - _U1), width)
                if at > end:
                    return CUT
                magnitude = (excess + _U2) & mask
                if magnitude == _U0:
                    return NO_CHANGE
            step = (~magnitude + _U1) & mask if flags & 1 else magnitude
            positions_N[n] = position
            new_N[n] = unordered((ordered(old, sign, mask) + step) & mask, sign, mask)
            n += 1
    if n != total:
        return OUT_OF_RANGE
    return OK if at <= end and end - at < np.uint64(8) else CUT


@jit()
def _nth_set(bits: _Word, n: _Int) -> _Word:
    """The set bit above `n` others, by itself. More than n bits are set."""
    at, left = _U0, np.uint64(n)
    size = _U32
    while size:
        below = popcount(bits & (_low(size) << at))
        if below <= left:
            left -= below
            at += size
        size >>= _U1
    return _U1 << at


@cache
def _encode_kernels(lane: int) -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    old, scratch = lanes(lane), lanes(lane, readonly=False)
    u8, u32, u64 = (lanes(n, readonly=False) for n in (1, 4, 8))
    return (
        jit(f"int64({old}, {lanes(4)}, int64, int64)")(_choose),
        jit(f"void({old}, {scratch}, {lanes(4)}, int64, int64, int64, {u8}, {u32})")(_rank),
        jit(
            f"uint64({old}, {lanes(4)}, {lanes(8)}, {lanes(1)}, {lanes(4)}, {u32}, int64, int64, int64, {u64})"
        )(_write),
    )


@cache
def _decode_kernel(lane: int) -> Callable[..., Any]:
    scratch = lanes(lane, readonly=False)
    return jit(
        f"int64({lanes(lane)}, {scratch}, int64, int64, {lanes(1)}, {lanes(4, readonly=False)}, {scratch})"
    )(_decode)


class ContextEncoder:
    """Scratch for one chunk at a time: 13 MiB, of which only touched pages cost memory. One a thread."""

    def __init__(self) -> None:
        self._differ = GapEncoder()
        self._classes = np.empty(CHUNK_ELEMENTS, dtype=np.uint8)
        self._gaps = np.empty(CHUNK_ELEMENTS, dtype=np.uint32)
        self._order = np.empty(CHUNK_ELEMENTS, dtype=np.uint32)
        self._words = np.empty(_WORDS, dtype=np.uint64)

    def pack(
        self,
        old_M: NDArray[Any],
        positions_N: NDArray[np.uint32],
        steps_N: NDArray[np.uint64],
        dtype: str,
    ) -> bytes:
        """The payload of these changes to the chunk `old_M`, at least one, in order of position.

        `dtype` is one of `LAYOUTS`; `steps_N` as the gap coder's diff gives them.
        """
        choose, rank, write = _encode_kernels(old_M.dtype.itemsize)
        n, old_M = positions_N.size, aligned(old_M)
        classes_N, gaps_N = self._classes[:n], self._gaps[:n]
        layout = LAYOUTS[dtype]
        e = choose(old_M, positions_N, *layout)
        rank(old_M, np.empty(BLOCK, old_M.dtype), positions_N, e, *layout, classes_N, gaps_N)
        bits = int(
            write(old_M, positions_N, steps_N, classes_N, gaps_N, self._order, e, *layout, self._words)
        )
        return self._words[: bits // 64 + 1].view(np.uint8)[: -(-bits // 8)].tobytes()

    def encode(self, old_M: NDArray[Any], new_M: NDArray[Any], dtype: str) -> EncodedChunk:
        """Two chunks of at most `CHUNK_ELEMENTS` lanes of `dtype`. The payload of equal ones is empty."""
        positions_N, steps_N, _ = self._differ.diff(old_M, new_M, dtype, 0)
        if not positions_N.size:
            return EncodedChunk(0, b"")
        return EncodedChunk(positions_N.size, self.pack(old_M, positions_N, steps_N, dtype))


def decode_context(
    base_M: NDArray[Any],
    dtype: str,
    payload: NDArray[np.uint8],
    positions_N: NDArray[np.uint32],
    new_N: NDArray[Any],
) -> int:
    """The changed positions of a chunk and the elements there after the delta, from the chunk `base_M` before it.

    Outputs have the length of the stated number of changes; returns a status, and on any but `OK` they are undefined.
    Reads and writes stay within the arrays, whatever the payload holds. `dtype` is one of `LAYOUTS`.
    """
    return int(
        _decode_kernel(base_M.dtype.itemsize)(
            aligned(base_M),
            np.empty(BLOCK, base_M.dtype),
            *LAYOUTS[dtype],
            aligned(payload),
            positions_N,
            new_N,
        )
    )
