"""The compiled loops behind `codec`: planes of bytes and strings of a few bits, at the speed of memory.

Legend: C ids in order, P bytes out. The layout is `schemas.routes`'. Every loop runs over whole groups of eight ids; what
is left behind the last group is `schemas.routes`' to pack.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

_Loop = Callable[..., Any]


def _compiled(loop: _Loop) -> _Loop:
    """Cached on disk, without the GIL, compiled for a dtype when it is first met."""
    made: _Loop = numba.njit(cache=True, nogil=True)(loop)
    return made


@_compiled
def bounds(ids_C: NDArray[Any]) -> tuple[np.int64, np.int64]:
    """Smallest and largest id; (0, 0) of none."""
    low, high = np.int64(0), np.int64(0)
    for i in range(ids_C.size):
        value = np.int64(ids_C[i])
        low = min(low, value)
        high = max(high, value)
    return low, high


@_compiled
def pack_bytes(ids_C: NDArray[Any], sentinel: int, shift: int, out_C: NDArray[np.uint8]) -> None:
    """Byte `shift // 8` of every code; an id below 0 has the code `sentinel`."""
    for i in range(ids_C.size):
        value = np.int32(ids_C[i])
        code = np.int32(sentinel) if value < 0 else value
        out_C[i] = np.uint8(code >> np.int32(shift))


@_compiled
def unpack_bytes(low_C: NDArray[np.uint8], ids_C: NDArray[Any]) -> None:
    for i in range(ids_C.size):
        ids_C[i] = low_C[i]


@_compiled
def add_bytes(high_C: NDArray[np.uint8], ids_C: NDArray[Any]) -> None:
    for i in range(ids_C.size):
        ids_C[i] |= np.int32(high_C[i]) << np.int32(8)


@_compiled
def mark_missing(ids_C: NDArray[Any], sentinel: int) -> np.int32:
    """Codes to ids in place: the sentinel becomes -1. Returns the largest code."""
    high = np.int32(0)
    for i in range(ids_C.size):
        value = np.int32(ids_C[i])
        high = max(high, value)
        ids_C[i] = -1 if value == sentinel else value
    return high


@cache
def faulty_rows(top_k: int) -> _Loop:
    """(ids_C): rows of `top_k` ids in which an expert stands twice, or that are recorded in part.

    `top_k` is compiled in: the pairs are unrolled and many rows compared at once.
    """

    def loop(ids_C: NDArray[Any]) -> np.int64:
        faulty = np.int64(0)
        for row in range(ids_C.size // top_k):
            same, missing = np.int32(0), np.int32(0)
            for place in range(top_k):
                value = ids_C[row * top_k + place]
                missing += np.int32(value < 0)
                for other in range(place):
                    same += np.int32(value == ids_C[row * top_k + other])
            # All of a row that was not recorded are equal.
            faulty += np.int64(same > 0) if missing == 0 else np.int64(missing < top_k)
        return faulty

    return _compiled(loop)


@cache
def pack_high(rest: int) -> _Loop:
    """(ids_C, sentinel, shift, out_P): the `rest` bits above `shift` of every code, eight ids in `rest` bytes."""
    mask = np.uint64((1 << rest) - 1)

    def loop(ids_C: NDArray[Any], sentinel: int, shift: int, out_P: NDArray[np.uint8]) -> None:
        for group in range(ids_C.size // 8):
            bits = np.uint64(0)
            for place in range(8):
                value = np.int32(ids_C[group * 8 + place])
                code = np.int32(sentinel) if value < 0 else value
                bits |= (np.uint64(code >> np.int32(shift)) & mask) << np.uint64(place * rest)
            for byte in range(rest):
                out_P[group * rest + byte] = np.uint8(bits >> np.uint64(8 * byte))

    return _compiled(loop)


@cache
def add_high(rest: int) -> _Loop:
    """(high_P, shift, ids_C): puts those bits back, above what stands in `ids_C`."""
    mask = np.uint64((1 << rest) - 1)

    def loop(high_P: NDArray[np.uint8], shift: int, ids_C: NDArray[Any]) -> None:
        for group in range(ids_C.size // 8):
            bits = np.uint64(0)
            for byte in range(rest):
                bits |= np.uint64(high_P[group * rest + byte]) << np.uint64(8 * byte)
            for place in range(8):
                part = np.int32((bits >> np.uint64(place * rest)) & mask)
                ids_C[group * 8 + place] |= part << np.int32(shift)

    return _compiled(loop)
