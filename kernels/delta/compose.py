"""One delta out of several that follow one another, without any of the states: gap deltas' steps add up.

Where one of them leads up and the next down again, an element drops out. The first base and the last result are those
of the whole; a chunk's sum after it is that of the last delta that touched it. Whoever applies the outcome verifies
it as any other delta: nothing here is taken on trust.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollwire.kernels.delta.encode import SHARD_BYTES, seal, split_chunks
from rollwire.kernels.delta.format import (
    CODER_GAP,
    Chunk,
    Head,
    payload_checksum,
    read_head,
)
from rollwire.kernels.delta.gap import OK, GapEncoder, parse_gap
from rollwire.kernels.digest import jit, lanes
from rollwire.kernels.tensors import lane_dtype
from rollwire.schemas.errors import BaseMismatch, DeltaCorrupt, StateMismatch, WeightError


class Composed(NamedTuple):
    shards: tuple[bytes, ...]  # empty = what changed came back
    base: str  # hex; "" where no delta had a shard
    result: str
    changed_elements: int
    heads: tuple[int, ...]  # bytes of each shard's head


class _Part(NamedTuple):
    """A chunk of one of the deltas."""

    dtype: str
    shape: tuple[int, ...]
    elements: int
    changed: int
    total: int
    checksum: int
    payload: memoryview


class _Scratch(threading.local):
    def __init__(self) -> None:
        self.gap = GapEncoder()


_scratch = _Scratch()


def compose_deltas(*deltas: Sequence[bytes], shard_bytes: int = SHARD_BYTES, threads: int = 1) -> Composed:
    """The delta from the base of the first to the result of the last of `deltas`, each given by all of its shards.

    A delta without shards (nothing changed) may be anywhere. Memory beyond the shards: the outcome, and a chunk's changes a
    thread. Raises `DeltaCorrupt` (damage, a missing shard), `BaseMismatch` (one does not follow the other),
    `StateMismatch` (other dtypes or shapes), `WeightError` (context deltas, which only their base can read).
    """
    parts: dict[tuple[str, int], list[_Part]] = {}
    base = result = ""
    for number, shards in enumerate(deltas):
        heads = [read_head(shard) for shard in shards]
        if not heads:
            continue
        _check_whole(heads, number)
        if base and heads[0].base != result:
            raise BaseMismatch(
                f"delta {number} is for base {heads[0].base[:16]}, the one before it gives {result[:16]}"
            )
        base, result = base or heads[0].base, heads[0].result
        for head, shard in zip(heads, shards, strict=True):
            for key, part in _parts(head, shard):
                before = parts.setdefault(key, [])
                if before and (before[0].dtype, before[0].shape) != (part.dtype, part.shape):
                    raise StateMismatch(
                        f"{key[0]}: {before[0].dtype}{list(before[0].shape)} in one delta, "
                        f"{part.dtype}{list(part.shape)} in the next"
                    )
                before.append(part)
    chunks = [c for c in _map(lambda key: _compose(key, parts[key]), sorted(parts), threads) if c is not None]
    sealed = seal(split_chunks(chunks, shard_bytes), base, result)
    return Composed(
        tuple(shard for shard, _ in sealed),
        base,
        result,
        sum(c.changed for c in chunks),
        tuple(head for _, head in sealed),
    )


def _map(
    work: Callable[[tuple[str, int]], Chunk | None], keys: Iterable[tuple[str, int]], threads: int
) -> Iterator[Chunk | None]:
    if threads <= 1:
        yield from map(work, keys)
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="delta") as pool:
        yield from pool.map(work, keys)


def _check_whole(heads: list[Head], number: int) -> None:
    first = heads[0]
    if sorted(head.shard for head in heads) != list(range(first.shards)):
        raise DeltaCorrupt(f"delta {number}: {len(heads)} of {first.shards} shards, each once")
    if any((h.base, h.result, h.shards) != (first.base, first.result, first.shards) for h in heads):
        raise DeltaCorrupt(f"delta {number}: its shards are of several deltas")


def _parts(head: Head, shard: bytes) -> Iterator[tuple[tuple[str, int], _Part]]:
    columns = head.columns
    if len(shard) != head.size:
        raise DeltaCorrupt(f"shard {head.shard} has {len(shard)} bytes, its head says {head.size}")
    if (columns.coder_K != CODER_GAP).any():
        raise WeightError("context deltas do not compose: encode the skip delta from the two states")
    body = memoryview(shard)[head.head_bytes :]
    for k, tensor in enumerate(columns.tensor_K.tolist()):
        lane_dtype(columns.dtypes[tensor])
        at, size = int(columns.offset_K[k]), int(columns.size_K[k])
        yield (
            (columns.names[tensor], int(columns.chunk_K[k])),
            _Part(
                columns.dtypes[tensor],
                columns.shapes[tensor],
                int(columns.elements_K[k]),
                int(columns.changed_K[k]),
                columns.total(k),
                int(columns.checksum_K[k]),
                body[at : at + size],
            ),
        )


def _compose(key: tuple[str, int], parts: list[_Part]) -> Chunk | None:
    name, chunk = key
    last = parts[-1]
    lane = lane_dtype(last.dtype)
    for part in parts:
        if payload_checksum(part.payload) != part.checksum:
            raise DeltaCorrupt(f"{name}: chunk {chunk}: its payload is damaged: fetch it again")
    if len(parts) == 1:
        payload, checksum, changed = bytes(last.payload), last.checksum, last.changed
    else:
        positions_N, steps_N = _parse(name, chunk, parts[0], lane)
        for part in parts[1:]:
            positions_N, steps_N = _merge(
                positions_N, steps_N, *_parse(name, chunk, part, lane), lane.itemsize
            )
        changed = positions_N.size
        if not changed:
            return None
        payload = _scratch.gap.pack_steps(positions_N, steps_N, lane.itemsize)
        checksum = payload_checksum(payload)
    return Chunk(name, last.dtype, last.shape, chunk, CODER_GAP, changed, last.total, checksum, payload)


def _parse(
    name: str, chunk: int, part: _Part, lane: np.dtype[Any]
) -> tuple[NDArray[np.uint32], NDArray[np.uint64]]:
    positions_N, steps_N = np.empty(part.changed, np.uint32), np.empty(part.changed, lane)
    payload = np.frombuffer(part.payload, np.uint8)
    if parse_gap(payload, part.elements, positions_N, steps_N) != OK:
        raise DeltaCorrupt(f"{name}: chunk {chunk}: its payload does not read")
    return positions_N, steps_N.astype(np.uint64)


def _merge(
    positions_N: NDArray[np.uint32],
    steps_N: NDArray[np.uint64],
    more_positions_N: NDArray[np.uint32],
    more_steps_N: NDArray[np.uint64],
    lane: int,
) -> tuple[NDArray[np.uint32], NDArray[np.uint64]]:
    size = positions_N.size + more_positions_N.size
    out_positions, out_steps = np.empty(size, np.uint32), np.empty(size, np.uint64)
    n = _merge_kernel()(positions_N, steps_N, more_positions_N, more_steps_N, lane, out_positions, out_steps)
    return out_positions[:n], out_steps[:n]


def _add_up(
    a_N: NDArray[np.uint32],
    a_steps_N: NDArray[np.uint64],
    b_N: NDArray[np.uint32],
    b_steps_N: NDArray[np.uint64],
    lane: int,
    out_N: NDArray[np.uint32],
    out_steps_N: NDArray[np.uint64],
) -> int:
    """Both lists ascend by position; so does the outcome, without those whose steps cancel modulo 2^(8 lane)."""
    width = np.uint64(8 * lane)
    mask = ~np.uint64(0) if lane == 8 else (np.uint64(1) << width) - np.uint64(1)
    i, j, n = 0, 0, 0
    while i < a_N.size or j < b_N.size:
        if j == b_N.size or (i < a_N.size and a_N[i] < b_N[j]):
            out_N[n], out_steps_N[n] = a_N[i], a_steps_N[i]
            i += 1
            n += 1
        elif i == a_N.size or b_N[j] < a_N[i]:
            out_N[n], out_steps_N[n] = b_N[j], b_steps_N[j]
            j += 1
            n += 1
        else:
            step = (a_steps_N[i] + b_steps_N[j]) & mask
            out_N[n], out_steps_N[n] = a_N[i], step
            n += step != np.uint64(0)
            i += 1
            j += 1
    return n


@cache
def _merge_kernel() -> Callable[..., Any]:
    u4, u8 = lanes(4), lanes(8)
    return jit(
        f"int64({u4}, {u8}, {u4}, {u8}, int64, {lanes(4, readonly=False)}, {lanes(8, readonly=False)})"
    )(_add_up)
