"""From two states to delta shards."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, NamedTuple

from rollwire.kernels.delta import frames
from rollwire.kernels.delta.format import FLOATS, PIECE_ELEMENTS, Block, Piece, write_shard
from rollwire.kernels.delta.gap import EncodedPiece, GapEncoder
from rollwire.kernels.digest import StateDigest
from rollwire.kernels.tensors import State, lane_dtype
from rollwire.schemas.errors import StateMismatch

_GROUP_ELEMENTS: Final = 4 * PIECE_ELEMENTS  # what one thread takes at a time, and one block covers


class Delta(NamedTuple):
    shards: tuple[bytes, ...]  # empty = nothing changed
    base: str  # digest, hex
    result: StateDigest
    changed_elements: int
    total_elements: int


class _Cut(NamedTuple):
    name: str
    start: int
    length: int


class _Scratch(threading.local):
    def __init__(self) -> None:
        self.encoder = GapEncoder()


_scratch = _Scratch()


def check_layout(old: State, new: State, *, held: str = "base", other: str = "new state") -> None:
    """Raises `StateMismatch` unless names, dtypes and shapes are equal and every dtype is known (C27, C31)."""
    missing, extra = sorted(old.keys() - new.keys()), sorted(new.keys() - old.keys())
    if missing or extra:
        raise StateMismatch(
            f"the {other} lacks {len(missing)} tensors of the {held} {missing[:3]}, "
            f"and has {len(extra)} that are not there {extra[:3]}"
        )
    for name, a in old.items():
        b = new[name]
        lane = lane_dtype(a.dtype)
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            raise StateMismatch(
                f"{name}: {a.dtype}{list(a.shape)} in the {held}, {b.dtype}{list(b.shape)} in the {other}"
            )
        if not a.bits.size == b.bits.size or a.bits.dtype != lane or b.bits.dtype != lane:
            raise StateMismatch(f"{name}: bits do not fit {a.dtype}{list(a.shape)}")


def encode_delta(
    old: State,
    new: State,
    *,
    base: StateDigest | None = None,
    shard_bytes: int = 256 << 20,
    threads: int = 1,
) -> Delta:
    """The delta from `old` to `new`, in shards of about `shard_bytes` (at least one block each).

    `base` is the digest of `old`, where the caller has it: it saves one pass. The bytes do not depend on `threads`.
    Raises `StateMismatch` where names, dtypes or shapes differ.
    """
    check_layout(old, new)
    base = StateDigest.of(old) if base is None else base
    result = base.copy()
    groups = list(_groups(old))
    if threads > 1:
        with ThreadPoolExecutor(threads, thread_name_prefix="delta") as pool:
            encoded = list(pool.map(lambda group: _encode_group(old, new, group), groups))
    else:
        encoded = [_encode_group(old, new, group) for group in groups]
    shards: list[list[tuple[Block, bytes]]] = []
    size, changed = 0, 0
    for block, frame, changes in encoded:
        if not block.pieces:
            continue
        if not shards or size + len(frame) > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append((block, frame))
        size += len(frame)
        for name, change in changes:
            result.add(name, change)
        changed += sum(piece.changed for piece in block.pieces)
    base_hex, result_hex = base.hex, result.hex
    return Delta(
        tuple(write_shard(i, len(shards), base_hex, result_hex, blocks) for i, blocks in enumerate(shards)),
        base_hex,
        result,
        changed,
        sum(t.bits.size for t in old.values()),
    )


def _groups(state: State) -> Iterator[list[_Cut]]:
    """Consecutive runs of elements, by name, in groups of about `_GROUP_ELEMENTS`."""
    group: list[_Cut] = []
    filled = 0
    for name in sorted(state):
        size = state[name].bits.size
        for start in range(0, size, PIECE_ELEMENTS):
            count = min(PIECE_ELEMENTS, size - start)
            if filled + count > _GROUP_ELEMENTS and group:
                yield group
                group, filled = [], 0
            group.append(_Cut(name, start, count))
            filled += count
    if group:
        yield group


def _encode_group(
    old: State, new: State, group: Sequence[_Cut]
) -> tuple[Block, bytes, list[tuple[str, int]]]:
    pieces: list[Piece] = []
    encoded: list[EncodedPiece] = []
    for cut in group:
        a, b = old[cut.name], new[cut.name]
        end = cut.start + cut.length
        piece = _scratch.encoder.encode(
            a.bits[cut.start : end], b.bits[cut.start : end], cut.start, a.dtype in FLOATS
        )
        if piece.changed:
            pieces.append(Piece(cut.name, a.dtype, a.shape, cut.start, cut.length, piece.changed, piece.wide))
            encoded.append(piece)
    if not pieces:
        return Block((), 0), b"", []
    raw = b"".join(
        [
            *(piece.gaps_N for piece in encoded),
            *(piece.wide_W for piece in encoded),
            *(piece.planes[k] for k in range(8) for piece in encoded if k < len(piece.planes)),
        ]
    )
    frame = frames.pack(raw)
    changes = [(piece.name, code.digest_change) for piece, code in zip(pieces, encoded, strict=True)]
    return Block(tuple(pieces), len(frame)), frame, changes
