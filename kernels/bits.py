"""Bit counts and bit streams for compiled loops: one instruction each, which numba has no name for.

A bit stream fills 64-bit words from their lowest bit. `put` and `peek` take at most 57 bits at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numba
import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import types
from numba.extending import intrinsic
from numpy.typing import NDArray

_U0, _U6, _U63, _U64 = np.uint64(0), np.uint64(6), np.uint64(63), np.uint64(64)


def _trailing(_context: Any, value: Any) -> Any:
    def generate(_c: Any, builder: Any, _s: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 0))

    return types.uint64(types.uint64), generate


def _leading(_context: Any, value: Any) -> Any:
    def generate(_c: Any, builder: Any, _s: Any, arguments: Any) -> Any:
        return builder.ctlz(arguments[0], ir.Constant(ir.IntType(1), 0))

    return types.uint64(types.uint64), generate


# For compiled code only: (uint64) -> uint64, 64 for 0.
trailing_zeros: Callable[[np.uint64], np.uint64] = cast(Any, intrinsic(_trailing))
leading_zeros: Callable[[np.uint64], np.uint64] = cast(Any, intrinsic(_leading))


def _bit_length(value: np.uint64) -> np.uint64:
    return np.uint64(_U64 - leading_zeros(value))


def _put(words: NDArray[np.uint64], at: np.uint64, value: np.uint64, count: np.uint64) -> np.uint64:
    """Writes the low `count` bits of `value` (the others are 0) at bit `at`; returns the bit after them.

    Words are zeroed as they are entered: the stream must be written in order, from a zeroed first word.
    """
    word, shift = at >> _U6, at & _U63
    words[word] |= value << shift
    end = at + count
    if (end >> _U6) != word:
        words[word + np.uint64(1)] = (value >> (_U64 - shift)) if shift else _U0
    return end


def _peek(words: NDArray[np.uint64], at: np.uint64) -> np.uint64:
    """The 64 bits from bit `at` on. Reads two words: the caller keeps one spare behind the last."""
    word, shift = at >> _U6, at & _U63
    window: np.uint64 = (words[word] >> shift) | (
        (words[word + np.uint64(1)] << np.uint64(1)) << (_U63 - shift)
    )
    return window


bit_length: Callable[[np.uint64], np.uint64] = numba.njit(cache=True, nogil=True, inline="always")(
    _bit_length
)
put: Callable[[NDArray[np.uint64], np.uint64, np.uint64, np.uint64], np.uint64] = numba.njit(
    cache=True, nogil=True, inline="always"
)(_put)
peek: Callable[[NDArray[np.uint64], np.uint64], np.uint64] = numba.njit(
    cache=True, nogil=True, inline="always"
)(_peek)
