"""From a state and delta shards to the next state, on copies: what is being served is never written to (C31, C34)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollwire.kernels.delta import frames, gap
from rollwire.kernels.delta.format import FLOATS, Block, Piece, Shard, read_shard
from rollwire.kernels.digest import StateDigest
from rollwire.kernels.tensors import State, Tensor, lane_dtype
from rollwire.schemas.errors import BaseMismatch, DeltaCorrupt, DigestMismatch, StateMismatch

_STATUS = {
    gap.OUT_OF_RANGE: "a changed element lies beyond its piece",
    gap.NO_CHANGE: "a changed element does not change",
    gap.WIDE_COUNT: "the number of wide gaps is not the stated one",
}


class Applied(NamedTuple):
    state: dict[str, Tensor]
    digest: StateDigest


class DeltaStage:
    """A state under construction. Tensors are copied when they first change and shared with the base until then.

    Deltas are applied one after the other; after any error the stage is spoilt and must be dropped, the base is whole.
    """

    def __init__(self, base: State, digest: StateDigest) -> None:
        """`digest` is the digest of `base`; it is not changed."""
        self._state = dict(base)
        self._digest = digest.copy()
        self._copied: set[str] = set()

    def apply(self, shards: Iterable[bytes]) -> None:
        """Applies one delta: all of its shards, in any order; memory holds one at a time.

        Raises `DeltaCorrupt` (damage, a missing or repeated shard), `StateMismatch` (tensors that are not here, or of
        another dtype or shape), `BaseMismatch` (made for another base), `DigestMismatch` (another result).
        """
        base = self._digest.hex
        result: str | None = None
        count = 0
        seen: set[int] = set()
        for data in shards:
            shard = read_shard(data)
            self._check_layout(shard)
            if shard.base != base:
                raise BaseMismatch(f"the delta is for base {shard.base[:16]}, held is {base[:16]}")
            if result is None:
                result, count = shard.result, shard.shards
            if (shard.result, shard.shards) != (result, count) or shard.number in seen:
                raise DeltaCorrupt(f"shard {shard.number} of {shard.shards} is of another delta, or a repeat")
            seen.add(shard.number)
            for block, frame in zip(shard.blocks, shard.frames, strict=True):
                self._apply_block(block, frame)
        if len(seen) != count:
            raise DeltaCorrupt(f"{len(seen)} of {count} shards of a delta")
        if result is not None and self._digest.hex != result:
            raise DigestMismatch(f"the delta gave {self._digest.hex[:16]}, announced was {result[:16]}")

    def done(self) -> Applied:
        return Applied(self._state, self._digest)

    def _check_layout(self, shard: Shard) -> None:
        for block in shard.blocks:
            for piece in block.pieces:
                held = self._state.get(piece.name)
                if held is None:
                    raise StateMismatch(f"the delta changes {piece.name!r}, which is not held")
                lane_dtype(piece.dtype)
                if (held.dtype, held.shape) != (piece.dtype, piece.shape):
                    raise StateMismatch(
                        f"{piece.name}: {piece.dtype}{list(piece.shape)} in the delta, "
                        f"{held.dtype}{list(held.shape)} held"
                    )
                size = held.bits.size
                if not (
                    0 <= piece.start <= piece.start + piece.count <= size
                    and 0 < piece.changed <= piece.count
                    and 0 <= piece.wide <= piece.changed
                ):
                    raise DeltaCorrupt(f"{piece.name}: an impossible piece {piece} of {size} elements")

    def _apply_block(self, block: Block, frame: memoryview) -> None:
        raw = np.frombuffer(frames.unpack(frame, block.raw_bytes), dtype=np.uint8)
        gaps_at = 0
        wide_at = sum(piece.changed for piece in block.pieces)
        plane_at = wide_at + 4 * sum(piece.wide for piece in block.pieces)
        planes: list[list[int]] = [[] for _ in block.pieces]
        for k in range(8):
            for piece, at in zip(block.pieces, planes, strict=True):
                if k < piece.lane:
                    at.append(plane_at)
                    plane_at += piece.changed
        for piece, at in zip(block.pieces, planes, strict=True):
            self._apply_piece(piece, raw, gaps_at, wide_at, at)
            gaps_at += piece.changed
            wide_at += 4 * piece.wide

    def _apply_piece(
        self, piece: Piece, raw: NDArray[Any], gaps_at: int, wide_at: int, planes_at: list[int]
    ) -> None:
        tensor = self._state[piece.name]
        if piece.name not in self._copied:
            tensor = Tensor(tensor.dtype, tensor.shape, np.array(tensor.bits, order="C"))
            self._state[piece.name] = tensor
            self._copied.add(piece.name)
        status, change = gap.decode_piece(
            tensor.bits[piece.start : piece.start + piece.count],
            piece.start,
            piece.dtype in FLOATS,
            raw,
            gaps_at,
            wide_at,
            planes_at,
            piece.changed,
            piece.wide,
        )
        if status != gap.OK:
            raise DeltaCorrupt(f"{piece.name}: {_STATUS[status]}")
        self._digest.add(piece.name, change)


def apply_delta(base: State, shards: Iterable[bytes], *, digest: StateDigest | None = None) -> Applied:
    """The state that a delta gives. `base` is not written to; unchanged tensors of the result are shared with it.

    `digest` is the digest of `base`, where the caller has it: it saves one pass. Errors as `DeltaStage.apply`.
    """
    stage = DeltaStage(base, StateDigest.of(base) if digest is None else digest)
    stage.apply(shards)
    return stage.done()
