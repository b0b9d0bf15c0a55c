"""What both coders' changes do to a chunk's incremental sum, and writing them into a state.

Legend: N changed elements, M elements of a chunk or of a tensor's held part.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollwire.kernels.digest import aligned, jit, join_128, lanes, mix_hi, mix_lo

_U0, _U1 = np.uint64(0), np.uint64(1)


def _weigh(
    base_M: NDArray[Any],
    start: np.uint64,
    positions_N: NDArray[np.uint32],
    new_N: NDArray[Any],
    old_N: NDArray[Any],
) -> tuple[np.uint64, np.uint64]:
    lo, hi = _U0, _U0
    for n in range(positions_N.size):
        position = positions_N[n]
        old_N[n] = base_M[position]
        index = start + np.uint64(position)
        old, new = np.uint64(base_M[position]), np.uint64(new_N[n])
        plus, minus = mix_lo(index, new), mix_lo(index, old)
        hi += mix_hi(index, new) - mix_hi(index, old)
        lo += plus
        if lo < plus:
            hi += _U1
        if lo < minus:
            hi -= _U1
        lo -= minus
    return lo, hi


def _scatter(target_M: NDArray[Any], positions_N: NDArray[np.uint32], values_N: NDArray[Any]) -> None:
    for n in range(positions_N.size):
        target_M[positions_N[n]] = values_N[n]


@cache
def _weigh_kernel(lane: int) -> Callable[..., Any]:
    each = lanes(lane)
    return jit(f"UniTuple(uint64, 2)({each}, uint64, {lanes(4)}, {each}, {lanes(lane, readonly=False)})")(
        _weigh
    )


@cache
def _scatter_kernel(lane: int) -> Callable[..., Any]:
    return jit(f"void({lanes(lane, readonly=False)}, {lanes(4)}, {lanes(lane)})")(_scatter)


def weigh(
    base_M: NDArray[Any],
    start: int,
    positions_N: NDArray[np.uint32],
    new_N: NDArray[Any],
    old_N: NDArray[Any],
) -> int:
    """What the changes add to the chunk's sum; `old_N` receives the elements as they are in the chunk `base_M`.

    `start`: the chunk's first element in its tensor. Positions lie within `base_M`, or memory beyond it is read.
    """
    lo, hi = _weigh_kernel(base_M.dtype.itemsize)(aligned(base_M), start, positions_N, new_N, old_N)
    return join_128(lo, hi)


def scatter(target_M: NDArray[Any], positions_N: NDArray[np.uint32], values_N: NDArray[Any]) -> None:
    """target[positions] = values, in place. Positions lie within `target_M`, or memory beyond it is written."""
    _scatter_kernel(target_M.dtype.itemsize)(target_M, positions_N, values_N)
