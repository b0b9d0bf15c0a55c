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
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from typing import Any, Final, NamedTuple, Self

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


def plain(compiled: Any) -> Callable[..., Any]:
    """The Python function of a compiled one, to be compiled again for stated types."""
    function: Callable[..., Any] = compiled.py_func
    return function


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


class _Layout(NamedTuple):
    """What copies of a digest share: T tensors, in order of name, and all their chunks, C, side by side."""

    names: dict[str, int]  # -> which tensor
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    first_T: NDArray[np.int64]  # [T + 1] the row of each tensor's first chunk, and C
    labels: tuple[bytes, ...]  # what the state's digest covers beside the sums


class StateDigest:
    """The incremental digest of a whole state. Mutable; `copy` it before an update that may be given up.

    Of a state of parts it knows the sums of these parts' chunks only, until `fill` or `set` says the others.
    """

    __slots__ = ("_hex", "_known", "_layout", "_sums")

    def __init__(self, layout: _Layout, sums_C: NDArray[np.uint64], known_C: NDArray[np.bool_]) -> None:
        self._layout = layout
        self._sums = sums_C  # [C, 2] low and high 64 bits
        self._known = known_C
        self._hex: str | None = None

    @classmethod
    def of(cls, state: State) -> Self:
        """Reads every element once. Raises `StateMismatch` for parts off the chunk grid."""
        digest = cls._unknown({name: (t.dtype, t.shape) for name, t in state.items()})
        for name, t in state.items():
            row = int(digest._layout.first_T[digest._layout.names[name]]) + t.start // CHUNK_ELEMENTS
            held = b"".join(total.to_bytes(16, "little") for total in held_sums(t, name))
            digest._put(row, held)
        return digest

    @classmethod
    def from_sums(cls, table: Mapping[str, tuple[str, tuple[int, ...], bytes]]) -> Self:
        """From name -> (dtype, shape, sums), as `table` gives it: 16 little-endian bytes a chunk, in order.

        Raises `StateMismatch` where their number does not fit the shape.
        """
        digest = cls._unknown({name: (dtype, shape) for name, (dtype, shape, _) in table.items()})
        for name, (_, shape, packed) in table.items():
            if len(packed) != 16 * chunk_count(math.prod(shape)):
                raise StateMismatch(f"{name}: {len(packed)} bytes of chunk sums do not fit {list(shape)}")
            digest._put(int(digest._layout.first_T[digest._layout.names[name]]), packed)
        return digest

    @classmethod
    def _unknown(cls, layouts: Mapping[str, tuple[str, tuple[int, ...]]]) -> Self:
        names = sorted(layouts)
        first_T = np.zeros(len(names) + 1, np.int64)
        np.cumsum([chunk_count(math.prod(layouts[name][1])) for name in names], out=first_T[1:])
        layout = _Layout(
            {name: i for i, name in enumerate(names)},
            tuple(layouts[name][0] for name in names),
            tuple(layouts[name][1] for name in names),
            first_T,
            tuple(_label(name, *layouts[name]) for name in names),
        )
        count = int(first_T[-1])
        return cls(layout, np.zeros((count, 2), np.uint64), np.zeros(count, np.bool_))

    def _put(self, row: int, packed: bytes) -> None:
        sums = np.frombuffer(packed, "<u8").reshape(-1, 2)
        self._sums[row : row + len(sums)] = sums
        self._known[row : row + len(sums)] = True

    def table(self) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
        """What `from_sums` reads. Raises `StateMismatch` while a chunk's sum is not known."""
        self._all_known()
        first_T, layout = self._layout.first_T, self._layout
        return {
            name: (
                layout.dtypes[i],
                layout.shapes[i],
                self._sums[first_T[i] : first_T[i + 1]].astype("<u8").tobytes(),
            )
            for name, i in layout.names.items()
        }

    def copy(self) -> StateDigest:
        made = StateDigest(self._layout, self._sums.copy(), self._known.copy())
        made._hex = self._hex
        return made

    def __contains__(self, name: str) -> bool:
        return name in self._layout.names

    @property
    def names(self) -> Collection[str]:
        """In order."""
        return self._layout.names.keys()

    @property
    def table_limit(self) -> int:
        """Bytes that the table of a delta of this state has at most, unpacked; generous, so that a delta of a somewhat
        different state is refused for what it is."""
        row_bytes, around = 31, 32  # of a chunk; of a tensor, beside its label
        labels = sum(map(len, self._layout.labels))
        return (64 << 10) + 2 * (labels + around * len(self._layout.labels) + row_bytes * len(self._sums))

    def layout(self, name: str) -> tuple[str, tuple[int, ...]]:
        """(dtype, shape). Raises `StateMismatch` for an unknown name."""
        at = self._tensor(name)
        return self._layout.dtypes[at], self._layout.shapes[at]

    def chunk_sums(self, name: str) -> tuple[int, ...]:
        """Raises `StateMismatch` for an unknown name, or while a chunk's sum is not known."""
        at = self._tensor(name)
        count = int(self._layout.first_T[at + 1] - self._layout.first_T[at])
        return tuple(self.chunk_sum(name, chunk) for chunk in range(count))

    def chunk_sum(self, name: str, chunk: int) -> int:
        """Raises `StateMismatch` as `chunk_sums`, and for a chunk that is not there."""
        row = self._row(name, chunk)
        if not self._known[row]:
            raise StateMismatch(f"{name}: the sum of chunk {chunk} is not known")
        return join_128(*self._sums[row].tolist())

    def rows(self, names: Sequence[str]) -> NDArray[np.int64]:
        """The row of each tensor's first chunk, for `sums_at` and `set_at`. Raises `StateMismatch` for an unknown name."""
        first_T = self._layout.first_T
        return first_T[[self._tensor(name) for name in names]] if len(names) else first_T[:0]

    def sums_at(self, rows_K: NDArray[np.int64]) -> NDArray[np.uint64]:
        """[K, 2] low and high halves of these chunks' sums. Raises `StateMismatch` where one is not known."""
        if not self._known[rows_K].all():
            raise StateMismatch(f"{int((~self._known[rows_K]).sum())} chunks' sums are not known")
        return self._sums[rows_K]

    def set_at(self, rows_K: NDArray[np.int64], sums_K: NDArray[np.uint64]) -> None:
        """As `set`, for many chunks: [K, 2] low and high halves."""
        self._sums[rows_K] = sums_K
        self._known[rows_K] = True
        self._hex = None

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
        lane = LANE_BYTES[self.layout(name)[0]]
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
        row = self._row(name, chunk)
        self._sums[row] = total & (2**64 - 1), total >> 64
        self._known[row] = True
        self._hex = None

    def fill(self, other: StateDigest) -> None:
        """Takes from `other` what is not known here: other parts of the same state (another rank's).

        Raises `StateMismatch` where layouts differ, `DigestMismatch` where both know a chunk and disagree.
        """
        both = {name: self.layout(name) for name in self.names}
        for name in other.names:
            theirs = other.layout(name)
            if both.setdefault(name, theirs) != theirs:
                raise StateMismatch(
                    f"{name}: {both[name][0]}{list(both[name][1])} here, {theirs[0]}{list(theirs[1])} there"
                )
        merged = StateDigest._unknown(both)
        for source in (self, other):
            for name, at in source._layout.names.items():
                theirs_C = slice(*source._layout.first_T[at : at + 2].tolist())
                first = int(merged._layout.first_T[merged._layout.names[name]])
                rows = first + np.flatnonzero(source._known[theirs_C])
                sums = source._sums[theirs_C][source._known[theirs_C]]
                twice = merged._known[rows] & (merged._sums[rows] != sums).any(axis=1)
                if twice.any():
                    raise DigestMismatch(
                        f"{name}: chunk {int(rows[twice][0]) - first} is another one there than here"
                    )
                merged.set_at(rows, sums)
        self._layout, self._sums, self._known, self._hex = merged._layout, merged._sums, merged._known, None

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

    def _tensor(self, name: str) -> int:
        at = self._layout.names.get(name)
        if at is None:
            raise StateMismatch(f"tensor {name!r} is not in this state")
        return at

    def _row(self, name: str, chunk: int) -> int:
        first, end = self._layout.first_T[(at := self._tensor(name)) : at + 2].tolist()
        if not 0 <= chunk < end - first:
            raise StateMismatch(f"{name} has {end - first} chunks, no chunk {chunk}")
        return int(first) + chunk

    def _all_known(self) -> None:
        if not self._known.all():
            row = int(np.flatnonzero(~self._known)[0])
            at = int(np.searchsorted(self._layout.first_T, row, side="right")) - 1
            raise StateMismatch(
                f"{int((~self._known).sum())} chunks' sums are not known, the first of {list(self.names)[at]!r}"
            )

    @property
    def hex(self) -> str:
        """64 hex digits. Independent of the order of the mapping. Raises `StateMismatch` while a sum is not known."""
        if self._hex is None:
            self._all_known()
            totals = np.empty((len(self._layout.labels), 2), np.uint64)
            _totals_kernel()(self._sums, self._layout.first_T, totals)
            packed = totals.astype("<u8").tobytes()
            parts = [
                part
                for i, label in enumerate(self._layout.labels)
                for part in (label, packed[16 * i : 16 * i + 16])
            ]
            self._hex = blake3(b"".join(parts)).hexdigest()
        return self._hex


def _totals(sums_C: NDArray[np.uint64], first_T: NDArray[np.int64], totals_T: NDArray[np.uint64]) -> None:
    for t in range(first_T.size - 1):
        lo, hi = np.uint64(0), np.uint64(0)
        for c in range(first_T[t], first_T[t + 1]):
            lo += sums_C[c, 0]
            hi += sums_C[c, 1]
            if lo < sums_C[c, 0]:
                hi += _ONE
        totals_T[t, 0], totals_T[t, 1] = lo, hi


@cache
def _totals_kernel() -> Callable[..., Any]:
    return jit("void(Array(uint64, 2, 'C', True), Array(int64, 1, 'C', True), Array(uint64, 2, 'C'))")(
        _totals
    )


def _label(name: str, dtype: str, shape: tuple[int, ...]) -> bytes:
    encoded = name.encode()
    return len(encoded).to_bytes(4, "little") + encoded + _layout(dtype, shape)


def _layout(dtype: str, shape: tuple[int, ...]) -> bytes:
    tag = dtype.encode()
    return (
        len(tag).to_bytes(1, "little")
        + tag
        + len(shape).to_bytes(1, "little")
        + b"".join(n.to_bytes(8, "little") for n in shape)
    )
