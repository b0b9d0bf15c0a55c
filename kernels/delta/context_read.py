"""From the context coder's stream and the chunk before the delta to the changes. The stream is described in `context`.

Nothing in here trusts the stream: counts, parameters and places are checked before they are used, reads of the stream
end in zeros behind it, and a change is placed only by elements that are there.

Legend: N changed elements, M elements of a chunk, C classes.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rollwire.kernels.bits import peek, trailing_zeros
from rollwire.kernels.delta.codes import Int, Word, get_golomb, get_rice, low_mask, unzigzag
from rollwire.kernels.delta.context_write import COUNT_ORDER, E_BITS, POSITION_BITS
from rollwire.kernels.delta.gap import BAD_PARAMETER, CUT, NO_CHANGE, OK, OUT_OF_RANGE, ordered, unordered
from rollwire.kernels.delta.octaves import (
    BLOCK,
    CLASSES,
    class_of,
    field_of,
    members_of,
    nth_set,
    octaves_below,
    pass_block,
    popcount,
    thresholds_from,
)
from rollwire.kernels.digest import jit

_SPARE: Final = (
    12  # words behind the stream: five numbers of a class may be read before the end is looked for
)
_FAR: Final = 1 << 62  # a class without another change

_U0, _U1, _U2, _U16, _U64 = (np.uint64(n) for n in (0, 1, 2, 16, 64))
_E_BITS, _POSITION_BITS, _COUNT_ORDER = np.uint64(E_BITS), np.uint64(POSITION_BITS), np.uint64(COUNT_ORDER)
_MAX_PARAMETER = np.uint64(POSITION_BITS)


@jit()
def _words_of(payload: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """A private copy in words with zeros behind: a symbol may run past the end, which is noticed after it."""
    words = np.zeros(payload.size // 8 + _SPARE, np.uint64)
    for i in range(payload.size >> 3):
        word = _U0
        for b in range(8):
            word |= np.uint64(payload[8 * i + b]) << np.uint64(8 * b)
        words[i] = word
    for i in range(payload.size & ~7, payload.size):
        words[i >> 3] |= np.uint64(payload[i]) << np.uint64(8 * (i & 7))
    return words


@jit()
def _parse(
    words: NDArray[np.uint64],
    end: Word,
    width: Word,
    first_C: NDArray[np.int64],
    parameters_C: NDArray[np.uint64],
    gaps_N: NDArray[np.uint32],
    flags_N: NDArray[np.uint8],
) -> tuple[Int, Word]:
    """The streams of all classes: class c has first_C[c] to first_C[c + 1] of the gaps and flags. Status and place.

    Flags: 1 = downwards, 2 = by more than one step.
    """
    total = np.int64(gaps_N.size)
    at: Word = _E_BITS
    before: Int = np.int64(0)
    k_before: Int = np.int64(0)
    for c in range(CLASSES):
        x, at = get_golomb(words, at, _COUNT_ORDER)
        count = before + unzigzag(x)
        first = first_C[c]
        if not 0 <= count <= total - first:
            return BAD_PARAMETER, at
        before = count
        first_C[c + 1] = first + count
        if count == 0:
            if at > end:
                return CUT, at
            continue
        x, at = get_golomb(words, at, _U0)
        k_before += 1 + unzigzag(x)
        wide, at = get_golomb(words, at, _U0)
        if not (0 <= k_before <= np.int64(_MAX_PARAMETER) and wide <= np.uint64(count)):
            return BAD_PARAMETER, at
        r = _U0
        if wide:
            r, at = get_golomb(words, at, _U0)
            parameters_C[c], at = get_golomb(words, at, _U0)
            if r > _MAX_PARAMETER or parameters_C[c] >= width:
                return BAD_PARAMETER, at
        if at > end:
            return CUT, at
        k = np.uint64(k_before)
        low = low_mask(k)
        for i in range(first, first + count):
            window = peek(words, at)
            q = trailing_zeros(~window)
            if q < _U16:
                window >>= q + _U1
                gaps_N[i] = (q << k) | (window & low)
                flags_N[i] = (window >> k) & _U1
                at += q + k + _U2
            else:
                gaps_N[i] = (window >> _U16) & low_mask(_POSITION_BITS)
                flags_N[i] = (window >> (_U16 + _POSITION_BITS)) & _U1
                at += _U16 + _POSITION_BITS + _U1
            if at > end:
                return CUT, at
        marked: Int = first - 1
        for _ in range(np.int64(wide)):
            x, at = get_rice(words, at, r, _POSITION_BITS)
            if at > end:
                return CUT, at
            marked += np.int64(x) + 1
            if marked >= first + count:
                return OUT_OF_RANGE, at
            flags_N[marked] |= 2
    return (OK if first_C[CLASSES] == total else BAD_PARAMETER), at


@jit()
def _hits(
    block: NDArray[Any],
    first: Int,
    limits_C: NDArray[np.uint64],
    left_C: NDArray[np.int64],
    ahead_C: NDArray[np.int64],
    first_C: NDArray[np.int64],
    gaps_N: NDArray[np.uint32],
) -> Word:
    """The changed elements of a block that was passed, as bits; counts on to each class's next change."""
    due, hits = _U0, _U0
    for k in range(CLASSES):
        due |= np.uint64(left_C[k] < 0) << np.uint64(k)
    while due:
        c = np.int64(trailing_zeros(due))
        due &= due - _U1
        members = members_of(block, first, limits_C, c)
        held = np.int64(popcount(members))
        rank = left_C[c] + held  # among the block's members
        ahead = ahead_C[c]
        while rank < held:
            hits |= nth_set(members, rank)
            ahead += 1
            if ahead == first_C[c + 1]:
                rank = np.int64(_FAR)
            else:
                rank += np.int64(gaps_N[ahead]) + 1
        ahead_C[c] = ahead
        left_C[c] = rank - held
    return hits


def read(
    base_M: NDArray[Any],
    tail: NDArray[Any],
    exponent_bits: int,
    mantissa_bits: int,
    payload: NDArray[np.uint8],
    positions_N: NDArray[np.uint32],
    new_N: NDArray[Any],
) -> Int:
    """Positions and new elements of a chunk's changes; a status. `tail`: [64] scratch of the last block."""
    width = np.uint64(1 + exponent_bits + mantissa_bits)
    mask = low_mask(width) if width < _U64 else ~_U0
    sign = _U1 << (width - _U1)
    words = _words_of(payload)
    end = np.uint64(8 * payload.size)
    e = np.int64(words[0] & low_mask(_E_BITS))
    if not 1 <= e < (1 << exponent_bits):
        return BAD_PARAMETER
    gaps_N, flags_N = np.empty(positions_N.size, np.uint32), np.empty(positions_N.size, np.uint8)
    first_C, parameters_C = np.zeros(CLASSES + 1, np.int64), np.zeros(CLASSES, np.uint64)
    status, at = _parse(words, end, width, first_C, parameters_C, gaps_N, flags_N)
    if status != OK:
        return status

    limits_C = thresholds_from(e, exponent_bits, mantissa_bits)
    ahead_C, next_C = first_C[:CLASSES].copy(), first_C[:CLASSES].copy()
    left_C = np.full(CLASSES, np.int64(_FAR))
    for c in range(CLASSES):
        if first_C[c] < first_C[c + 1]:
            left_C[c] = np.int64(gaps_N[first_C[c]])
    n = np.int64(0)
    whole = base_M.size // BLOCK * BLOCK
    for start in range(0, base_M.size, BLOCK):
        block, first = base_M, start
        if start == whole:
            tail[:] = 0
            for i in range(start, base_M.size):
                tail[i - start] = base_M[i]
            block, first = tail, 0
        if pass_block(block, first, limits_C, left_C) >= 0:
            continue
        hits = _hits(block, first, limits_C, left_C, ahead_C, first_C, gaps_N)
        while hits:
            position = start + np.int64(trailing_zeros(hits))
            hits &= hits - _U1
            if position >= base_M.size:  # the zeros behind the last element are of class 0
                return OUT_OF_RANGE
            old = np.uint64(base_M[position])
            field = field_of(old, exponent_bits, mantissa_bits)
            c = class_of(field, e)
            flags = flags_N[next_C[c]]
            next_C[c] += 1
            magnitude = _U1
            if flags & 2:
                shift = octaves_below(field, e) if c == 0 else _U0
                excess, at = get_rice(words, at, min(parameters_C[c] + shift, width - _U1), width)
                if at > end:
                    return CUT
                magnitude = (excess + _U2) & mask
                if magnitude == _U0:
                    return NO_CHANGE
            step = (~magnitude + _U1) & mask if flags & 1 else magnitude
            positions_N[n] = position
            new_N[n] = unordered((ordered(old, sign, mask) + step) & mask, sign, mask)
            n += 1
    if n != positions_N.size:
        return OUT_OF_RANGE
    return OK if at <= end and end - at < np.uint64(8) else CUT
