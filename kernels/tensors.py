"""Tensors as bits: dtype tag, shape, and the elements as unsigned lanes. Needs no torch (law 5: bits, not floats).

A state is `name -> Tensor`, in the layout and with the names that Hugging Face writes to disk. Dtype tags are those
of the safetensors format.
"""

from __future__ import annotations

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

_LANE_DTYPES: Final[dict[int, np.dtype[Any]]] = {n: np.dtype(f"<u{n}") for n in (1, 2, 4, 8)}


class Tensor(NamedTuple):
    dtype: str  # a key of LANE_BYTES
    shape: tuple[int, ...]  # () is a scalar, and has one element
    bits: NDArray[Any]  # [prod(shape)] little-endian unsigned integers of LANE_BYTES[dtype] bytes, contiguous

    @property
    def nbytes(self) -> int:
        return int(self.bits.nbytes)


State = Mapping[str, Tensor]


def lane_dtype(dtype: str) -> np.dtype[Any]:
    """The unsigned integer type of one element. Raises `StateMismatch` for an unknown tag (C31)."""
    if dtype not in LANE_BYTES:
        raise StateMismatch(f"unknown tensor dtype {dtype!r}; known are {', '.join(LANE_BYTES)}")
    return _LANE_DTYPES[LANE_BYTES[dtype]]


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
