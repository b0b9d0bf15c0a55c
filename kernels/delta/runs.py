"""Encodes chunks with the gap coder, many in one call of compiled code."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollwire.kernels.delta.format import FLOATS
from rollwire.kernels.delta.gap_write import WORST_WORDS
from rollwire.kernels.delta.many import encode_kernel
from rollwire.kernels.memory import address_of
from rollwire.kernels.tensors import CHUNK_ELEMENTS, Tensor

_WORD: Final = 8


class Pair(NamedTuple):
    """One tensor, or a part of one, before and after, both of one layout; and where they lie in memory."""

    name: str
    old: Tensor
    new: Tensor
    old_at: int
    new_at: int

    @classmethod
    def of(cls, name: str, old: Tensor, new: Tensor) -> Pair | None:
        """None for what lies askew in memory: compiled loops read words."""
        old_at, new_at = address_of(old.bits), address_of(new.bits)
        straight = old.bits.flags.c_contiguous and new.bits.flags.c_contiguous
        return cls(name, old, new, old_at, new_at) if straight and not (old_at | new_at) % _WORD else None


class Run(NamedTuple):
    """K chunks of equal lanes, before and after, by address: the tensors stay alive as long as it is used."""

    lane: int
    tensor_K: NDArray[np.int64]  # which of the tensors that it was made from
    chunk_K: NDArray[np.int64]
    elements_K: NDArray[np.int64]
    start_K: NDArray[np.uint64]
    floats_K: NDArray[np.uint8]
    old_K: NDArray[np.uint64]
    new_K: NDArray[np.uint64]
    changed_K: NDArray[np.int64]  # from here on: what encoding gives
    checksum_K: NDArray[np.uint64]
    low_K: NDArray[np.int64]
    high_K: NDArray[np.int64]
    top_K: NDArray[np.uint64]

    @classmethod
    def of(cls, pairs: Sequence[Pair], lane: int) -> Run:
        """All chunks of these tensors."""
        rows = [(p.old.bits.size, p.old.start, p.old_at, p.new_at, p.old.dtype in FLOATS) for p in pairs]
        size_T, start_T, old_T, new_T, floats_T = np.array(rows, np.int64).reshape(-1, 5).T
        count_T = -(-size_T // CHUNK_ELEMENTS)
        tensor_K = np.repeat(np.arange(len(pairs)), count_T)
        # The number of each chunk in what is held of its tensor, and its first element there.
        local_K = np.arange(tensor_K.size) - (np.cumsum(count_T) - count_T)[tensor_K]
        at_K = local_K * CHUNK_ELEMENTS
        start_K = at_K + start_T[tensor_K]
        changed_K, low_K, high_K = np.zeros((3, tensor_K.size), np.int64)
        checksum_K, top_K = np.zeros((2, tensor_K.size), np.uint64)
        return cls(
            lane,
            tensor_K,
            start_K // CHUNK_ELEMENTS,
            np.minimum(size_T[tensor_K] - at_K, CHUNK_ELEMENTS),
            start_K.astype(np.uint64),
            floats_T[tensor_K].astype(np.uint8),
            (old_T[tensor_K] + at_K * lane).astype(np.uint64),
            (new_T[tensor_K] + at_K * lane).astype(np.uint64),
            changed_K,
            checksum_K,
            low_K,
            high_K,
            top_K,
        )

    def cuts(self, elements: int) -> list[int]:
        """Where to part the run so that each part covers about so many elements."""
        part_K = (np.cumsum(self.elements_K) - 1) // elements
        return [0, *(np.flatnonzero(part_K[1:] != part_K[:-1]) + 1).tolist(), self.chunk_K.size]


class _Scratch(threading.local):
    """24 MiB a thread, of which only touched pages cost memory."""

    def __init__(self) -> None:
        self.narrow = np.empty((4, CHUNK_ELEMENTS + 8), np.uint32)
        self.wide = np.empty((3, CHUNK_ELEMENTS), np.uint64)
        self.words = np.empty(2 * WORST_WORDS, np.uint64)


_scratch = _Scratch()


def encode_run(run: Run, first: int, last: int) -> list[bytes]:
    """The payloads of the chunks [first, last) that change, in order; the rest of their data goes into the run's columns."""
    at_K, size_K = np.zeros((2, last), np.int64)
    view = _scratch.words.view(np.uint8).data
    payloads: list[bytes] = []
    at: Any = first
    while at < last:
        end = encode_kernel()(
            at,
            run.old_K[:last],
            run.new_K[:last],
            run.elements_K,
            run.start_K,
            run.floats_K,
            run.lane,
            _scratch.narrow,
            _scratch.wide,
            _scratch.words,
            run.changed_K,
            at_K,
            size_K,
            run.checksum_K,
            run.low_K,
            run.high_K,
            run.top_K,
        )
        cut = zip(at_K[at:end].tolist(), size_K[at:end].tolist(), strict=True)
        payloads += [bytes(view[start : start + size]) for start, size in cut if size]
        at = end
    return payloads
