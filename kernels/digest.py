"""Digests of states: an incremental one for the serving path, blake3 per tensor for what lies at rest (law 5).

The incremental digest of a tensor is a sum modulo 2^128 over its elements:

    sum_i  mix(i, bits_i)      i = flat element index, bits_i = the element's bits, zero-extended to 64

A sum forgets order, so the index is mixed in; and a sum can be updated: a delta that changes a thousand of a billion
elements costs a thousand subtractions and additions. Sums are kept for each chunk of the grid (`tensors.CHUNK_ELEMENTS`), and
a tensor's is the sum of its chunks'; so whoever holds a few chunks checks these by themselves, and the whole by taking the
others' sums from a table. The state's digest is blake3 over the sorted names with their dtypes, shapes and sums. It guards against damage, wrong bases and bugs; it is no defence against somebody who *wants*
a collision, which is what the SHA-256 of every stored object is for.

    mix(i, b):  k  = (i + 1) * GOLDEN
                lo = f(b ^ k; A1, A2)           f(z; p, q): z ^= z >> 32; z *= p; z ^= z >> 29; z *= q; z ^= z >> 32
                hi = f(b + rotl(k, 32); B1, B2)

All arithmetic is modulo 2^64; the two halves are added as one 128-bit number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from functools import cache
from typing import Any, Final, Self

import numba
import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from rollwire.kernels.tensors import CHUNK_ELEMENTS, LANE_BYTES, State, Tensor, chunk_count, held_chunks
from rollwire.schemas.errors import DigestMismatch, StateMismatch

MASK_128: Final = (1 << 128) - 1

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_A1, _A2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_B1, _B2 = np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53)
_ONE, _29, _32 = np.uint64(1), np.uint64(29), np.uint64(32)


def jit(signature: str | None = None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """numba.njit, cached on disk and without the GIL; a signature compiles at once, none means on first use.

    Processes start often (fleets, trainers, evaluators): only the lanes that are used are compiled, once a machine.
    """
    decorate: Callable[[Callable[..., Any]], Callable[..., Any]] = numba.njit(
        signature, cache=True, nogil=True
    )
    return decorate


@jit()
def mix_lo(index: np.uint64, bits: np.uint64) -> np.uint64:
    z = bits ^ ((index + _ONE) * _GOLDEN)
    z = (z ^ (z >> _32)) * _A1
    z = (z ^ (z >> _29)) * _A2
    return z ^ (z >> _32)


@jit()
def mix_hi(index: np.uint64, bits: np.uint64) -> np.uint64:
    key = (index + _ONE) * _GOLDEN
    z = bits + ((key << _32) | (key >> _32))
    z = (z ^ (z >> _32)) * _B1
    z = (z ^ (z >> _29)) * _B2
    return z ^ (z >> _32)


def _sum(bits_N: NDArray[Any], start: np.uint64) -> tuple[np.uint64, np.uint64]:
    # The low halves are added as two 32-bit streams, so that no carry is lost and the loop has no branch.
    # Blocks of 2^20 elements keep those streams far from 2^64.
    mask = np.uint64(0xFFFFFFFF)
    lo, hi = np.uint64(0), np.uint64(0)
    for block in range(0, bits_N.size, 1 << 20):
        end = min(block + (1 << 20), bits_N.size)
        low, high, top = np.uint64(0), np.uint64(0), np.uint64(0)
        for i in range(block, end):
            index = start + np.uint64(i)
            bits = np.uint64(bits_N[i])
            a = mix_lo(index, bits)
            low += a & mask
            high += a >> _32
            top += mix_hi(index, bits)
        high += low >> _32
        part = (high << _32) | (low & mask)
        lo += part
        hi += top + (high >> _32)
        if lo < part:
            hi += _ONE
    return lo, hi


def _change(
    positions_N: NDArray[np.uint64], old_N: NDArray[Any], new_N: NDArray[Any]
) -> tuple[np.uint64, np.uint64]:
    lo, hi = np.uint64(0), np.uint64(0)
    for i in range(positions_N.size):
        index = positions_N[i]
        old, new = np.uint64(old_N[i]), np.uint64(new_N[i])
        plus, minus = mix_lo(index, new), mix_lo(index, old)
        hi += mix_hi(index, new) - mix_hi(index, old)
        lo += plus
        if lo < plus:
            hi += _ONE
        if lo < minus:
            hi -= _ONE
        lo -= minus
    return lo, hi


def lanes(lane: int, *, readonly: bool = True) -> str:
    """The numba type of a contiguous array of `lane`-byte elements; arrays that may be written convert to read-only."""
    return f"Array(uint{8 * lane}, 1, 'C', {readonly})"


@cache
def _sum_kernel(lane: int) -> Callable[..., Any]:
    return jit(f"UniTuple(uint64, 2)({lanes(lane)}, uint64)")(_sum)


@cache
def _change_kernel(lane: int) -> Callable[..., Any]:
    return jit(f"UniTuple(uint64, 2)({lanes(8)}, {lanes(lane)}, {lanes(lane)})")(_change)


def join_128(lo: int, hi: int) -> int:
    """One number below 2^128 from its halves, each taken modulo 2^64."""
    return ((int(hi) & (2**64 - 1)) << 64) | (int(lo) & (2**64 - 1))


def aligned(bits_N: NDArray[Any]) -> NDArray[Any]:
    """The array itself, or a copy where its memory is not aligned (a view into the middle of a file, say)."""
    return bits_N if bits_N.flags.aligned and bits_N.flags.c_contiguous else np.array(bits_N, order="C")


def tensor_sum(tensor: Tensor) -> int:
    """The incremental digest of one tensor, in [0, 2^128); of a part: what its elements add to it."""
    bits_N = aligned(tensor.bits)
    lo, hi = _sum_kernel(bits_N.dtype.itemsize)(bits_N, tensor.start)
    return join_128(lo, hi)


def held_sums(tensor: Tensor, name: str = "a tensor") -> list[int]:
    """The sum of each chunk that is held. Raises `StateMismatch` for a part off the grid."""
    chunks = held_chunks(tensor, name)
    bits_N = aligned(tensor.bits)
    kernel = _sum_kernel(bits_N.dtype.itemsize)
    sums: list[int] = []
    for chunk in chunks:
        at = chunk * CHUNK_ELEMENTS - tensor.start
        lo, hi = kernel(bits_N[at : at + CHUNK_ELEMENTS], tensor.start + at)
        sums.append(join_128(lo, hi))
    return sums


def tensor_blake3(tensor: Tensor) -> str:
    """blake3 (hex) over dtype, shape and little-endian elements: for anchors, staged copies and the scrub."""
    hasher = blake3(_layout(tensor.dtype, tensor.shape))
    hasher.update(np.ascontiguousarray(tensor.bits).view(np.uint8).data)
    return hasher.hexdigest()


class _Sums:
    """One tensor's layout and the sums of its chunks. None: not known here. Lists are shared by copies until written."""

    __slots__ = ("chunks", "dtype", "shape", "total")

    def __init__(self, dtype: str, shape: tuple[int, ...], chunks: list[int | None]) -> None:
        self.dtype = dtype
        self.shape = shape
        self.chunks = chunks
        self.total: int | None = None  # of all chunks, once somebody asked


class StateDigest:
    """The incremental digest of a whole state. Mutable; `copy` it before an update that may be given up.

    Of a state of parts it knows the sums of these parts' chunks only, until `fill` or `set` says the others.
    """

    __slots__ = ("_hex", "_own", "_sums")

    def __init__(self, sums: dict[str, _Sums]) -> None:
        self._sums = sums
        self._own: set[str] = set()  # tensors whose list no copy shares
        self._hex: str | None = None

    @classmethod
    def of(cls, state: State) -> Self:
        """Reads every element once. Raises `StateMismatch` for parts off the chunk grid."""
        sums: dict[str, _Sums] = {}
        for name, t in state.items():
            held = held_sums(t, name)
            first = t.start // CHUNK_ELEMENTS
            chunks: list[int | None] = [None] * chunk_count(t.elements)
            chunks[first : first + len(held)] = held
            sums[name] = _Sums(t.dtype, t.shape, chunks)
        return cls(sums)

    @classmethod
    def from_sums(cls, table: Mapping[str, tuple[str, tuple[int, ...], bytes]]) -> Self:
        """From name -> (dtype, shape, sums), as `table` gives it: 16 little-endian bytes a chunk, in order.

        Raises `StateMismatch` where their number does not fit the shape.
        """
        sums: dict[str, _Sums] = {}
        for name, (dtype, shape, packed) in table.items():
            if len(packed) != 16 * chunk_count(math.prod(shape)):
                raise StateMismatch(f"{name}: {len(packed)} bytes of chunk sums do not fit {list(shape)}")
            chunks: list[int | None] = [
                int.from_bytes(packed[at : at + 16], "little") for at in range(0, len(packed), 16)
            ]
            sums[name] = _Sums(dtype, shape, chunks)
        return cls(sums)

    def table(self) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
        """What `from_sums` reads. Raises `StateMismatch` while a chunk's sum is not known."""
        return {
            name: (
                entry.dtype,
                entry.shape,
                b"".join(known.to_bytes(16, "little") for known in self.chunk_sums(name)),
            )
            for name, entry in self._sums.items()
        }

    def copy(self) -> StateDigest:
        self._own.clear()  # lists are shared from now on, by both
        made = StateDigest(dict(self._sums))
        made._hex = self._hex
        return made

    def __contains__(self, name: str) -> bool:
        return name in self._sums

    @property
    def names(self) -> Collection[str]:
        return self._sums.keys()

    def layout(self, name: str) -> tuple[str, tuple[int, ...]]:
        """(dtype, shape). Raises `StateMismatch` for an unknown name."""
        entry = self._entry(name)
        return entry.dtype, entry.shape

    def chunk_sums(self, name: str) -> tuple[int, ...]:
        """Raises `StateMismatch` for an unknown name, or while a chunk's sum is not known."""
        known = tuple(s for s in self._entry(name).chunks if s is not None)
        if len(known) != len(self._entry(name).chunks):
            raise StateMismatch(
                f"{name}: {len(self._entry(name).chunks) - len(known)} chunks' sums are not known"
            )
        return known

    def chunk_sum(self, name: str, chunk: int) -> int:
        """Raises `StateMismatch` as `chunk_sums`, and for a chunk that is not there."""
        chunks = self._entry(name).chunks
        known = chunks[chunk] if 0 <= chunk < len(chunks) else None
        if known is None:
            raise StateMismatch(f"{name}: the sum of chunk {chunk} of {len(chunks)} is not known")
        return known

    def update(
        self,
        name: str,
        positions_N: NDArray[np.uint64],
        old_bits_N: NDArray[Any],
        new_bits_N: NDArray[Any],
    ) -> None:
        """Elements of tensor `name` at flat `positions_N` changed from `old_bits_N` to `new_bits_N` (lanes of its dtype).

        Raises `StateMismatch` for an unknown name or arrays that do not fit it.
        """
        lane = LANE_BYTES[self._entry(name).dtype]
        for what, array in (("old", old_bits_N), ("new", new_bits_N)):
            if array.shape != positions_N.shape or array.dtype != np.dtype(f"<u{lane}"):
                raise StateMismatch(
                    f"{name}: {what} bits are {array.dtype}{list(array.shape)}, needed is u{lane}{list(positions_N.shape)}"
                )
        positions_N = positions_N.astype(np.uint64)
        chunk_N = positions_N // np.uint64(CHUNK_ELEMENTS)
        for chunk in np.unique(chunk_N):
            here_N = chunk_N == chunk
            lo, hi = _change_kernel(lane)(
                aligned(positions_N[here_N]), aligned(old_bits_N[here_N]), aligned(new_bits_N[here_N])
            )
            self.add(name, int(chunk), join_128(lo, hi))

    def add(self, name: str, chunk: int, change: int) -> None:
        """Adds a change of a chunk's sum that was computed elsewhere (the delta kernels do)."""
        self.set(name, chunk, (self.chunk_sum(name, chunk) + change) & MASK_128)

    def set(self, name: str, chunk: int, total: int) -> None:
        """The chunk's sum is `total` from now on: from a delta's table, or another holder. Raises `StateMismatch`."""
        entry = self._entry(name)
        if not 0 <= chunk < len(entry.chunks):
            raise StateMismatch(f"{name} has {len(entry.chunks)} chunks, no chunk {chunk}")
        if name not in self._own:
            shared, entry = entry, _Sums(entry.dtype, entry.shape, list(entry.chunks))
            entry.total = shared.total
            self._sums[name] = entry
            self._own.add(name)
        before = entry.chunks[chunk]
        entry.chunks[chunk] = total
        entry.total = (
            None if entry.total is None or before is None else (entry.total - before + total) & MASK_128
        )
        self._hex = None

    def fill(self, other: StateDigest) -> None:
        """Takes from `other` the sums that are not known here: other parts of the same state (another rank's).

        Raises `StateMismatch` where layouts differ, `DigestMismatch` where both know a chunk and disagree.
        """
        for name, theirs in other._sums.items():
            mine = self._sums.get(name)
            if mine is None:
                self._sums[name] = theirs
                self._own.discard(name)
                other._own.discard(name)
                self._hex = None
                continue
            if (mine.dtype, mine.shape) != (theirs.dtype, theirs.shape):
                raise StateMismatch(
                    f"{name}: {mine.dtype}{list(mine.shape)} here, {theirs.dtype}{list(theirs.shape)} there"
                )
            for chunk, (a, b) in enumerate(zip(mine.chunks, theirs.chunks, strict=True)):
                if a is None and b is not None:
                    self.set(name, chunk, b)
                elif b is not None and a != b:
                    raise DigestMismatch(f"{name}: chunk {chunk} is another one there")

    def check(self, state: State) -> None:
        """Recounts what `state` holds, whole or in parts, against the sums known here.

        Raises `StateMismatch` for another layout, `DigestMismatch` with the tensor and the chunk that differ.
        """
        for name, t in state.items():
            if self.layout(name) != (t.dtype, t.shape):
                raise StateMismatch(f"{name}: {t.dtype}{list(t.shape)} held, {self.layout(name)} expected")
            for chunk, total in zip(held_chunks(t, name), held_sums(t, name), strict=True):
                if total != self.chunk_sum(name, chunk):
                    raise DigestMismatch(f"{name}: chunk {chunk} is not what its sum says")

    def _entry(self, name: str) -> _Sums:
        entry = self._sums.get(name)
        if entry is None:
            raise StateMismatch(f"tensor {name!r} is not in this state")
        return entry

    @property
    def hex(self) -> str:
        """64 hex digits. Independent of the order of the mapping. Raises `StateMismatch` while a sum is not known."""
        if self._hex is None:
            hasher = blake3()
            for name in sorted(self._sums):
                entry = self._sums[name]
                if entry.total is None:
                    entry.total = sum(self.chunk_sums(name)) & MASK_128
                encoded = name.encode()
                hasher.update(
                    len(encoded).to_bytes(4, "little") + encoded + _layout(entry.dtype, entry.shape)
                )
                hasher.update(entry.total.to_bytes(16, "little"))
            self._hex = hasher.hexdigest()
        return self._hex


def _layout(dtype: str, shape: tuple[int, ...]) -> bytes:
    tag = dtype.encode()
    return (
        len(tag).to_bytes(1, "little")
        + tag
        + len(shape).to_bytes(1, "little")
        + b"".join(n.to_bytes(8, "little") for n in shape)
    )
