"""Runs of chunks in one call of compiled code, by address: what lets many small tensors cost little more than one large.

Legend: K chunks, N changed elements of all of them (chunk k has [at_K[k], at_K[k + 1])), W 64-bit words.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rollwire.kernels.delta.changes import gather_lanes, scatter_lanes, weigh_lanes
from rollwire.kernels.delta.format import CODER_GAP, checksum_of
from rollwire.kernels.delta.gap import OK, follow_steps, parse_lanes, steps_lanes
from rollwire.kernels.delta.gap_write import diff_lanes, pack_lanes
from rollwire.kernels.digest import jit, lanes
from rollwire.kernels.memory import carray, pointer

DAMAGED: Final = 100  # the payload's checksum does not hold
OTHER_CODER: Final = 101  # nothing was decoded: that is left to the caller

# Of a chunk's stream: what its head and count take, and a change at most.
_HEAD_BYTES: Final = 64
_CHANGE_BYTES: Final = 25


def _decode(
    first: int,
    last: int,
    body: NDArray[np.uint8],
    offset_K: NDArray[np.int64],
    size_K: NDArray[np.int64],
    checksum_K: NDArray[np.uint64],
    coder_K: NDArray[np.uint8],
    address_K: NDArray[np.uint64],
    elements_K: NDArray[np.int64],
    start_K: NDArray[np.uint64],
    floats_K: NDArray[np.uint8],
    at_K: NDArray[np.int64],
    lane: int,
    backwards: bool,
    positions_N: NDArray[np.uint32],
    old_N: NDArray[Any],
    new_N: NDArray[Any],
    status_K: NDArray[np.int64],
    low_K: NDArray[np.int64],
    high_K: NDArray[np.int64],
    top_K: NDArray[np.uint64],
) -> None:
    for k in range(first, last):
        payload = body[offset_K[k] : offset_K[k] + size_K[k]]
        if payload.size != size_K[k] or checksum_of(payload) != checksum_K[k]:
            status_K[k] = DAMAGED
            continue
        if coder_K[k] != CODER_GAP:
            status_K[k] = OTHER_CODER
            continue
        positions, old, new = (
            positions_N[at_K[k] : at_K[k + 1]],
            old_N[at_K[k] : at_K[k + 1]],
            new_N[at_K[k] : at_K[k + 1]],
        )
        status_K[k] = parse_lanes(payload, elements_K[k], lane, positions, new)
        if status_K[k] != OK:
            continue
        base = carray(pointer(address_K[k], old_N), elements_K[k])
        gather_lanes(base, positions, old)
        follow_steps(old, lane, floats_K[k] != 0, backwards, new)
        low_K[k], high_K[k], top_K[k] = weigh_lanes(start_K[k], positions, old, new)


def _scatter(
    address_K: NDArray[np.uint64],
    elements_K: NDArray[np.int64],
    at_K: NDArray[np.int64],
    positions_N: NDArray[np.uint32],
    values_N: NDArray[Any],
) -> None:
    for k in range(address_K.size):
        target = carray(pointer(address_K[k], values_N), elements_K[k])
        scatter_lanes(target, positions_N[at_K[k] : at_K[k + 1]], values_N[at_K[k] : at_K[k + 1]])


@jit()
def _tail(address: np.uint64, elements: int, lane: int, like: NDArray[np.uint8]) -> np.uint64:
    """The elements that fill no whole word, with zeros behind."""
    size = elements * lane
    data = carray(pointer(address, like), size)
    word = np.uint64(0)
    for i in range(size & ~7, size):
        word |= np.uint64(data[i]) << np.uint64(8 * (i & 7))
    return word


def _encode(
    first: int,
    old_K: NDArray[np.uint64],
    new_K: NDArray[np.uint64],
    elements_K: NDArray[np.int64],
    start_K: NDArray[np.uint64],
    floats_K: NDArray[np.uint8],
    lane: int,
    scratch: NDArray[np.uint32],
    wide: NDArray[np.uint64],
    words: NDArray[np.uint64],
    changed_K: NDArray[np.int64],
    at_K: NDArray[np.int64],
    size_K: NDArray[np.int64],
    checksum_K: NDArray[np.uint64],
    low_K: NDArray[np.int64],
    high_K: NDArray[np.int64],
    top_K: NDArray[np.uint64],
) -> int:
    """Encodes chunks from `first` on, until `words` might not hold the next; returns the chunk to go on with.

    Payload k lies in the bytes of `words` from at_K[k] on.
    """
    found, positions, ranks, numbers = scratch[0], scratch[1], scratch[2], scratch[3]
    old, new, steps = wide[0], wide[1], wide[2]
    like = words[:0].view(np.uint8)
    at: Any = 0
    for k in range(first, old_K.size):
        size = elements_K[k] * lane // 8
        old_W, new_W = carray(pointer(old_K[k], words), size), carray(pointer(new_K[k], words), size)
        tails = _tail(old_K[k], elements_K[k], lane, like), _tail(new_K[k], elements_K[k], lane, like)
        n = diff_lanes(old_W, new_W, tails[0], tails[1], lane, found, positions, old, new)
        changed_K[k] = n
        if n == 0:
            continue
        if at + (_HEAD_BYTES + _CHANGE_BYTES * n) // 8 + 2 > words.size:
            return k
        low_K[k], high_K[k], top_K[k] = weigh_lanes(start_K[k], positions[:n], old[:n], new[:n])
        steps_lanes(old[:n], new[:n], lane, floats_K[k] != 0, steps[:n])
        bits = np.int64(pack_lanes(positions[:n], steps[:n], lane, ranks, numbers, words[at:]))
        at_K[k], size_K[k] = 8 * at, (bits + 7) // 8
        checksum_K[k] = checksum_of(words[at:].view(np.uint8)[: size_K[k]])
        at += bits // 64 + 1
    return old_K.size


def _add(
    before_K: NDArray[np.uint64],
    low_K: NDArray[np.int64],
    high_K: NDArray[np.int64],
    top_K: NDArray[np.uint64],
    after_K: NDArray[np.uint64],
) -> None:
    for k in range(low_K.size):
        # low + 2^32 high as 128 bits: high's upper half goes into the second word, with its sign.
        lo = before_K[k, 0] + np.uint64(low_K[k])
        hi = before_K[k, 1] + np.uint64(low_K[k] >> 63) + top_K[k]
        hi += np.uint64(1) if lo < before_K[k, 0] else np.uint64(0)
        shifted = np.uint64(high_K[k]) << np.uint64(32)
        after_K[k, 0] = lo + shifted
        carry = np.uint64(1) if after_K[k, 0] < lo else np.uint64(0)
        after_K[k, 1] = hi + np.uint64(high_K[k] >> 32) + carry


def added(
    before_K: NDArray[np.uint64],
    low_K: NDArray[np.int64],
    high_K: NDArray[np.int64],
    top_K: NDArray[np.uint64],
) -> NDArray[np.uint64]:
    """[K, 2] sums modulo 2^128 after these changes, which stand for low + 2^32 high + 2^64 top (`changes.weigh_parts`)."""
    after_K = np.empty_like(before_K)
    _add_kernel()(before_K, low_K, high_K, top_K, after_K)
    return after_K


_I8: Final = "Array(int64, 1, 'C', True)"
_I8_OUT: Final = "Array(int64, 1, 'C')"
_U8_OUT: Final = lanes(8, readonly=False)


@cache
def decode_kernel(lane: int) -> Callable[..., Any]:
    """`_decode` for lanes of so many bytes."""
    out = lanes(lane, readonly=False)
    return jit(
        f"void(int64, int64, {lanes(1)}, {_I8}, {_I8}, {lanes(8)}, {lanes(1)}, {lanes(8)}, {_I8}, {lanes(8)}, "
        f"{lanes(1)}, {_I8}, int64, boolean, {lanes(4, readonly=False)}, {out}, {out}, "
        f"{_I8_OUT}, {_I8_OUT}, {_I8_OUT}, {_U8_OUT})"
    )(_decode)


@cache
def scatter_kernel(lane: int) -> Callable[..., Any]:
    """`_scatter` for lanes of so many bytes."""
    return jit(f"void({lanes(8)}, {_I8}, {_I8}, {lanes(4)}, {lanes(lane)})")(_scatter)


@cache
def encode_kernel() -> Callable[..., Any]:
    """`_encode`, for any lanes."""
    return jit(
        f"int64(int64, {lanes(8)}, {lanes(8)}, {_I8}, {lanes(8)}, {lanes(1)}, int64, Array(uint32, 2, 'C'), "
        f"Array(uint64, 2, 'C'), {_U8_OUT}, {_I8_OUT}, {_I8_OUT}, {_I8_OUT}, {_U8_OUT}, {_I8_OUT}, {_I8_OUT}, {_U8_OUT})"
    )(_encode)


@cache
def _add_kernel() -> Callable[..., Any]:
    return jit(f"void(Array(uint64, 2, 'C', True), {_I8}, {_I8}, {lanes(8)}, Array(uint64, 2, 'C'))")(_add)
