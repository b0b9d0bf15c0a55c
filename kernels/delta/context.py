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

Codes are those of `codes`: gaps and marks escape to 20 bits, an excess to as many as an element has.

Legend: N changed elements, M elements of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rollwire.kernels.delta import context_read, context_write
from rollwire.kernels.delta.gap import (
    BAD_PARAMETER,
    CUT,
    NO_CHANGE,
    OK,
    OUT_OF_RANGE,
    Diff,
    EncodedChunk,
    GapEncoder,
)
from rollwire.kernels.delta.octaves import BLOCK
from rollwire.kernels.digest import aligned, jit, lanes
from rollwire.kernels.tensors import CHUNK_ELEMENTS

__all__ = (
    "BAD_PARAMETER",
    "CUT",
    "LAYOUTS",
    "NO_CHANGE",
    "OK",
    "OUT_OF_RANGE",
    "ContextEncoder",
    "decode_context",
)

# Bits of the exponent and of the mantissa. What is not here has no exponent, and no classes.
LAYOUTS: Final[dict[str, tuple[int, int]]] = {
    "F8_E4M3": (4, 3),
    "F8_E5M2": (5, 2),
    "F16": (5, 10),
    "BF16": (8, 7),
    "F32": (8, 23),
    "F64": (11, 52),
}

# At most, a change: gap 36, sign 1, mark 36, excess 80 bits; a class: five numbers of 61.
_WORDS: Final = CHUNK_ELEMENTS * 160 // 64 + 64


@cache
def _write_kernel(lane: int) -> Callable[..., Any]:
    u64 = lanes(8)
    return jit(
        f"uint64({lanes(lane)}, {lanes(lane, readonly=False)}, {lanes(4)}, {u64}, {u64}, int64, int64, "
        f"Array(uint64, 2, 'C'), Array(uint32, 2, 'C'), Array(uint8, 2, 'C'), {lanes(8, readonly=False)})"
    )(context_write.write)


@cache
def _read_kernel(lane: int) -> Callable[..., Any]:
    scratch = lanes(lane, readonly=False)
    return jit(
        f"int64({lanes(lane)}, {scratch}, int64, int64, {lanes(1)}, {lanes(4, readonly=False)}, {scratch})"
    )(context_read.read)


class ContextEncoder:
    """Scratch for one chunk at a time: 13 MiB, of which only touched pages cost memory. One a thread."""

    def __init__(self) -> None:
        self._differ = GapEncoder()
        self._long = np.empty((2, CHUNK_ELEMENTS + 1), dtype=np.uint64)
        self._numbers = np.empty((3, CHUNK_ELEMENTS + 1), dtype=np.uint32)
        self._bytes = np.empty((4, CHUNK_ELEMENTS + 1), dtype=np.uint8)
        self._words = np.empty(_WORDS, dtype=np.uint64)

    def pack(self, old_M: NDArray[Any], diff: Diff, dtype: str) -> bytes:
        """The payload of these changes to the chunk `old_M`, at least one. `dtype` is one of `LAYOUTS`."""
        bits = int(
            _write_kernel(old_M.dtype.itemsize)(
                aligned(old_M),
                np.empty(BLOCK, old_M.dtype),
                diff.positions_N,
                diff.old_N,
                diff.new_N,
                *LAYOUTS[dtype],
                self._long,
                self._numbers,
                self._bytes,
                self._words,
            )
        )
        return self._words[: bits // 64 + 1].view(np.uint8)[: -(-bits // 8)].tobytes()

    def encode(self, old_M: NDArray[Any], new_M: NDArray[Any], dtype: str) -> EncodedChunk:
        """Two chunks of at most `CHUNK_ELEMENTS` lanes of `dtype`. The payload of equal ones is empty."""
        diff = self._differ.diff(old_M, new_M)
        return EncodedChunk(
            diff.positions_N.size, self.pack(old_M, diff, dtype) if diff.positions_N.size else b""
        )


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
        _read_kernel(base_M.dtype.itemsize)(
            aligned(base_M),
            np.empty(BLOCK, base_M.dtype),
            *LAYOUTS[dtype],
            aligned(payload),
            positions_N,
            new_N,
        )
    )
