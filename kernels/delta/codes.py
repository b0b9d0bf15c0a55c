"""Codes of numbers in a bit stream, for compiled loops: Rice and exponential Golomb, with an escape that bounds both.

    Rice, k          q ones (q = x >> k) and a zero, then the k low bits of x; from q = 16 on 16 ones, then x in a stated
                     number of bits
    exp. Golomb, k   n - 1 zeros, the n bits of (x >> k) + 1 from the highest, which is 1: written as the 1, then the low
                     n - 1 bits; then the k low bits of x. Order 0 of x is Elias' gamma code of x + 1. Numbers below 2^30

Readers look at 64 bits at a time and never move by more than 80: whoever keeps two spare words behind the last, and
compares the place with the end after each symbol, reads nothing that is not there.
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rollwire.kernels.bits import bit_length, peek, put, trailing_zeros
from rollwire.kernels.digest import jit

# Scalars of compiled code: their width is the signatures' business, and numpy's scalar types mix badly with int.
Int: TypeAlias = Any  # int64
Word: TypeAlias = Any  # uint64

ESCAPE: Final = 16  # quotient from which on a Rice code gives up
TOO_MUCH: Final = 1 << 40  # what a reader gives for no number that a writer writes

_U0, _U1, _U16, _U30, _U32, _U64 = (np.uint64(n) for n in (0, 1, 16, 30, 32, 64))
_ONES = np.uint64(0xFFFF)
_TOO_MUCH = np.uint64(TOO_MUCH)


@jit()
def low_mask(count: Word) -> Word:
    """`count` ones, below 64."""
    return (_U1 << count) - _U1


@jit()
def zigzag(x: Int) -> Word:
    return np.uint64((x << 1) ^ (x >> 63))


@jit()
def unzigzag(x: Word) -> Int:
    return np.int64(x >> _U1) ^ -np.int64(x & _U1)


@jit()
def put_golomb(words: NDArray[np.uint64], at: Word, x: Word, order: Word) -> Word:
    high = (x >> order) + _U1
    size = bit_length(high) - _U1
    at = put(words, at, _U1 << size, size + _U1)
    at = put(words, at, high & low_mask(size), size)
    return put(words, at, x & low_mask(order), order)


@jit()
def get_golomb(words: NDArray[np.uint64], at: Word, order: Word) -> tuple[Word, Word]:
    """The number and the place behind it."""
    window = peek(words, at)
    size = trailing_zeros(window)
    if size > _U30:
        return _TOO_MUCH, at
    window >>= size + _U1
    x = (((_U1 << size) | (window & low_mask(size))) - _U1) << order
    at += size + size + _U1
    return x | (peek(words, at) & low_mask(order)), at + order


@jit()
def get_rice(words: NDArray[np.uint64], at: Word, k: Word, escape_bits: Word) -> tuple[Word, Word]:
    """The number and the place behind it; k below 64."""
    q = trailing_zeros(~peek(words, at))
    if q < _U16:
        at += q + _U1
        return (q << k) | (peek(words, at) & low_mask(k)), at + k
    at += _U16
    x = peek(words, at)
    return (x & low_mask(escape_bits) if escape_bits < _U64 else x), at + escape_bits


@jit()
def best_rice(numbers: NDArray[np.uint32], count: Int, shifts: NDArray[np.uint8], escape_bits: Int) -> Word:
    """The best parameter for the first `count` numbers: of the one that their mean suggests and those beside it.

    `shifts`: how far each number's own parameter lies beyond the common one; an empty array stands for zeros.
    """
    total = 0.0
    for i in range(count):
        total += float(numbers[i] >> shifts[i]) if shifts.size else float(numbers[i])
    guess = 0
    # A geometric distribution's best parameter is about the binary logarithm of 0.69 of its mean.
    while guess < 32 and total * 0.69 > float(count << guess) * 1.41:
        guess += 1
    best: Int = np.int64(1) << 62
    parameter: Int = 0
    for k in range(max(guess - 1, 0), guess + 2):
        cost: Int = np.int64(0)
        if shifts.size:
            for i in range(count):
                own = min(np.uint64(k) + np.uint64(shifts[i]), np.uint64(63))
                q = np.int64(np.uint64(numbers[i]) >> own)
                cost += q + np.int64(own) if q < ESCAPE else escape_bits + ESCAPE - 1
        else:
            for i in range(count):
                q = np.int64(numbers[i] >> np.uint32(k))
                cost += q + k if q < ESCAPE else escape_bits + ESCAPE - 1
        if cost < best:
            best, parameter = cost, k
    return np.uint64(parameter)
