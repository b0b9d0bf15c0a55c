"""Memory for copies of weights: allocated and touched once, then used for version after version.

A copy into fresh memory costs a page fault every 4 KiB, several times the copy itself; a copy into memory that was
written before costs one memcpy. A pool holds at most `capacity` states of one layout, each in one arena.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from rollwire.kernels.tensors import State, Tensor, lane_dtype
from rollwire.schemas.errors import DeadlineExceeded

_ALIGN: Final = 64  # bytes; of every tensor in its arena

Allocate = Callable[[int], "NDArray[np.uint8]"]


class Source(Protocol):
    """A tensor, or a run of its elements, that can be copied out of a trainer."""

    @property
    def dtype(self) -> str: ...  # a key of LANE_BYTES: what it is published as

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def elements(self) -> int: ...

    @property
    def start(self) -> int: ...  # flat index of the first one; 0 for a whole tensor

    @property
    def allocate(self) -> Allocate | None: ...  # page-locked memory, for a source on a device

    def copy_to(self, bits_N: NDArray[Any]) -> None:
        """Writes the elements' bits; a copy from a device may only be on its way when this returns."""
        ...

    def wait(self) -> None:
        """Returns when the copy has arrived."""
        ...


class _Slot(NamedTuple):
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    elements: int
    offset: int  # bytes into the arena


class _Arena(NamedTuple):
    layout: tuple[_Slot, ...]
    memory: NDArray[np.uint8]
    state: State


class BufferPool:
    """Thread-safe. A state that was filled belongs to the caller until it is given back."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._lock = threading.Lock()
        self._layout: tuple[_Slot, ...] = ()
        self._allocate: Allocate = _touched
        self._free: list[_Arena] = []
        self._used: dict[int, _Arena] = {}  # by the identity of the state
        self._filling = 0  # taken, and filled without the lock
        self._growing = 0  # made ahead without the lock; dropped if somebody needed the place meanwhile

    @property
    def has_room(self) -> bool:
        """Whether `fill` finds memory."""
        with self._lock:
            return bool(self._free) or self._taken() < self._capacity

    @property
    def nbytes(self) -> int:
        """Memory held."""
        with self._lock:
            return sum(a.memory.nbytes for a in (*self._free, *self._used.values()))

    def fill(self, sources: Mapping[str, Source]) -> State:
        """A copy of `sources`. Allocates where no touched arena of their layout is free.

        Raises `DeadlineExceeded` while `capacity` states are in use, and what a source raises.
        """
        layout = _layout(sources)
        with self._lock:
            if layout != self._layout:
                self._layout = layout
                self._free = []
                self._allocate = next((s.allocate for s in sources.values() if s.allocate), _touched)
            arena = self._free.pop() if self._free else None
            if arena is None and self._taken() >= self._capacity:
                raise DeadlineExceeded(f"all {self._capacity} buffers of weights are in use")
            self._filling += 1
        try:
            arena = arena or _make(layout, self._allocate)
            for name, source in sources.items():
                source.copy_to(arena.state[name].bits)
            for source in sources.values():
                source.wait()
        except BaseException:
            with self._lock:
                self._filling -= 1
            if arena is not None:
                self._keep(arena)
            raise
        with self._lock:
            self._filling -= 1
            self._used[id(arena.state)] = arena
        return arena.state

    def give_back(self, state: State) -> None:
        """Nobody reads `state` any more. States that are not of this pool are let go."""
        with self._lock:
            arena = self._used.pop(id(state), None)
        if arena is not None:
            self._keep(arena)

    def grow(self) -> bool:
        """Touches memory for one more state ahead of need; False = there is enough."""
        with self._lock:
            layout, allocate = self._layout, self._allocate
            if not layout or self._taken() + len(self._free) + self._growing >= self._capacity:
                return False
            self._growing += 1
        try:
            self._keep(_make(layout, allocate))
        finally:
            with self._lock:
                self._growing -= 1
        return True

    def _taken(self) -> int:
        """States that are not free, under the lock."""
        return len(self._used) + self._filling

    def _keep(self, arena: _Arena) -> None:
        with self._lock:
            if arena.layout == self._layout and self._taken() + len(self._free) < self._capacity:
                self._free.append(arena)


def _layout(sources: Mapping[str, Source]) -> tuple[_Slot, ...]:
    slots: list[_Slot] = []
    offset = 0
    for name in sorted(sources):
        source = sources[name]
        slots.append(_Slot(name, source.dtype, source.shape, source.start, source.elements, offset))
        offset += -(-source.elements * lane_dtype(source.dtype).itemsize // _ALIGN) * _ALIGN
    return tuple(slots)


def _make(layout: tuple[_Slot, ...], allocate: Allocate) -> _Arena:
    last = layout[-1] if layout else None
    size = 0 if last is None else last.offset + last.elements * lane_dtype(last.dtype).itemsize
    memory = allocate(size)
    state: dict[str, Tensor] = {}
    for slot in layout:
        lane = lane_dtype(slot.dtype)
        bits_N = memory[slot.offset : slot.offset + slot.elements * lane.itemsize].view(lane)
        state[slot.name] = Tensor(slot.dtype, slot.shape, bits_N, slot.start)
    return _Arena(layout, memory, state)


def _touched(size: int) -> NDArray[np.uint8]:
    memory = np.empty(size, np.uint8)
    memory.fill(0)  # every page is there from now on
    return memory
