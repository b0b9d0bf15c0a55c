"""What a trainer may hand to `SnapshotPublisher.publish`: tensors of ours, numpy arrays, torch tensors.

torch is imported only where a torch tensor is handed in, and then it is loaded already.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from rollwire.consumers.weights.buffers import Allocate, Source
from rollwire.kernels.tensors import State, Tensor, lane_dtype
from rollwire.schemas.errors import StateMismatch

NamedTensors = Mapping[str, Any] | Iterable[tuple[str, Any]]

_TAGS: Final = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "int16": "I16", "uint16": "U16", "float16": "F16", "int32": "I32",
    "uint32": "U32", "float32": "F32", "int64": "I64", "uint64": "U64", "float64": "F64",
}  # fmt: skip


class HostSource(NamedTuple):
    """An array in ordinary memory, of any layout (its logical order is kept: C29)."""

    dtype: str
    shape: tuple[int, ...]
    lanes: NDArray[Any]  # unsigned lanes of the dtype
    start: int = 0

    @property
    def elements(self) -> int:
        return int(self.lanes.size)

    @property
    def allocate(self) -> Allocate | None:
        return None

    def copy_to(self, bits_N: NDArray[Any]) -> None:
        np.copyto(bits_N.reshape(self.lanes.shape), self.lanes)

    def wait(self) -> None:
        """It was there when `copy_to` returned."""


def sources_of(named_tensors: NamedTensors) -> dict[str, Source]:
    """By name. Raises `StateMismatch` for a name that comes twice and for what is no tensor."""
    sources: dict[str, Source] = {}
    for name, value in _pairs(named_tensors):
        if name in sources:
            raise StateMismatch(f"tensor {name!r} is given twice: a tied tensor is published under one name")
        sources[name] = source_of(name, value)
    return sources


def source_of(name: str, value: Any) -> Source:
    """Raises `StateMismatch` for what is no tensor, and for an element type that no tag stands for (C31)."""
    if isinstance(value, Tensor):
        return HostSource(value.dtype, value.shape, value.bits)
    if isinstance(value, np.ndarray):
        tag = _TAGS.get(value.dtype.name)
        if tag is None:
            raise StateMismatch(
                f"{name}: arrays of {value.dtype} are not published; known are {', '.join(_TAGS)}"
            )
        return HostSource(tag, value.shape, value.view(lane_dtype(tag)))
    if _is_torch(value):
        from rollwire.consumers.torch_states import torch_source

        return torch_source(name, value)
    if isinstance(getattr(value, "dtype", None), str) and callable(getattr(value, "copy_to", None)):
        ready: Source = value
        return ready
    raise StateMismatch(f"{name} is a {type(value).__name__}, no tensor")


def _pairs(named_tensors: NamedTensors) -> Iterable[tuple[str, Any]]:
    if isinstance(named_tensors, Mapping):
        return cast("Mapping[str, Any]", named_tensors).items()
    return named_tensors


def _is_torch(value: Any) -> bool:
    return any(kind.__module__.split(".")[0] == "torch" for kind in type(value).__mro__)


def copy_state(named_tensors: NamedTensors) -> State:
    """A State of copies, in memory of its own. Raises `StateMismatch`."""
    state: dict[str, Tensor] = {}
    for name, source in sources_of(named_tensors).items():
        bits_N = np.empty(source.elements, lane_dtype(source.dtype))
        source.copy_to(bits_N)
        source.wait()
        state[name] = Tensor(source.dtype, source.shape, bits_N, source.start)
    return state


def as_state(named_tensors: NamedTensors) -> State:
    """The same mapping, if it holds tensors of ours alone: only those can be given away. Raises `StateMismatch`."""
    pairs = dict(_pairs(named_tensors))
    for name, value in pairs.items():
        if not isinstance(value, Tensor):
            raise StateMismatch(
                f"{name} is a {type(value).__name__}: what is not a State is published by a copy (copy=True)"
            )
    return pairs
