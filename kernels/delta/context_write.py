"""From a chunk's changes to the context coder's stream. The stream is described in `context`.

Legend: N changed elements, M elements of a chunk, C classes, F exponent fields.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rollwire.kernels.delta.codes import Int, Word, best_rice, low_mask, put_golomb, zigzag
from rollwire.kernels.delta.gap import ordered
from rollwire.kernels.delta.octaves import (
    BLOCK,
    CLASSES,
    at_least,
    class_of,
    field_of,
    octaves_below,
    pass_block,
    popcount,
    thresholds_from,
)
from rollwire.kernels.digest import jit

E_BITS: Final = 11  # of the exponent field that starts a stream
POSITION_BITS: Final = 20  # of an escaped gap
COUNT_ORDER: Final = 4

_SAMPLE: Final = 32  # populations are counted over one block of so many

_U0, _U1, _U2, _U6, _U16, _U63, _U64 = (np.uint64(n) for n in (0, 1, 2, 6, 16, 63, 64))
_ONES = np.uint64(0xFFFF)
_E_BITS, _POSITION_BITS, _COUNT_ORDER = np.uint64(E_BITS), np.uint64(POSITION_BITS), np.uint64(COUNT_ORDER)


@jit()
def _entropy(changed_F: NDArray[np.int64], held_F: NDArray[np.int64], start: Int, end: Int) -> Any:
    """Bits that tell which elements of the fields [start, end) change, from sums over all fields below one."""
    changed = float(changed_F[end] - changed_F[start])
    if changed == 0.0:
        return 0.0
    same = max(float(held_F[end] - held_F[start]) - changed, 0.5)
    held = changed + same
    return held * np.log2(held) - changed * np.log2(changed) - same * np.log2(same)


@jit()
def _choose(old_M: NDArray[Any], old_N: NDArray[np.uint64], exponent_bits: int, mantissa_bits: int) -> Int:
    """The e that splits the chunk into classes of the least entropy, populations estimated from a sample."""
    fields = 1 << exponent_bits
    changed_F, held_F = np.zeros(fields + 1, np.int64), np.zeros(fields + 1, np.int64)
    for n in range(old_N.size):
        changed_F[field_of(old_N[n], exponent_bits, mantissa_bits) + 1] += 1
    stride = _SAMPLE if old_M.size >= 256 * _SAMPLE else 1
    for start in range(0, old_M.size, BLOCK * stride):
        for i in range(start, min(start + BLOCK, old_M.size)):
            held_F[field_of(np.uint64(old_M[i]), exponent_bits, mantissa_bits) + 1] += stride
    least, most = fields, 0
    for field in range(fields):
        if changed_F[field + 1]:
            least, most = min(least, field), max(most, field)
        changed_F[field + 1] += changed_F[field]
        held_F[field + 1] += held_F[field]
    first, last = max(1, least - CLASSES), max(1, most)
    # The ten classes of one field each: from one candidate to the next, one leaves and one enters.
    middle = 0.0
    for field in range(first, min(first + CLASSES - 2, fields)):
        middle += _entropy(changed_F, held_F, field, field + 1)
    best = np.inf
    chosen: Int = np.int64(1)
    for e in range(first, last + 1):
        top = min(e + CLASSES - 2, fields)
        cost = middle + _entropy(changed_F, held_F, 0, e) + _entropy(changed_F, held_F, top, fields)
        if cost < best:
            best, chosen = cost, np.int64(e)
        middle -= _entropy(changed_F, held_F, e, e + 1)
        if top < fields:
            middle += _entropy(changed_F, held_F, top, top + 1)
    return chosen


@jit()
def _rank(
    block_B: NDArray[Any],
    start: Int,
    end: Int,
    positions_N: NDArray[np.uint32],
    old_N: NDArray[np.uint64],
    n: Int,
    layout: tuple[int, int, Int],
    limits_C: NDArray[np.uint64],
    passed_C: NDArray[np.int64],
    following_C: NDArray[np.int64],
    classes_N: NDArray[np.uint8],
    gaps_N: NDArray[np.uint32],
) -> Int:
    """The class of each change in elements [start, end) of the chunk, and the unchanged ones of it before.

    `block_B` holds the elements from `start` on, to a multiple of 64 beyond `end`. passed_C: minus the class's elements
    before; following_C: the rank after its last change. From change `n` on; returns the one after the last.
    One loop without calls that take arrays: they would count references at each block.
    """
    exponent_bits, mantissa_bits, e = layout
    for first in range(0, end - start, BLOCK):
        if n == positions_N.size:
            break
        while n < positions_N.size and positions_N[n] < start + first + BLOCK:
            c = class_of(field_of(old_N[n], exponent_bits, mantissa_bits), e)
            members = low_mask(np.uint64(positions_N[n] - start - first))
            if c:
                members &= at_least(block_B, first, limits_C[c - 1])
            if c < CLASSES - 1:
                members &= ~at_least(block_B, first, limits_C[c])
            rank = np.int64(popcount(members)) - passed_C[c]
            classes_N[n] = c
            gaps_N[n] = rank - following_C[c]
            following_C[c] = rank + 1
            n += 1
        pass_block(block_B, first, limits_C, passed_C)
    return n


@jit()
def _sort(
    old_N: NDArray[np.uint64],
    new_N: NDArray[np.uint64],
    width: Word,
    classes_N: NDArray[np.uint8],
    gaps_N: NDArray[np.uint32],
    first_C: NDArray[np.int64],
    sorted_N: NDArray[np.uint32],
    flags_N: NDArray[np.uint8],
    wide_N: NDArray[np.uint32],
) -> Int:
    """Changes by class: class c has first_C[c] to first_C[c + 1] of the gaps `sorted_N` and of `flags_N`.

    Flags: 1 = downwards, 2 = by more than one step. `wide_N` receives the latter, by position; returns how many.
    """
    mask = low_mask(width) if width < _U64 else ~_U0
    sign = _U1 << (width - _U1)
    for n in range(old_N.size):
        first_C[classes_N[n] + 1] += 1
    for c in range(CLASSES):
        first_C[c + 1] += first_C[c]
    next_C = first_C.copy()
    wide = np.int64(0)
    for n in range(old_N.size):
        i = next_C[classes_N[n]]
        next_C[classes_N[n]] = i + 1
        sorted_N[i] = gaps_N[n]
        step = (ordered(new_N[n], sign, mask) - ordered(old_N[n], sign, mask)) & mask
        far = np.uint64(step + _U1 > _U2) & np.uint64(step != mask)
        flags_N[i] = (step >> (width - _U1)) | (far << _U1)
        wide_N[wide] = n
        wide += np.int64(far)
    return wide


@jit()
def _excess(old: Word, new: Word, width: Word) -> Word:
    """|step| - 2 of a step that is longer than 1."""
    mask = low_mask(width) if width < _U64 else ~_U0
    sign = _U1 << (width - _U1)
    step = (ordered(new, sign, mask) - ordered(old, sign, mask)) & mask
    return (((~step + _U1) & mask) if step & sign else step) - _U2


@jit()
def _put_gaps(
    words: NDArray[np.uint64], at: Word, gaps: NDArray[np.uint32], flags: NDArray[np.uint8], k: Word
) -> Word:
    """A class's gaps and signs. The word being filled stays in a register."""
    w, fill = at >> _U6, at & _U63
    word = words[w]
    low = low_mask(k)
    for i in range(gaps.size):
        x, down = np.uint64(gaps[i]), np.uint64(flags[i]) & _U1
        q = x >> k
        if q < _U16:
            size = q + k + _U2
            symbol = low_mask(q) | ((x & low) << (q + _U1)) | (down << (size - _U1))
        else:
            size = _U16 + _POSITION_BITS + _U1
            symbol = _ONES | (x << _U16) | (down << (size - _U1))
        word |= symbol << fill
        fill += size
        if fill >= _U64:
            words[w] = word
            w += _U1
            fill -= _U64
            word = symbol >> (size - fill)
    words[w] = word
    return (w << _U6) | fill


@jit()
def _put_numbers(
    words: NDArray[np.uint64],
    at: Word,
    numbers: NDArray[np.uint64],
    parameters: NDArray[np.uint8],
    escape_bits: Word,
) -> Word:
    """Rice codes, each number with a parameter of its own. The word being filled stays in a register."""
    w, fill = at >> _U6, at & _U63
    word = words[w]
    for i in range(numbers.size):
        k = np.uint64(parameters[i])
        q = numbers[i] >> k
        if q < _U16:
            head, head_bits, rest, rest_bits = low_mask(q), q + _U1, numbers[i] & low_mask(k), k
        else:
            head, head_bits, rest, rest_bits = _ONES, _U16, numbers[i], escape_bits
        word |= head << fill
        fill += head_bits
        if fill >= _U64:
            words[w] = word
            w += _U1
            fill -= _U64
            word = head >> (head_bits - fill)
        if rest_bits:
            word |= rest << fill
            fill += rest_bits
            if fill >= _U64:
                words[w] = word
                w += _U1
                fill -= _U64
                # In two steps: all 64 bits may have gone into the word before.
                word = (rest >> (rest_bits - fill - _U1)) >> _U1
    words[w] = word
    return (w << _U6) | fill


@jit()
def _put_class(
    words: NDArray[np.uint64],
    at: Word,
    gaps: NDArray[np.uint32],
    flags: NDArray[np.uint8],
    k_before: Int,
    excess: NDArray[np.uint64],
    shifts: NDArray[np.uint8],
    width: Word,
    numbers: NDArray[np.uint64],
    parameters: NDArray[np.uint8],
) -> tuple[Word, Word, Word]:
    """Parameters, gaps and marks of a class that changes; its gaps' and its excess' parameter."""
    k = best_rice(gaps, gaps.size, shifts[:0], POSITION_BITS)
    at = put_golomb(words, at, zigzag(np.int64(k) - k_before - 1), _U0)
    at = put_golomb(words, at, np.uint64(excess.size), _U0)
    if excess.size == 0:
        return _put_gaps(words, at, gaps, flags, k), k, _U0
    marks, since = np.int64(0), np.uint64(0)
    for i in range(flags.size):
        far = np.uint64(flags[i]) >> _U1
        numbers[marks] = since
        marks += np.int64(far)
        since = (since + _U1) * (_U1 - far)
    r = best_rice(numbers, marks, shifts[:0], POSITION_BITS)
    m = min(best_rice(excess, excess.size, shifts, width), width - _U1)
    at = put_golomb(words, put_golomb(words, at, r, _U0), m, _U0)
    at = _put_gaps(words, at, gaps, flags, k)
    parameters[:marks] = r
    return _put_numbers(words, at, numbers[:marks], parameters[:marks], _POSITION_BITS), k, m


def write(
    old_M: NDArray[Any],
    tail: NDArray[Any],
    positions_N: NDArray[np.uint32],
    old_N: NDArray[np.uint64],
    new_N: NDArray[np.uint64],
    exponent_bits: int,
    mantissa_bits: int,
    long_N: NDArray[np.uint64],
    scratch_N: NDArray[np.uint32],
    bytes_N: NDArray[np.uint8],
    words: NDArray[np.uint64],
) -> Word:
    """Writes a chunk's stream into `words`; returns its length in bits. At least one change.

    Scratch: `tail` [64], `long_N` [2, N + 1], `scratch_N` [3, N + 1], `bytes_N` [4, N + 1].
    """
    size = positions_N.size
    width = np.uint64(1 + exponent_bits + mantissa_bits)
    classes_N, flags_N, shifts_N, own_N = bytes_N[0, :size], bytes_N[1, :size], bytes_N[2], bytes_N[3]
    gaps_N, sorted_N, wide_N = scratch_N[0, :size], scratch_N[1, :size], scratch_N[2]
    excess_N, numbers_N = long_N[0], long_N[1]
    e = _choose(old_M, old_N, exponent_bits, mantissa_bits)
    layout = (exponent_bits, mantissa_bits, e)
    limits_C = thresholds_from(e, exponent_bits, mantissa_bits)
    passed_C, following_C = np.zeros(CLASSES, np.int64), np.zeros(CLASSES, np.int64)
    whole = old_M.size // BLOCK * BLOCK
    n: Int = np.int64(0)
    for part in range(2):
        start: Int = np.int64(0)
        stop: Int = np.int64(whole)
        block_B = old_M
        if part:
            start, stop, block_B = stop, np.int64(old_M.size), tail
            tail[:] = 0
            for i in range(whole, old_M.size):
                tail[i - whole] = old_M[i]
        n = _rank(
            block_B,
            start,
            stop,
            positions_N,
            old_N,
            n,
            layout,
            limits_C,
            passed_C,
            following_C,
            classes_N,
            gaps_N,
        )
    first_C = np.zeros(CLASSES + 1, np.int64)
    wide = _sort(old_N, new_N, width, classes_N, gaps_N, first_C, sorted_N, flags_N, wide_N)
    # The excess of each class, in order of position: to choose parameters by.
    ahead_C = np.zeros(CLASSES + 1, np.int64)
    for i in range(wide):
        ahead_C[classes_N[wide_N[i]] + 1] += 1
    for c in range(CLASSES):
        ahead_C[c + 1] += ahead_C[c]
    next_C = ahead_C.copy()
    for i in range(wide):
        n = np.int64(wide_N[i])
        own: Int = np.int64(classes_N[n])
        excess_N[next_C[own]] = _excess(old_N[n], new_N[n], width)
        shift = octaves_below(field_of(old_N[n], exponent_bits, mantissa_bits), e) if own == 0 else _U0
        shifts_N[next_C[own]] = min(shift, np.uint64(31))
        next_C[own] += 1
    words[0] = np.uint64(e)
    at: Word = _E_BITS
    parameters_C = np.zeros(CLASSES, np.uint64)
    before, k_before = np.int64(0), np.int64(0)
    for c in range(CLASSES):
        first, end = first_C[c], first_C[c + 1]
        at = put_golomb(words, at, zigzag(end - first - before), _COUNT_ORDER)
        before = end - first
        if before:
            at, k, parameters_C[c] = _put_class(
                words,
                at,
                sorted_N[first:end],
                flags_N[first:end],
                k_before,
                excess_N[ahead_C[c] : ahead_C[c + 1]],
                shifts_N[ahead_C[c] : ahead_C[c + 1]],
                width,
                numbers_N,
                own_N,
            )
            k_before = np.int64(k)
    for i in range(wide):
        n = np.int64(wide_N[i])
        own = np.int64(classes_N[n])
        shift = octaves_below(field_of(old_N[n], exponent_bits, mantissa_bits), e) if own == 0 else _U0
        own_N[i] = min(parameters_C[own] + shift, width - _U1)
        numbers_N[i] = _excess(old_N[n], new_N[n], width)
    return _put_numbers(words, at, numbers_N[:wide], own_N[:wide], width)
