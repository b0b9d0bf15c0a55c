"""Between a torch module and a State, for any module whose names in memory are those on disk.

That is so for dense Hugging Face models. A model that fuses its experts in memory has other names there than
`save_pretrained` writes; its trainer makes the State itself.
"""

from __future__ import annotations

from typing import Literal

import torch

from rollwire.kernels.tensors import State, Tensor, tensor
from rollwire.schemas.errors import StateMismatch

_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
_TAGS = {dtype: tag for tag, dtype in _DTYPES.items()}


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
