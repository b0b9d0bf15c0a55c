"""Between the module in memory and a State in Hugging Face's layout on disk (one tensor per expert projection).

In memory each layer's experts are two fused tensors, `gate_up_proj` [E, 2I, H] and `down_proj` [E, H, I]; on disk they
are `experts.N.{gate,up,down}_proj.weight`, as transformers' `save_pretrained` writes them. A fused tensor is the disk
tensors laid end to end, so both directions are one flat copy cut at the right places.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor as TorchTensor

from rollwire.kernels.policy.config import PolicyConfig
from rollwire.kernels.policy.model import Policy
from rollwire.kernels.tensors import State, Tensor
from rollwire.schemas.errors import StateMismatch

_BF16: Final = "BF16"
_F32: Final = "F32"


class DiskTensor(NamedTuple):
    """Elements [start, end) of the flat parameter vector."""

    name: str
    shape: tuple[int, ...]
    start: int
    end: int


@lru_cache(maxsize=16)
def disk_layout(config: PolicyConfig) -> tuple[DiskTensor, ...]:
    """The tensors on disk, in the order of the flat parameter vector (`Policy.parameters()` laid end to end)."""
    tensors: list[DiskTensor] = []
    at = 0

    def add(name: str, shape: tuple[int, ...]) -> None:
        nonlocal at
        size = int(np.prod(shape))
        tensors.append(DiskTensor(name, shape, at, at + size))
        at += size

    for name, shape in Policy.shapes(config):
        if name.endswith(".experts.gate_up_proj"):
            prefix, (count, double, hidden) = name.removesuffix("gate_up_proj"), shape
            for expert in range(count):
                add(f"{prefix}{expert}.gate_proj.weight", (double // 2, hidden))
                add(f"{prefix}{expert}.up_proj.weight", (double // 2, hidden))
        elif name.endswith(".experts.down_proj"):
            prefix, (count, hidden, width) = name.removesuffix("down_proj"), shape
            for expert in range(count):
                add(f"{prefix}{expert}.down_proj.weight", (hidden, width))
        else:
            add(name, shape)
    return tuple(tensors)


def flat_parameters(policy: Policy) -> TorchTensor:
    """A copy of all parameters laid end to end, f32 [P], in the order of `disk_layout`."""
    with torch.no_grad():
        return torch.cat([p.reshape(-1) for p in policy.parameters()])


def set_flat_parameters(policy: Policy, flat_P: TorchTensor) -> None:
    """Writes a flat f32 [P] vector into the parameters."""
    start = 0
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.copy_(flat_P[start : start + parameter.numel()].view_as(parameter))
            start += parameter.numel()


def flat_state(config: PolicyConfig, flat_P: TorchTensor, dtype: Literal["BF16", "F32"] = _BF16) -> State:
    """State of a flat f32 [P] vector. BF16 rounds to nearest, ties to even. The State owns its memory."""
    flat = flat_P.detach().to("cpu", torch.float32)
    bits: NDArray[np.uint16] | NDArray[np.uint32]
    if dtype == _BF16:
        bits = flat.to(torch.bfloat16).view(torch.uint16).numpy()
    elif dtype == _F32:
        bits = flat.clone().view(torch.uint32).numpy()
    else:
        raise StateMismatch(f"a policy is written as BF16 or F32, not {dtype}")
    layout = disk_layout(config)
    if bits.size != layout[-1].end:
        raise StateMismatch(f"{bits.size} parameters; the configuration has {layout[-1].end}")
    return {t.name: Tensor(dtype, t.shape, bits[t.start : t.end]) for t in layout}


def state_flat(config: PolicyConfig, state: State) -> TorchTensor:
    """The flat f32 [P] vector of a State; BF16, F16 and F32 tensors are exact in it.

    Raises `StateMismatch`, before anything is written, for a tensor that is missing, unknown (C27), of another shape
    or of a type that is no float.
    """
    layout = disk_layout(config)
    names = {t.name for t in layout}
    missing, unknown = sorted(names - set(state)), sorted(set(state) - names)
    if missing or unknown:
        raise StateMismatch(
            f"tensors missing: {missing[:3]}, unknown: {unknown[:3]} ({len(missing)}, {len(unknown)})"
        )
    flat = np.empty(layout[-1].end, dtype=np.uint32)
    for want in layout:
        held = state[want.name]
        if held.shape != want.shape or held.bits.size != want.end - want.start:
            raise StateMismatch(f"{want.name} has shape {held.shape}, expected {want.shape}")
        into = flat[want.start : want.end]
        if held.dtype == _BF16:
            np.left_shift(held.bits, np.uint32(16), out=into, dtype=np.uint32)
        elif held.dtype == _F32:
            into[:] = held.bits
        elif held.dtype == "F16":
            into.view(np.float32)[:] = held.bits.view(np.float16)
        else:
            raise StateMismatch(f"{want.name} is {held.dtype}; a policy takes BF16, F16 or F32")
    return torch.from_numpy(flat.view(np.float32))


def to_state(policy: Policy, dtype: Literal["BF16", "F32"] = _BF16) -> State:
    """The policy's weights as a State of their own memory, named as on disk."""
    return flat_state(policy.config, flat_parameters(policy), dtype)


def load_state(policy: Policy, state: State) -> None:
    """Puts a State into the policy. Raises `StateMismatch` before anything is written."""
    set_flat_parameters(policy, state_flat(policy.config, state))
