"""Filling bins (microbatches) under a token cap: best fit decreasing and longest processing time, compiled.

Both work in place on one partial packing, so that they can follow each other. Legend: B sequences, longest first; N bins;
`bin_B` is -1 where a sequence is not placed yet; tokens_N and cost_N are the bins' sums so far.

Both need "a bin whose room is at least x": bins lie in lists by their room, and a set of bits, one for each room, in
levels of 64 (a bit of a level is set where a word below is not zero), finds the least room from x on in a few steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numba
import numpy as np
from numpy.typing import NDArray

_Loop = Callable[..., Any]

# Rooms that are told apart, about, where an exact set of them would be too large.
_FINE: Final = 1 << 18
_ONE, _ZERO = np.uint64(1), np.uint64(0)
_DEBRUIJN: Final = np.uint64(0x03F79D71B4CB0A89)
_BIT_64 = np.zeros(64, np.int64)
for _i in range(64):
    _BIT_64[((int(_DEBRUIJN) << _i) & (2**64 - 1)) >> 58] = _i


def compiled(loop: _Loop) -> _Loop:
    """Cached on disk and without the GIL."""
    made: _Loop = numba.njit(cache=True, nogil=True)(loop)
    return made


@compiled
def _lowest(word: np.uint64) -> int:
    """The lowest set bit of a word that is not zero."""
    return int(_BIT_64[((word & (~word + _ONE)) * _DEBRUIJN) >> np.uint64(58)])


@compiled
def levels_for(rooms: int) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """An empty set over the rooms 0..rooms: all levels end to end, and where each starts."""
    starts = np.zeros(8, np.int64)
    size, level, total = rooms + 1, 0, 0
    while True:
        size = (size + 63) >> 6
        starts[level] = total
        total += size
        level += 1
        if size == 1:
            break
    return np.zeros(total, np.uint64), starts[:level].copy()


@compiled
def _add(words: NDArray[np.uint64], starts: NDArray[np.int64], room: int) -> None:
    for level in range(starts.size):
        at = starts[level] + (room >> 6)
        before = words[at]
        words[at] = before | (_ONE << np.uint64(room & 63))
        if before != _ZERO:
            return
        room >>= 6


@compiled
def _remove(words: NDArray[np.uint64], starts: NDArray[np.int64], room: int) -> None:
    for level in range(starts.size):
        at = starts[level] + (room >> 6)
        words[at] &= ~(_ONE << np.uint64(room & 63))
        if words[at] != _ZERO:
            return
        room >>= 6


@compiled
def _at_least(words: NDArray[np.uint64], starts: NDArray[np.int64], room: int) -> int:
    """The least room in the set from `room` on; -1 where there is none."""
    level = 0
    while True:
        end = starts[level + 1] if level + 1 < starts.size else words.size
        word = room >> 6
        if starts[level] + word < end:
            found = (words[starts[level] + word] >> np.uint64(room & 63)) << np.uint64(room & 63)
            if found != _ZERO:
                room = (word << 6) | _lowest(found)
                while level > 0:
                    level -= 1
                    room = (room << 6) | _lowest(words[starts[level] + room])
                return room
        level += 1
        if level == starts.size:
            return -1
        room = word + 1


@compiled
def best_fit(
    length_B: NDArray[np.int64],
    cost_B: NDArray[np.float64],
    cap: int,
    limit: float,
    first: int,
    bins: int,
    bin_B: NDArray[np.int64],
    tokens_N: NDArray[np.int64],
    cost_N: NDArray[np.float64],
) -> int:
    """Places what is not placed, in order, into the fullest bin with room among `bins` bins from `first` on; opens a
    bin where none has room and leaves a sequence where none is left to open. Returns the number of bins opened.

    Room is what is left of both the cap and the cost `limit`: the length of the longest sequence of which both have
    enough (costs must not ascend in B for the second to be exact; the cap always holds).
    """
    words, starts = levels_for(cap)
    head = np.full(cap + 1, -1, np.int32)
    behind = np.full(bins, -1, np.int32)
    opened = 0
    for i in range(length_B.size):
        if bin_B[i] >= 0:
            continue
        length = length_B[i]
        room = _at_least(words, starts, length)
        if room >= 0:
            at = int(head[room])
            head[room] = behind[at]
            if head[room] < 0:
                _remove(words, starts, room)
        elif opened < bins:
            at = opened
            room = cap
            opened += 1
        else:
            continue
        bin_B[i] = first + at
        tokens_N[first + at] += length
        cost_N[first + at] += cost_B[i]
        room = cap - tokens_N[first + at]
        left = limit - cost_N[first + at]
        if left < np.inf:
            low, high = i, length_B.size
            while low < high:
                middle = (low + high) >> 1
                if cost_B[middle] <= left:
                    high = middle
                else:
                    low = middle + 1
            room = min(room, length_B[low]) if low < length_B.size else 0
        if head[room] < 0:
            _add(words, starts, room)
        behind[at] = head[room]
        head[room] = at
    return opened


@compiled
def _sift_down(heap: NDArray[np.int64], size: int, cost_N: NDArray[np.float64]) -> None:
    at, moved = 0, heap[0]
    cost = cost_N[moved]
    while True:
        child = 2 * at + 1
        if child >= size:
            break
        if child + 1 < size:
            a, b = heap[child], heap[child + 1]
            if cost_N[b] < cost_N[a] or (cost_N[b] == cost_N[a] and b < a):
                child += 1
        other = heap[child]
        if cost_N[other] > cost or (cost_N[other] == cost and other > moved):
            break
        heap[at] = other
        at = child
    heap[at] = moved


@compiled
def _push(heap: NDArray[np.int64], size: int, entry: int, cost_N: NDArray[np.float64]) -> None:
    at = size
    while at > 0:
        parent = (at - 1) >> 1
        other = heap[parent]
        if cost_N[other] < cost_N[entry] or (cost_N[other] == cost_N[entry] and other < entry):
            break
        heap[at] = other
        at = parent
    heap[at] = entry


@compiled
def longest_first(
    length_B: NDArray[np.int64],
    cost_B: NDArray[np.float64],
    cap: int,
    first: int,
    bins: int,
    bin_B: NDArray[np.int64],
    tokens_N: NDArray[np.int64],
    cost_N: NDArray[np.float64],
) -> bool:
    """Places what is not placed, in order, into the cheapest bin with room among `bins` bins from `first` on (longest
    processing time, Graham 1969, under a cap). False where a sequence finds no room anywhere.

    A bin without room for a sequence waits, by its room, until sequences are short enough: `length_B` must descend. Large
    rooms are told apart coarsely, and a bin that is asked too early waits again.
    """
    coarse = 0
    while cap >> coarse > _FINE:
        coarse += 1
    words, starts = levels_for(cap >> coarse)
    head = np.full((cap >> coarse) + 1, -1, np.int32)
    behind = np.full(bins, -1, np.int32)
    heap = np.arange(first, first + bins)
    size = bins
    for i in range(length_B.size):
        if bin_B[i] >= 0:
            continue
        length = length_B[i]
        while True:
            room = _at_least(words, starts, length >> coarse)
            if room < 0:
                break
            at = int(head[room])
            head[room] = behind[at]
            if head[room] < 0:
                _remove(words, starts, room)
            _push(heap, size, first + at, cost_N)
            size += 1
        while size > 0 and tokens_N[heap[0]] + length > cap:
            out = heap[0]
            size -= 1
            heap[0] = heap[size]
            _sift_down(heap, size, cost_N)
            at = int(out) - first
            room = (cap - tokens_N[out]) >> coarse
            if head[room] < 0:
                _add(words, starts, room)
            behind[at] = head[room]
            head[room] = at
        if size == 0:
            return False
        target = heap[0]
        bin_B[i] = target
        tokens_N[target] += length
        cost_N[target] += cost_B[i]
        _sift_down(heap, size, cost_N)
    return True
