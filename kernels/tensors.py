"""Tensors as bits: dtype tag, shape, and the elements as unsigned lanes. Needs no torch (law 5: bits, not floats).

A state is `name -> Tensor`, in the layout and with the names that Hugging Face writes to disk. Dtype tags are those
of the safetensors format.

A `Tensor` may hold a part of a tensor only (a replica's slice, a rank's shard). Parts begin and end on the chunk grid
or at the tensor's end: chunk k of a tensor is its flat elements [k C, (k + 1) C), C = `CHUNK_ELEMENTS`. The grid is the unit
of digests and deltas, so whoever holds a part reads and checks just its chunks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollwire.schemas.errors import StateMismatch

# Bytes of one element. Packed sub-byte formats travel as U8 with their packed shape.
LANE_BYTES: Final[dict[str, int]] = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "I64": 8,
    "U64": 8,
    "F64": 8,
}

# A power of two. Small enough that a slice wastes little by rounding out to the grid and that a chunk of both states
# stays in a core's second cache; large enough that 40 bytes of table a chunk are lost in its payload.
CHUNK_ELEMENTS: Final = 1 << 18

_LANE_DTYPES: Final[dict[int, np.dtype[Any]]] = {n: np.dtype(f"<u{n}") for n in (1, 2, 4, 8)}


class Tensor(NamedTuple):
    dtype: str  # a key of LANE_BYTES
    shape: tuple[int, ...]  # of the whole tensor; () is a scalar, and has one element
    bits: NDArray[Any]  # little-endian unsigned integers of LANE_BYTES[dtype] bytes, flat, contiguous
    start: int = 0  # the flat element that bits[0] is; bits.size == elements for a whole tensor

    @property
    def nbytes(self) -> int:
        """Of what is held."""
        return int(self.bits.nbytes)

    @property
    def elements(self) -> int:
        """Of the whole tensor."""
        return math.prod(self.shape)

    @property
    def whole(self) -> bool:
        return self.start == 0 and self.bits.size == self.elements


State = Mapping[str, Tensor]


def lane_dtype(dtype: str) -> np.dtype[Any]:
    """The unsigned integer type of one element. Raises `StateMismatch` for an unknown tag (C31)."""
    if dtype not in LANE_BYTES:
        raise StateMismatch(f"unknown tensor dtype {dtype!r}; known are {', '.join(LANE_BYTES)}")
    return _LANE_DTYPES[LANE_BYTES[dtype]]


def chunk_count(elements: int) -> int:
    """Chunks of a tensor; an empty one has none."""
    return -(-elements // CHUNK_ELEMENTS)


def held_chunks(t: Tensor, name: str = "a tensor") -> range:
    """The chunks that `t` holds. Raises `StateMismatch` for a part that does not lie on the chunk grid."""
    end = t.start + t.bits.size
    if t.start % CHUNK_ELEMENTS or end > t.elements or (end % CHUNK_ELEMENTS and end != t.elements):
        raise StateMismatch(
            f"{name}: elements {t.start} to {end} of {t.elements} are no whole chunks of {CHUNK_ELEMENTS}"
        )
    return range(t.start // CHUNK_ELEMENTS, chunk_count(end))


def part_of(t: Tensor, start: int, end: int) -> Tensor:
    """A view of the whole tensor's elements from `start` to `end`, rounded out to the chunk grid."""
    first = start // CHUNK_ELEMENTS * CHUNK_ELEMENTS
    last = min(chunk_count(end) * CHUNK_ELEMENTS, t.elements)
    return t._replace(bits=t.bits[first - t.start : last - t.start], start=first)


def tensor(dtype: str, shape: tuple[int, ...], data: bytes | bytearray | memoryview | NDArray[Any]) -> Tensor:
    """A tensor from raw little-endian bytes or from an array of any layout (its logical order is kept: C29).

    Raises `StateMismatch` where the size does not fit the shape.
    """
    lane = lane_dtype(dtype)
    if isinstance(data, np.ndarray):
        flat = np.ascontiguousarray(data).reshape(-1)
        if flat.dtype.itemsize != lane.itemsize:
            raise StateMismatch(
                f"{dtype} elements have {lane.itemsize} bytes, the array's have {flat.dtype.itemsize}"
            )
        bits = flat.view(lane)
    else:
        if len(data) % lane.itemsize:
            raise StateMismatch(f"{len(data)} bytes are no whole number of {dtype} elements")
        bits = np.frombuffer(data, dtype=lane)
    if bits.size != int(np.prod(shape, dtype=np.int64)):
        raise StateMismatch(
            f"shape {shape} needs {int(np.prod(shape, dtype=np.int64))} elements, got {bits.size}"
        )
    return Tensor(dtype, tuple(shape), bits)
