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
    at_least,
    class_of,
    due_classes,
    field_of,
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
def _place(
    block_B: NDArray[Any],
    start: Int,
    end: Int,
    layout: tuple[int, int, Int],
    words: NDArray[np.uint64],
    at: Word,
    stream_end: Word,
    first_C: NDArray[np.int64],
    parameters_C: NDArray[np.uint64],
    gaps_N: NDArray[np.uint32],
    flags_N: NDArray[np.uint8],
    limits_C: NDArray[np.uint64],
    left_C: NDArray[np.int64],
    ahead_C: NDArray[np.int64],
    next_C: NDArray[np.int64],
    positions_N: NDArray[np.uint32],
    new_N: NDArray[Any],
    n: Int,
) -> tuple[Int, Word, Int]:
    """Finds the changes in whole blocks, elements [start, end) of the chunk. Status, place in the stream, changes so far.

    `block_B` holds the elements from `start` on, to a multiple of 64 beyond `end`. left_C: the class's elements before
    its next change, which is ahead_C of the sorted ones; next_C: the one whose flags are next.
    One loop without calls that take arrays: they would count references at each block.
    """
    exponent_bits, mantissa_bits, e = layout
    width = np.uint64(1 + exponent_bits + mantissa_bits)
    mask = low_mask(width) if width < _U64 else ~_U0
    sign = _U1 << (width - _U1)
    for first in range(0, end - start, BLOCK):
        if pass_block(block_B, first, limits_C, left_C) >= 0:
            continue
        hits = _U0
        due = due_classes(left_C)
        while due:
            k = np.int64(trailing_zeros(due))
            due &= due - _U1
            members = ~_U0
            if k:
                members = at_least(block_B, first, limits_C[k - 1])
            if k < CLASSES - 1:
                members &= ~at_least(block_B, first, limits_C[k])
            held = np.int64(popcount(members))
            rank = left_C[k] + held  # among the block's members
            ahead = ahead_C[k]
            while rank < held:
                hits |= nth_set(members, rank)
                ahead += 1
                rank = np.int64(_FAR) if ahead == first_C[k + 1] else rank + np.int64(gaps_N[ahead]) + 1
            ahead_C[k] = ahead
            left_C[k] = rank - held
        while hits:
            element = first + np.int64(trailing_zeros(hits))
            hits &= hits - _U1
            if start + element >= end:  # the zeros behind the last element are of class 0
                return OUT_OF_RANGE, at, n
            old = np.uint64(block_B[element])
            field = field_of(old, exponent_bits, mantissa_bits)
            c = class_of(field, e)
            flags = np.uint64(flags_N[next_C[c]])
            next_C[c] += 1
            magnitude = _U1
            if flags & _U2:
                shift = octaves_below(field, e) if c == 0 else _U0
                excess, at = get_rice(words, at, min(parameters_C[c] + shift, width - _U1), width)
                if at > stream_end:
                    return CUT, at, n
                magnitude = (excess + _U2) & mask
                if magnitude == _U0:
                    return NO_CHANGE, at, n
            step = (~magnitude + _U1) & mask if flags & _U1 else magnitude
            positions_N[n] = start + element
            new_N[n] = unordered((ordered(old, sign, mask) + step) & mask, sign, mask)
            n += 1
    return OK, at, n


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
    layout = (exponent_bits, mantissa_bits, e)
    n: Int = np.int64(0)
    whole = base_M.size // BLOCK * BLOCK
    for part in range(2):
        start: Int = np.int64(0)
        stop: Int = np.int64(whole)
        block_B = base_M
        if part:
            start, stop, block_B = stop, np.int64(base_M.size), tail
            tail[:] = 0
            for i in range(whole, base_M.size):
                tail[i - whole] = base_M[i]
        status, at, n = _place(
            block_B,
            start,
            stop,
            layout,
            words,
            at,
            end,
            first_C,
            parameters_C,
            gaps_N,
            flags_N,
            limits_C,
            left_C,
            ahead_C,
            next_C,
            positions_N,
            new_N,
            n,
        )
        if status != OK:
            return status
    if n != positions_N.size:
        return OUT_OF_RANGE
    return OK if at <= end and end - at < np.uint64(8) else CUT
