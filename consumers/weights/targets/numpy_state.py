"""Arrays in this process: changed in place, inside the pause and nowhere else."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollwire.consumers.weights.targets.scatter import check_layout, check_writable
from rollwire.consumers.weights.targets.target import Sample, Serving, Update
from rollwire.kernels.tensors import State, Tensor
from rollwire.schemas.errors import TargetFailed

Pause = Callable[[], AbstractContextManager[object]]


class NumpyTarget:
    """Implements `Target`. `state`: arrays that somebody reads from already; None = they are made with the first version.

    The swap writes while nobody holds `with target.reading() as state:`, and inside the context that `pause` gives, in which
    nobody reads in another way; how long it writes is the pause that is reported.
    """

    def __init__(self, state: State | None = None, *, pause: Pause | None = None) -> None:
        self._state: dict[str, Tensor] = dict(state or {})
        check_writable(self._state)
        self._lock = threading.RLock()
        self._pause: Pause = pause or nullcontext
        self._update: Update | None = None
        self._first: dict[str, Tensor] = {}
        self._applied = False

    @property
    def name(self) -> str:
        return "numpy"

    def reading(self) -> _Reading:
        """Nothing is swapped while it is held."""
        return _Reading(self._lock, self._state)

    def held(self) -> State | None:
        return self._state

    def serving(self) -> Serving | None:
        return None  # arrays know their bits, not their version

    def stage(self, update: Update) -> None:
        self._update, self._applied = None, False
        if self._state:
            check_layout(self._state, update.state)
            if update.change is None:
                raise TargetFailed(
                    "arrays that serve are changed in place; the update holds no change of them"
                )
        else:
            self._first = {name: _writable(one) for name, one in update.state.items()}
        self._update = update

    def swap(self) -> float:
        update = self._update
        if update is None:
            raise TargetFailed("nothing is staged")
        with self._pause(), self._lock:
            started = time.perf_counter()
            self._applied = True
            if update.change is not None:
                update.change.apply()
            self._state.update(self._first)
            return (time.perf_counter() - started) * 1e3

    def read_back(self, samples: Sequence[Sample]) -> list[NDArray[Any]] | None:
        return [part_bits(self._state[one.name], one.start, one.end).copy() for one in samples]

    def keep(self) -> None:
        self._update, self._first, self._applied = None, {}, False

    def undo(self) -> None:
        update, self._update, self._first = self._update, None, {}
        if update is None or not self._applied:
            return
        self._applied = False
        with self._pause(), self._lock:
            if update.change is not None:
                update.change.undo()
            else:
                self._state.clear()  # it was the first version

    def close(self) -> None:
        pass


class _Reading:
    def __init__(self, lock: threading.RLock, state: State) -> None:
        self._lock = lock
        self._state = state

    def __enter__(self) -> State:
        self._lock.acquire()
        return self._state

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def part_bits(tensor: Tensor, start: int, end: int) -> NDArray[Any]:
    """Elements [start, end) of the whole tensor, of the part that is held. Raises `TargetFailed` beyond it."""
    first = tensor.start
    if not first <= start <= end <= first + tensor.bits.size:
        raise TargetFailed(
            f"elements {start} to {end} are not held: {first} to {first + tensor.bits.size} are"
        )
    return tensor.bits[start - first : end - first]


def _writable(tensor: Tensor) -> Tensor:
    bits = tensor.bits
    return (
        tensor if bits.flags.writeable and bits.flags.c_contiguous else tensor._replace(bits=np.array(bits))
    )
