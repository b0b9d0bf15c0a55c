"""Encodes runs of chunks with the gap coder, many in one call of compiled code."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollwire.kernels.delta.format import FLOATS
from rollwire.kernels.delta.gap import WORST_WORDS
from rollwire.kernels.delta.many import encode_kernel
from rollwire.kernels.memory import address_of
from rollwire.kernels.tensors import CHUNK_ELEMENTS, Tensor

_WORD: Final = 8


class Piece(NamedTuple):
    """One chunk of a tensor, before and after; both of one layout."""

    old: Tensor
    new: Tensor
    chunk: int


class EncodedPiece(NamedTuple):
    at: int  # which piece of the run
    changed: int  # elements, at least one
    digest_change: int  # not reduced modulo 2^128
    checksum: int  # of the payload
    payload: bytes


class RunEncoder:
    """Scratch of 24 MiB, of which only touched pages cost memory. One a thread."""

    def __init__(self) -> None:
        self._narrow = np.empty((4, CHUNK_ELEMENTS + 8), np.uint32)
        self._wide = np.empty((3, CHUNK_ELEMENTS), np.uint64)
        self._words = np.empty(2 * WORST_WORDS, np.uint64)

    def encode(self, run: Sequence[Piece], lane: int) -> Iterator[EncodedPiece]:
        """The pieces that change, in order. All have lanes of `lane` bytes."""
        kept: list[
            NDArray[Any]
        ] = []  # copies of what lies askew in memory: alive until the last call returned
        old_K = _addresses([(p.old, p.chunk) for p in run], kept)
        new_K = _addresses([(p.new, p.chunk) for p in run], kept)
        first_K = np.array([p.chunk * CHUNK_ELEMENTS for p in run], np.int64)
        ends_K = np.array([p.old.start + p.old.bits.size for p in run], np.int64)
        elements_K = np.minimum(ends_K - first_K, CHUNK_ELEMENTS)
        floats_K = np.array([p.old.dtype in FLOATS for p in run], np.uint8)
        count = len(run)
        changed_K, at_K, size_K, low_K, high_K = np.zeros((5, count), np.int64)
        checksum_K, top_K = np.zeros((2, count), np.uint64)
        view = self._words.view(np.uint8).data
        first = 0
        while first < count:
            last = encode_kernel()(
                first,
                old_K,
                new_K,
                elements_K,
                first_K.astype(np.uint64),
                floats_K,
                lane,
                self._narrow,
                self._wide,
                self._words,
                changed_K,
                at_K,
                size_K,
                checksum_K,
                low_K,
                high_K,
                top_K,
            )
            columns = (changed_K, low_K, high_K, top_K, checksum_K, at_K, size_K)
            rows = zip(*(column[first:last].tolist() for column in columns), strict=True)
            for k, (changed, low, high, top, checksum, at, size) in enumerate(rows, first):
                if changed:
                    change = low + (high << 32) + (top << 64)
                    yield EncodedPiece(k, changed, change, checksum, bytes(view[at : at + size]))
            first = last


def _addresses(chunks: Sequence[tuple[Tensor, int]], kept: list[NDArray[Any]]) -> NDArray[np.uint64]:
    """Of the chunks' first elements, on word boundaries."""
    known: dict[int, int] = {}
    found: list[int] = []
    for t, chunk in chunks:
        base = known.get(id(t.bits))
        if base is None:
            base = known[id(t.bits)] = address_of(t.bits) if t.bits.flags.c_contiguous else -1
        at = chunk * CHUNK_ELEMENTS - t.start
        address = base + at * t.bits.dtype.itemsize
        if base < 0 or address % _WORD:
            copy = np.array(t.bits[at : at + CHUNK_ELEMENTS], order="C")
            kept.append(copy)
            address = address_of(copy)
        found.append(address)
    return np.array(found, np.uint64)
