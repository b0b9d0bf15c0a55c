"""A torch module in this process, changed in place. torch is imported when one is made, and not before.

Parameters in host memory are written through numpy views of their own storage, element by element, inside the pause.
On a device, or where a parameter is not contiguous, the tensors that changed are made ready beside the module and copied
over inside the pause; until the version is proved they need room twice more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from rollwire.consumers.weights.targets.numpy_state import NumpyTarget
from rollwire.consumers.weights.targets.scatter import check_layout
from rollwire.consumers.weights.targets.target import Sample, Serving, Update
from rollwire.kernels.tensors import State, Tensor, lane_dtype
from rollwire.schemas.errors import StateMismatch, TargetFailed

if TYPE_CHECKING:
    import torch

Pause = Callable[[], AbstractContextManager[object]]

_TAGS: Final = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "int16": "I16",
    "float16": "F16",
    "bfloat16": "BF16",
    "int32": "I32",
    "float32": "F32",
    "int64": "I64",
    "float64": "F64",
}


class TorchTarget:
    """Implements `Target`. The module's names, shapes and element types are those of the version; nothing is cast.

    A tied parameter stands under its first name, as on disk; buffers that are not persistent are none of the version's.
    `pause` gives a context in which nobody runs the module.
    """

    def __init__(self, module: torch.nn.Module, *, pause: Pause | None = None) -> None:
        """Raises `StateMismatch` for an element type that no version has."""
        first = {name for name, _ in module.named_parameters()} | {n for n, _ in module.named_buffers()}
        self._values = {name: value for name, value in module.state_dict().items() if name in first}
        self._tags = {name: _tag(name, value) for name, value in self._values.items()}
        self._pause: Pause = pause or nullcontext
        in_place = all(v.device.type == "cpu" and v.is_contiguous() for v in self._values.values())
        self._views = NumpyTarget(self._view(), pause=self._pause) if in_place else None
        self._fresh: dict[str, torch.Tensor] = {}
        self._before: dict[str, torch.Tensor] = {}
        self._applied = False

    @property
    def name(self) -> str:
        return "torch"

    def held(self) -> State | None:
        return None if self._views is None else self._views.held()

    def serving(self) -> Serving | None:
        return None

    def stage(self, update: Update) -> None:
        if self._views is not None:
            self._views.stage(update)
            return
        self._fresh, self._before, self._applied = {}, {}, False
        # Of a device's tensors only the layout is compared: their bits stay where they are.
        check_layout(self._layout(), update.state)
        changed = update.state.keys() if update.changed is None else update.changed
        for name in changed:
            value = self._values[name]
            self._fresh[name] = _as_torch(update.state[name], value)
            self._before[name] = value.detach().clone()

    def swap(self) -> float:
        if self._views is not None:
            return self._views.swap()
        with self._pause():
            started = time.perf_counter()
            self._applied = True
            self._put(self._fresh)
            return (time.perf_counter() - started) * 1e3

    def read_back(self, samples: Sequence[Sample]) -> list[NDArray[Any]] | None:
        if self._views is not None:
            return self._views.read_back(samples)
        found: list[NDArray[Any]] = []
        for name, start, end in samples:
            part = self._values[name].detach().reshape(-1)[start:end].cpu()
            found.append(_bits(part, self._tags[name]).copy())
        return found

    def keep(self) -> None:
        if self._views is not None:
            self._views.keep()
        self._fresh, self._before, self._applied = {}, {}, False

    def undo(self) -> None:
        if self._views is not None:
            self._views.undo()
            return
        before, self._before, self._fresh = self._before, {}, {}
        if self._applied:
            self._applied = False
            with self._pause():
                self._put(before)

    def close(self) -> None:
        pass

    def _view(self) -> dict[str, Tensor]:
        return {
            name: Tensor(self._tags[name], tuple(value.shape), _bits(value.detach(), self._tags[name]))
            for name, value in self._values.items()
        }

    def _layout(self) -> dict[str, Tensor]:
        """The module's tensors without their bits: arrays of the right size that take no memory."""
        return {
            name: Tensor(
                tag,
                tuple(self._values[name].shape),
                np.broadcast_to(np.zeros((), lane_dtype(tag)), (self._values[name].numel(),)),
            )
            for name, tag in self._tags.items()
        }

    def _put(self, values: dict[str, torch.Tensor]) -> None:
        import torch

        with torch.no_grad():
            for name, one in values.items():
                self._values[name].copy_(one, non_blocking=True)
        if any(value.is_cuda for value in values.values()):
            torch.cuda.synchronize()


def _tag(name: str, value: torch.Tensor) -> str:
    spelling = str(value.dtype).removeprefix("torch.")
    if spelling not in _TAGS:
        raise StateMismatch(f"{name} is {spelling}; known are {', '.join(_TAGS)}")
    return _TAGS[spelling]


def _bits(value: torch.Tensor, tag: str) -> NDArray[Any]:
    """The elements of a contiguous tensor in host memory, as lanes over the same memory."""
    import torch

    flat = value.reshape(-1)
    raw: NDArray[Any] = flat.view(torch.uint8).numpy()
    return raw.view(lane_dtype(tag))


def _as_torch(one: Tensor, like: torch.Tensor) -> torch.Tensor:
    """A copy on `like`'s device with its element type and shape."""
    import torch

    raw = torch.from_numpy(np.array(one.bits).view(np.uint8))
    if raw.numel() == 0:
        return torch.empty_like(like)
    flat = raw.to(like.device).view(like.dtype)
    if flat.numel() != like.numel():
        raise TargetFailed(f"{flat.numel()} elements for a tensor of {like.numel()}")
    return flat.reshape(like.shape)
