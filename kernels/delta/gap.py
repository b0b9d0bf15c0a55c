"""The gap coder's loops: positions of changed elements as gaps, values as zigzag differences. See `format`.

Legend: N changed elements, W wide gaps, M elements of a piece.

Encoding reads both states as 64-bit words, whatever the lanes are, so that one compiled loop serves every dtype and
skips eight unchanged bytes with one comparison. Decoding writes lanes, one compiled loop per width that is used.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollwire.kernels.delta.format import PIECE_ELEMENTS
from rollwire.kernels.digest import aligned, jit, join_128, lanes, mix_hi, mix_lo

OK: Final = 0
OUT_OF_RANGE: Final = 1
NO_CHANGE: Final = 2
WIDE_COUNT: Final = 3

_U0, _U1, _U8, _U63, _U255 = np.uint64(0), np.uint64(1), np.uint64(8), np.uint64(63), np.uint64(255)


class EncodedPiece(NamedTuple):
    changed: int
    wide: int
    gaps_N: bytes
    wide_W: bytes
    planes: tuple[bytes, ...]  # `lane` planes of N bytes
    digest_change: int  # what the changes add to the tensor's incremental digest


@jit()
def _ordered(bits: np.uint64, sign: np.uint64, mask: np.uint64) -> np.uint64:
    return (~bits & mask) if bits & sign else (bits | sign)


@jit()
def _unordered(value: np.uint64, sign: np.uint64, mask: np.uint64) -> np.uint64:
    return (value ^ sign) if value & sign else (~value & mask)


def _encode(
    old_words: NDArray[np.uint64],
    new_words: NDArray[np.uint64],
    lane: int,
    ordered: bool,
    start: np.uint64,
    gaps: NDArray[np.uint8],
    wide: NDArray[np.uint32],
    planes: NDArray[np.uint8],
) -> tuple[int, int, np.uint64, np.uint64]:
    width = np.uint64(8 * lane)
    per_word = 8 // lane
    mask = ~_U0 if lane == 8 else (_U1 << width) - _U1
    sign = _U1 << (width - _U1)
    n, w = 0, 0
    following = 0  # the element after the last changed one
    lo, hi = _U0, _U0
    for word in range(old_words.size):
        a, b = old_words[word], new_words[word]
        if a == b:
            continue
        for k in range(per_word):
            shift = width * np.uint64(k)
            old, new = (a >> shift) & mask, (b >> shift) & mask
            if old == new:
                continue
            element = word * per_word + k
            gap = element - following
            following = element + 1
            if gap < 255:
                gaps[n] = gap
            else:
                gaps[n] = 255
                wide[w] = gap - 255
                w += 1
            if ordered:
                difference = (_ordered(new, sign, mask) - _ordered(old, sign, mask)) & mask
            else:
                difference = (new - old) & mask
            value = (difference << _U1) & mask
            if difference & sign:
                value = ~value & mask
            for p in range(lane):
                planes[p, n] = (value >> (_U8 * np.uint64(p))) & _U255
            n += 1
            index = start + np.uint64(element)
            plus, minus = mix_lo(index, new), mix_lo(index, old)
            hi += mix_hi(index, new) - mix_hi(index, old)
            lo += plus
            if lo < plus:
                hi += _U1
            if lo < minus:
                hi -= _U1
            lo -= minus
    return n, w, lo, hi


def _decode(
    target_M: NDArray[Any],
    lane: int,
    ordered: bool,
    start: np.uint64,
    raw: NDArray[np.uint8],
    gaps_at: int,
    wide_at: int,
    planes_at: NDArray[np.int64],
    changed: int,
    wide: int,
) -> tuple[int, np.uint64, np.uint64]:
    width = np.uint64(8 * lane)
    mask = ~_U0 if lane == 8 else (_U1 << width) - _U1
    sign = _U1 << (width - _U1)
    position = -1
    w = 0
    lo, hi = _U0, _U0
    for n in range(changed):
        gap = int(raw[gaps_at + n])
        if gap == 255:
            if w == wide:
                return WIDE_COUNT, lo, hi
            at = wide_at + 4 * w
            for p in range(4):
                gap += int(raw[at + p]) << (8 * p)
            w += 1
        position += gap + 1
        if position >= target_M.size:
            return OUT_OF_RANGE, lo, hi
        value = _U0
        for p in range(lane):
            value |= np.uint64(raw[planes_at[p] + n]) << (_U8 * np.uint64(p))
        if value == _U0:
            return NO_CHANGE, lo, hi
        difference = value >> _U1
        if value & _U1:
            difference = ~difference & mask
        old = np.uint64(target_M[position])
        if ordered:
            new = _unordered((_ordered(old, sign, mask) + difference) & mask, sign, mask)
        else:
            new = (old + difference) & mask
        target_M[position] = new
        index = start + np.uint64(position)
        plus, minus = mix_lo(index, new), mix_lo(index, old)
        hi += mix_hi(index, new) - mix_hi(index, old)
        lo += plus
        if lo < plus:
            hi += _U1
        if lo < minus:
            hi -= _U1
        lo -= minus
    return (OK if w == wide else WIDE_COUNT), lo, hi


@cache
def _encode_kernel() -> Callable[..., Any]:
    scratch = f"{lanes(1, readonly=False)}, {lanes(4, readonly=False)}, Array(uint8, 2, 'C')"
    return jit(
        f"Tuple((int64, int64, uint64, uint64))({lanes(8)}, {lanes(8)}, int64, boolean, uint64, {scratch})"
    )(_encode)


@cache
def _decode_kernel(lane: int) -> Callable[..., Any]:
    target = lanes(lane, readonly=False)
    return jit(
        f"Tuple((int64, uint64, uint64))({target}, int64, boolean, uint64, {lanes(1)}, int64, int64, "
        f"Array(int64, 1, 'C'), int64, int64)"
    )(_decode)


def _words(bits_M: NDArray[Any]) -> NDArray[np.uint64]:
    """The lanes as 64-bit words, the last one filled up with zeros (equal on both sides: never a change)."""
    per_word = 8 // bits_M.dtype.itemsize
    if bits_M.size % per_word or bits_M.ctypes.data % 8:
        padded = np.zeros(-(-bits_M.size // per_word) * per_word, dtype=bits_M.dtype)
        padded[: bits_M.size] = bits_M
        bits_M = padded
    return bits_M.view(np.uint64)


class GapEncoder:
    """Scratch for one piece at a time: 13 MiB, of which only touched pages cost memory. One a thread."""

    def __init__(self) -> None:
        self._gaps = np.empty(PIECE_ELEMENTS, dtype=np.uint8)
        self._wide = np.empty(PIECE_ELEMENTS // 256 + 1, dtype=np.uint32)
        self._planes = np.empty((8, PIECE_ELEMENTS), dtype=np.uint8)

    def encode(self, old_M: NDArray[Any], new_M: NDArray[Any], start: int, ordered: bool) -> EncodedPiece:
        """Two runs of at most `PIECE_ELEMENTS` equal-width lanes; `start`: the run's first element in its tensor."""
        lane = old_M.dtype.itemsize
        n, w, lo, hi = _encode_kernel()(
            _words(old_M), _words(new_M), lane, ordered, start, self._gaps, self._wide, self._planes
        )
        return EncodedPiece(
            n,
            w,
            self._gaps[:n].tobytes(),
            self._wide[:w].tobytes(),
            tuple(self._planes[p, :n].tobytes() for p in range(lane)),
            join_128(lo, hi),
        )


def decode_piece(
    target_M: NDArray[Any],
    start: int,
    ordered: bool,
    raw: NDArray[np.uint8],
    gaps_at: int,
    wide_at: int,
    planes_at: list[int],
    changed: int,
    wide: int,
) -> tuple[int, int]:
    """Applies a piece to `target_M` (writable, contiguous) in place; returns a status and the digest's change.

    The caller has checked that the streams lie within `raw`. On any status but `OK` the target is spoilt: it must be
    a copy.
    """
    lane = target_M.dtype.itemsize
    status, lo, hi = _decode_kernel(lane)(
        target_M,
        lane,
        ordered,
        start,
        aligned(raw),
        gaps_at,
        wide_at,
        np.array(planes_at, dtype=np.int64),
        changed,
        wide,
    )
    return int(status), join_128(lo, hi)
