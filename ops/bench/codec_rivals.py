"""What `rollwire bench codec` compares with: other ways to make bf16 weights smaller, with and without the version before.

Each works on flat arrays in pieces of 4 MiB, on one thread, and checks nothing: no digest, no bounds. Methods as their
users publish them, written here in numpy over the same zstd:

    xor     old XOR new, zstd-1 (slime)
    split   the same, first all low bytes, then all high bytes
    index   gaps between changed elements as 16 bits (65,535 = and more, which stand beside), the new values' XOR, zstd-1
            (NeMo-RL)
    full    the new weights alone, zstd-1
    zipnn   the new weights alone, the package zipnn; it alters its input, so it gets a copy (not timed)
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import zstandard
from numpy.typing import NDArray

PIECE: Final = 2 << 20  # elements
_MARK: Final = 0xFFFF

Array = NDArray[np.uint16]
Arrays = Sequence[Array]


class Rival(NamedTuple):
    """`encode(old, new)` gives frames, `decode(old, frames)` the new arrays; one piece each, in order."""

    name: str
    encode: Callable[[Arrays, Arrays], list[bytes]]
    decode: Callable[[Arrays, Sequence[bytes]], list[Array]]


def pieces(arrays: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
    """All elements end to end, cut into pieces."""
    flat = np.concatenate([array.reshape(-1) for array in arrays])
    return [flat[at : at + PIECE] for at in range(0, flat.size, PIECE)]


def rivals(*, zipnn: bool) -> list[Rival]:
    """Raises `ModuleNotFoundError` where `zipnn` is wanted and not installed."""
    compress = zstandard.ZstdCompressor(level=1).compress
    decompress = zstandard.ZstdDecompressor().decompress

    def xor_encode(old: Arrays, new: Arrays) -> list[bytes]:
        return [compress((a ^ b).data) for a, b in zip(old, new, strict=True)]

    def xor_decode(old: Arrays, frames: Sequence[bytes]) -> list[Array]:
        return [a ^ np.frombuffer(decompress(f), "<u2") for a, f in zip(old, frames, strict=True)]

    def split_encode(old: Arrays, new: Arrays) -> list[bytes]:
        return [
            compress(np.ascontiguousarray((a ^ b).view(np.uint8).reshape(-1, 2).T).data)
            for a, b in zip(old, new, strict=True)
        ]

    def split_decode(old: Arrays, frames: Sequence[bytes]) -> list[Array]:
        return [
            a
            ^ np.ascontiguousarray(np.frombuffer(decompress(f), np.uint8).reshape(2, -1).T).view("<u2")[:, 0]
            for a, f in zip(old, frames, strict=True)
        ]

    def index_encode(old: Arrays, new: Arrays) -> list[bytes]:
        return [compress(_index(a, b)) for a, b in zip(old, new, strict=True)]

    def index_decode(old: Arrays, frames: Sequence[bytes]) -> list[Array]:
        return [_unindex(a, decompress(f)) for a, f in zip(old, frames, strict=True)]

    def full_encode(_old: Arrays, new: Arrays) -> list[bytes]:
        return [compress(b.data) for b in new]

    def full_decode(_old: Arrays, frames: Sequence[bytes]) -> list[Array]:
        return [np.frombuffer(decompress(f), "<u2") for f in frames]

    found = [
        Rival("xor", xor_encode, xor_decode),
        Rival("split", split_encode, split_decode),
        Rival("index", index_encode, index_decode),
        Rival("full", full_encode, full_decode),
    ]
    return [*found, _zipnn()] if zipnn else found


def _index(old: Array, new: Array) -> bytes:
    places = np.flatnonzero(old != new)
    gaps = np.diff(places, prepend=-1) - 1
    wide = gaps[gaps >= _MARK].astype("<u4")
    head = np.array([places.size, wide.size], dtype="<u4")
    values = old[places] ^ new[places]
    narrow = np.minimum(gaps, _MARK).astype("<u2")
    return b"".join(part.tobytes() for part in (head, narrow, wide, values))


def _unindex(old: Array, raw: bytes) -> Array:
    count, wide = (int(x) for x in np.frombuffer(raw, "<u4", 2))
    gaps = np.frombuffer(raw, "<u2", count, 8).astype(np.int64)
    gaps[gaps == _MARK] = np.frombuffer(raw, "<u4", wide, 8 + 2 * count)
    new = old.copy()
    new[np.cumsum(gaps + 1) - 1] ^= np.frombuffer(raw, "<u2", count, 8 + 2 * count + 4 * wide)
    return new


def _zipnn() -> Rival:
    with warnings.catch_warnings():  # its import of torch warns
        warnings.simplefilter("ignore")
        module = importlib.import_module("zipnn")
    coder = module.ZipNN(bytearray_dtype="bfloat16", threads=1)

    def encode(_old: Arrays, new: Arrays) -> list[bytes]:
        return [bytes(coder.compress(b.tobytes())) for b in new]

    def decode(_old: Arrays, frames: Sequence[bytes]) -> list[Array]:
        return [np.frombuffer(coder.decompress(f), "<u2") for f in frames]

    return Rival("zipnn", encode, decode)
