"""Digests of states: an incremental one for the serving path, blake3 per tensor for what lies at rest (law 5).

The incremental digest of a tensor is a sum modulo 2^128 over its elements:

    sum_i  mix(i, bits_i)      i = flat element index, bits_i = the element's bits, zero-extended to 64

A sum forgets order, so the index is mixed in; and a sum can be updated: a delta that changes a thousand of a billion
elements costs a thousand subtractions and additions. The state's digest is blake3 over the sorted names with their
dtypes, shapes and sums. It guards against damage, wrong bases and bugs; it is no defence against somebody who *wants*
a collision, which is what the SHA-256 of every stored object is for.

    mix(i, b):  k  = (i + 1) * GOLDEN
                lo = f(b ^ k; A1, A2)           f(z; p, q): z ^= z >> 32; z *= p; z ^= z >> 29; z *= q; z ^= z >> 32
                hi = f(b + rotl(k, 32); B1, B2)

All arithmetic is modulo 2^64; the two halves are added as one 128-bit number.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Final, Self

import numba
import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from rollwire.kernels.tensors import LANE_BYTES, State, Tensor
from rollwire.schemas.errors import StateMismatch

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
    """The incremental digest of one tensor, in [0, 2^128)."""
    bits_N = aligned(tensor.bits)
    lo, hi = _sum_kernel(bits_N.dtype.itemsize)(bits_N, 0)
    return join_128(lo, hi)


def tensor_blake3(tensor: Tensor) -> str:
    """blake3 (hex) over dtype, shape and little-endian elements: for anchors, staged copies and the scrub."""
    hasher = blake3(_layout(tensor.dtype, tensor.shape))
    hasher.update(np.ascontiguousarray(tensor.bits).view(np.uint8).data)
    return hasher.hexdigest()


class StateDigest:
    """The incremental digest of a whole state. Mutable; `copy` it before an update that may be given up."""

    __slots__ = ("_sums",)

    def __init__(self, sums: dict[str, tuple[str, tuple[int, ...], int]]) -> None:
        self._sums = sums

    @classmethod
    def of(cls, state: State) -> Self:
        """Reads every element once."""
        return cls({name: (t.dtype, t.shape, tensor_sum(t)) for name, t in state.items()})

    def copy(self) -> StateDigest:
        return StateDigest(dict(self._sums))

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
        dtype = self._entry(name)[0]
        lane = LANE_BYTES[dtype]
        for what, array in (("old", old_bits_N), ("new", new_bits_N)):
            if array.shape != positions_N.shape or array.dtype != np.dtype(f"<u{lane}"):
                raise StateMismatch(
                    f"{name}: {what} bits are {array.dtype}{list(array.shape)}, needed is u{lane}{list(positions_N.shape)}"
                )
        lo, hi = _change_kernel(lane)(
            aligned(positions_N.astype(np.uint64)), aligned(old_bits_N), aligned(new_bits_N)
        )
        self.add(name, join_128(lo, hi))

    def add(self, name: str, change: int) -> None:
        """Adds a change of the tensor's sum that was computed elsewhere (the delta kernels do)."""
        dtype, shape, total = self._entry(name)
        self._sums[name] = (dtype, shape, (total + change) & MASK_128)

    def _entry(self, name: str) -> tuple[str, tuple[int, ...], int]:
        entry = self._sums.get(name)
        if entry is None:
            raise StateMismatch(f"tensor {name!r} is not in this state")
        return entry

    @property
    def hex(self) -> str:
        """64 hex digits. Independent of the order of the mapping."""
        hasher = blake3()
        for name in sorted(self._sums):
            dtype, shape, total = self._sums[name]
            encoded = name.encode()
            hasher.update(len(encoded).to_bytes(4, "little") + encoded + _layout(dtype, shape))
            hasher.update(total.to_bytes(16, "little"))
        return hasher.hexdigest()


def _layout(dtype: str, shape: tuple[int, ...]) -> bytes:
    tag = dtype.encode()
    return (
        len(tag).to_bytes(1, "little")
        + tag
        + len(shape).to_bytes(1, "little")
        + b"".join(n.to_bytes(8, "little") for n in shape)
    )
