"""Between a torch module and a State, for any module whose names in memory are those on disk.

That is so for dense Hugging Face models. A model that fuses its experts in memory has other names there than
`save_pretrained` writes; its trainer makes the State itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from rollwire.consumers.weights.buffers import Allocate, Source
from rollwire.kernels.tensors import State, Tensor, tensor
from rollwire.schemas.errors import StateMismatch

_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
_TAGS = {dtype: tag for tag, dtype in _DTYPES.items()}
_ALL_TAGS: Final = {
    **_TAGS,
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.int64: "I64",
    torch.uint64: "U64",
}
_BY_TAG: Final = {tag: dtype for dtype, tag in _ALL_TAGS.items()}
# numpy's spelling of a lane, for torch to look at: torch has no arithmetic on wider unsigned lanes, but copies bits.
_SIGNED: Final = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}


class TorchSource(NamedTuple):
    """A torch tensor on any device, of any layout, or elements [start, start + elements) of one of shape `shape`."""

    dtype: str  # published as; floats are rounded to it (nearest, ties to even)
    shape: tuple[int, ...]
    value: torch.Tensor
    start: int = 0

    @property
    def elements(self) -> int:
        return self.value.numel()

    @property
    def allocate(self) -> Allocate | None:
        return _page_locked if self.value.is_cuda else None

    def copy_to(self, bits_N: NDArray[Any]) -> None:
        lanes_N = torch.from_numpy(bits_N.view(_SIGNED[bits_N.dtype.itemsize]))
        into = lanes_N.view(_BY_TAG[self.dtype]).view(self.value.shape)
        with torch.no_grad():
            into.copy_(self.value, non_blocking=self.value.is_cuda)

    def wait(self) -> None:
        if self.value.is_cuda:
            torch.cuda.current_stream(self.value.device).synchronize()


def torch_source(
    name: str, value: torch.Tensor, dtype: Literal["BF16", "F16", "F32"] | None = None
) -> TorchSource:
    """`dtype`: what floats of at most 32 bits are rounded to; None publishes every tensor as it is.

    Raises `StateMismatch` for an element type that no tag stands for (C31) and for a sharded tensor.
    """
    if type(value).__module__.startswith("torch.distributed"):
        raise StateMismatch(
            f"{name} is sharded ({type(value).__name__}): publish it with rollwire.consumers.adapters.sharded"
        )
    tag = _ALL_TAGS.get(value.dtype)
    if tag is None:
        raise StateMismatch(f"{name} is {value.dtype}; known are {', '.join(map(str, _ALL_TAGS))}")
    if dtype is not None and value.dtype in _TAGS:
        tag = dtype
    return TorchSource(tag, tuple(value.shape), value.detach())


def module_sources(
    module: torch.nn.Module, dtype: Literal["BF16", "F16", "F32"] | None = "BF16"
) -> dict[str, Source]:
    """What `module_state` copies, uncopied: for `SnapshotPublisher.publish`, which copies it into its own memory."""
    return {name: torch_source(name, value, dtype) for name, value in _once(module)}


def _page_locked(size: int) -> NDArray[np.uint8]:
    memory: NDArray[np.uint8] = torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()
    return memory


def _once(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    # `named_parameters` leaves a tied parameter's second name out, `state_dict` leaves buffers out that are not persistent.
    first = {name for name, _ in module.named_parameters()} | {name for name, _ in module.named_buffers()}
    return ((name, value) for name, value in module.state_dict().items() if name in first)


def module_state(module: torch.nn.Module, dtype: Literal["BF16", "F16", "F32"] = "BF16") -> State:
    """A copy of the module's parameters and persistent buffers. Floats are rounded to `dtype` (nearest, ties to even).

    A tied parameter stands once, under its first name, as on disk. Raises `StateMismatch` for an element type that is
    neither a float of at most 32 bits nor int64.
    """
    # `named_parameters` leaves a tied parameter's second name out, `state_dict` leaves buffers out that are not persistent.
    first = {name for name, _ in module.named_parameters()} | {name for name, _ in module.named_buffers()}
    return {name: _tensor(name, value, dtype) for name, value in module.state_dict().items() if name in first}


def load_module(module: torch.nn.Module, state: State) -> None:
    """Puts a State of `module_state` into the module. Raises `StateMismatch`, before anything is written, for names or
    shapes that differ (C27)."""
    held = module.state_dict()
    first = {name for name, _ in module.named_parameters()} | {name for name, _ in module.named_buffers()}
    wanted = {name: tuple(value.shape) for name, value in held.items() if name in first}
    given = {name: one.shape for name, one in state.items()}
    if wanted != given:
        differ = sorted(name for name in set(wanted) | set(given) if wanted.get(name) != given.get(name))
        raise StateMismatch(f"{len(differ)} tensors differ in name or shape: {', '.join(differ[:5])}")
    with torch.no_grad():
        for name, one in state.items():
            held[name].copy_(_values(name, one))


def _tensor(name: str, value: torch.Tensor, dtype: str) -> Tensor:
    value = value.detach().cpu()
    if value.dtype in _TAGS:
        value, tag = value.to(_DTYPES[dtype]), dtype
    elif value.dtype == torch.int64:
        tag = "I64"
    else:
        raise StateMismatch(f"{name} is {value.dtype}; known are bfloat16, float16, float32 and int64")
    # As bytes, since numpy has no bfloat16; a copy, since the module goes on changing.
    raw = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return tensor(tag, tuple(value.shape), raw)


def _values(name: str, one: Tensor) -> torch.Tensor:
    dtype = torch.int64 if one.dtype == "I64" else _DTYPES.get(one.dtype)
    if dtype is None:
        raise StateMismatch(f"{name} is {one.dtype}; known are BF16, F16, F32 and I64")
    return torch.frombuffer(bytearray(one.bits.tobytes()), dtype=dtype).reshape(one.shape)
