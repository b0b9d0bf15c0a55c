"""What both coders' changes do to a chunk's incremental sum, and writing them into a state.

Legend: N changed elements, M elements of a chunk or of a tensor's held part.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollwire.kernels.digest import MASK_128, aligned, jit, lanes, mix_hi, mix_lo, plain

_U32, _LOW = np.uint64(32), np.uint64(0xFFFFFFFF)


@jit()
def weigh_lanes(
    start: np.uint64, positions_N: NDArray[np.uint32], old_N: NDArray[Any], new_N: NDArray[Any]
) -> tuple[np.int64, np.int64, np.uint64]:
    # Low halves are added as two 32-bit streams, so that no carry is lost and the loop is vector code.
    low, high, top = np.int64(0), np.int64(0), np.uint64(0)
    for n in range(positions_N.size):
        index = start + np.uint64(positions_N[n])
        old, new = np.uint64(old_N[n]), np.uint64(new_N[n])
        plus, minus = mix_lo(index, new), mix_lo(index, old)
        low += np.int64(plus & _LOW) - np.int64(minus & _LOW)
        high += np.int64(plus >> _U32) - np.int64(minus >> _U32)
        top += mix_hi(index, new) - mix_hi(index, old)
    return low, high, top


@jit()
def gather_lanes(base_M: NDArray[Any], positions_N: NDArray[np.uint32], old_N: NDArray[Any]) -> None:
    for n in range(positions_N.size):
        old_N[n] = base_M[positions_N[n]]


@jit()
def scatter_lanes(target_M: NDArray[Any], positions_N: NDArray[np.uint32], values_N: NDArray[Any]) -> None:
    for n in range(positions_N.size):
        target_M[positions_N[n]] = values_N[n]


@cache
def _weigh_kernel(lane: int) -> Callable[..., Any]:
    return jit(f"Tuple((int64, int64, uint64))(uint64, {lanes(4)}, {lanes(lane)}, {lanes(lane)})")(
        plain(weigh_lanes)
    )


@cache
def _gather_kernel(lane: int) -> Callable[..., Any]:
    return jit(f"void({lanes(lane)}, {lanes(4)}, {lanes(lane, readonly=False)})")(plain(gather_lanes))


@cache
def _scatter_kernel(lane: int) -> Callable[..., Any]:
    return jit(f"void({lanes(lane, readonly=False)}, {lanes(4)}, {lanes(lane)})")(plain(scatter_lanes))


def weigh(start: int, positions_N: NDArray[np.uint32], old_N: NDArray[Any], new_N: NDArray[Any]) -> int:
    """What changes add to a chunk's sum, modulo 2^128; `start`: the chunk's first element in its tensor. N <= 2^24."""
    low, high, top = weigh_parts(start, positions_N, old_N, new_N)
    return (low + (high << 32) + (top << 64)) & MASK_128


def weigh_parts(
    start: int, positions_N: NDArray[np.uint32], old_N: NDArray[Any], new_N: NDArray[Any]
) -> tuple[int, int, int]:
    """As `weigh`, as three numbers: (a, b, c) stand for a + 2^32 b + 2^64 c."""
    low, high, top = _weigh_kernel(old_N.dtype.itemsize)(start, positions_N, old_N, new_N)
    return int(low), int(high), int(top)


def gather(base_M: NDArray[Any], positions_N: NDArray[np.uint32], old_N: NDArray[Any]) -> None:
    """old = base[positions]. Positions lie within `base_M`, or memory beyond it is read."""
    _gather_kernel(base_M.dtype.itemsize)(aligned(base_M), positions_N, old_N)


def scatter(target_M: NDArray[Any], positions_N: NDArray[np.uint32], values_N: NDArray[Any]) -> None:
    """target[positions] = values, in place. Positions lie within `target_M`, or memory beyond it is written."""
    _scatter_kernel(target_M.dtype.itemsize)(target_M, positions_N, values_N)
