"""From two states to delta shards."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, Literal, NamedTuple, TypeVar

from rollwire.kernels.delta.changes import weigh
from rollwire.kernels.delta.context import LAYOUTS, ContextEncoder
from rollwire.kernels.delta.format import (
    CODER_CONTEXT,
    CODER_GAP,
    CODERS,
    Chunk,
    payload_checksum,
    write_shard,
)
from rollwire.kernels.delta.gap import GapEncoder
from rollwire.kernels.delta.runs import Piece, RunEncoder
from rollwire.kernels.digest import MASK_128, StateDigest
from rollwire.kernels.tensors import CHUNK_ELEMENTS, LANE_BYTES, State, held_chunks, lane_dtype
from rollwire.schemas.errors import StateMismatch

Coder = Literal["gap", "context"]
T = TypeVar("T")

SHARD_BYTES: Final = 64 << 20
_TASK_ELEMENTS: Final = (
    4 * CHUNK_ELEMENTS
)  # what a thread takes at a time, at least: small tensors by the dozen


class Delta(NamedTuple):
    shards: tuple[bytes, ...]  # empty = nothing changed
    base: str  # digest, hex
    result: StateDigest
    changed_elements: int
    total_elements: int  # of what was compared
    heads: tuple[int, ...]  # bytes of each shard's head


class Encoded(NamedTuple):
    """The changed chunks of a state, or of a rank's part of it, before they are sealed into shards."""

    chunks: tuple[Chunk, ...]  # by name and number
    changed_elements: int
    total_elements: int


class _Cut(NamedTuple):
    name: str
    chunk: int
    total: int  # the chunk's incremental sum before


class _Scratch(threading.local):
    def __init__(self) -> None:
        self.gap = GapEncoder()
        self.context = ContextEncoder()
        self.runs = RunEncoder()


_scratch = _Scratch()


def check_layout(old: State, new: State, *, held: str = "base", other: str = "new state") -> None:
    """Raises `StateMismatch` unless names, dtypes, shapes and parts are equal and every dtype is known (C27, C31)."""
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
        if (a.start, a.bits.size) != (b.start, b.bits.size) or a.bits.dtype != lane or b.bits.dtype != lane:
            raise StateMismatch(f"{name}: bits do not fit {a.dtype}{list(a.shape)} on both sides")


def encode_delta(
    old: State,
    new: State,
    *,
    base: StateDigest | None = None,
    result: StateDigest | None = None,
    coder: Coder = "gap",
    shard_bytes: int = SHARD_BYTES,
    threads: int = 1,
) -> Delta:
    """The delta from `old` to `new`, in shards of about `shard_bytes` (at least one chunk each).

    `base` is the digest of the old state, where the caller has it: it saves one pass. States of parts give a delta of
    these parts, and need `base` to be the digest of the whole; `result` is the whole's digest afterwards where more than
    these parts changed. The bytes do not depend on `threads`. Raises `StateMismatch` where names, dtypes, shapes or
    parts differ.
    """
    base = StateDigest.of(old) if base is None else base
    encoded = encode_chunks(old, new, base=base, coder=coder, threads=threads)
    return _delta(encoded, base, _after(base, encoded) if result is None else result, coder, shard_bytes)


def encode_both(
    old: State,
    new: State,
    *,
    base: StateDigest | None = None,
    coder: Coder = "gap",
    shard_bytes: int = SHARD_BYTES,
    threads: int = 1,
) -> tuple[Delta, Delta]:
    """The delta from `old` to `new` and the one back, chunk by chunk beside each other. As `encode_delta`.

    Gap deltas run backwards as they are: this is for the context coder, whose classes are those of the state that it
    starts from.
    """
    base = StateDigest.of(old) if base is None else base
    check_layout(old, new)

    def work(cuts: Sequence[_Cut]) -> list[tuple[Chunk, Chunk]]:
        pairs: list[tuple[Chunk, Chunk]] = []
        for cut in cuts:
            there = _encode_chunk(old, new, cut, coder)
            if there is not None:
                back = _encode_chunk(new, old, cut._replace(total=there.total), coder)
                if back is None:
                    raise StateMismatch(f"{cut.name}: chunk {cut.chunk} changed while it was encoded")
                pairs.append((there, back))
        return pairs

    found = [pair for pairs in _map(work, _tasks(old, base), threads) for pair in pairs]
    total = sum(t.bits.size for t in old.values())
    there = Encoded(tuple(a for a, _ in found), sum(a.changed for a, _ in found), total)
    back = Encoded(tuple(b for _, b in found), there.changed_elements, total)
    result = _after(base, there)
    return _delta(there, base, result, coder, shard_bytes), _delta(
        back, result, base.copy(), coder, shard_bytes
    )


def encode_chunks(
    old: State, new: State, *, base: StateDigest, coder: Coder = "gap", threads: int = 1
) -> Encoded:
    """The changed chunks alone: what a rank does with its part, before all ranks' sums give the result's digest.

    `base` knows the sums of the old state's chunks, of these parts at least. Raises `StateMismatch`.
    """
    check_layout(old, new)

    def work(cuts: Sequence[_Cut]) -> list[Chunk]:
        if coder == "gap":
            return _encode_run(old, new, cuts)
        chunks = [_encode_chunk(old, new, cut, coder) for cut in cuts]
        return [chunk for chunk in chunks if chunk is not None]

    chunks = tuple(chunk for some in _map(work, _tasks(old, base), threads) for chunk in some)
    return Encoded(chunks, sum(c.changed for c in chunks), sum(t.bits.size for t in old.values()))


def split_chunks(chunks: Sequence[Chunk], shard_bytes: int) -> list[list[Chunk]]:
    """The chunks of each shard. Several ranks must know how many shards all of them have before any is written."""
    shards: list[list[Chunk]] = []
    size = 0
    for chunk in chunks:
        if not shards or size + len(chunk.payload) > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(chunk)
        size += len(chunk.payload)
    return shards


def seal(
    shards: Sequence[list[Chunk]],
    base: str,
    result: str,
    *,
    coder: Coder = "gap",
    first: int = 0,
    of: int | None = None,
) -> list[tuple[bytes, int]]:
    """Shards with the bytes of their heads, from the lists of `split_chunks`.

    `first`, `of`: the number of the first of them and how many the whole delta has, where other ranks write the rest.
    """
    count = len(shards) if of is None else of
    return [
        write_shard(first + i, count, CODERS[coder], base, result, chunks) for i, chunks in enumerate(shards)
    ]


def _delta(encoded: Encoded, base: StateDigest, result: StateDigest, coder: Coder, shard_bytes: int) -> Delta:
    sealed = seal(split_chunks(encoded.chunks, shard_bytes), base.hex, result.hex, coder=coder)
    return Delta(
        tuple(shard for shard, _ in sealed),
        base.hex,
        result,
        encoded.changed_elements,
        encoded.total_elements,
        tuple(head for _, head in sealed),
    )


def _after(base: StateDigest, encoded: Encoded) -> StateDigest:
    result = base.copy()
    for chunk in encoded.chunks:
        result.set(chunk.name, chunk.chunk, chunk.total)
    return result


def _map(work: Callable[[Sequence[_Cut]], T], tasks: Iterable[Sequence[_Cut]], threads: int) -> Iterator[T]:
    if threads <= 1:
        yield from map(work, tasks)
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="delta") as pool:
        yield from pool.map(work, tasks)


def _tasks(state: State, base: StateDigest) -> Iterator[list[_Cut]]:
    """Consecutive chunks, by name, in groups of about `_TASK_ELEMENTS`."""
    group: list[_Cut] = []
    filled = 0
    for name in sorted(state):
        t = state[name]
        for chunk in held_chunks(t, name):
            group.append(_Cut(name, chunk, base.chunk_sum(name, chunk)))
            filled += min(CHUNK_ELEMENTS, t.elements - chunk * CHUNK_ELEMENTS)
            if filled >= _TASK_ELEMENTS:
                yield group
                group, filled = [], 0
    if group:
        yield group


def _encode_run(old: State, new: State, cuts: Sequence[_Cut]) -> list[Chunk]:
    """As `_encode_chunk` with the gap coder, of many chunks at once."""
    found: dict[int, Chunk] = {}
    by_lane: dict[int, list[int]] = {}
    for i, cut in enumerate(cuts):
        by_lane.setdefault(LANE_BYTES[old[cut.name].dtype], []).append(i)
    for lane, mine in by_lane.items():
        run = [Piece(old[cuts[i].name], new[cuts[i].name], cuts[i].chunk) for i in mine]
        for at, changed, change, checksum, payload in _scratch.runs.encode(run, lane):
            cut, t = cuts[mine[at]], run[at].old
            total = (cut.total + change) & MASK_128
            found[mine[at]] = Chunk(
                cut.name, t.dtype, t.shape, cut.chunk, CODER_GAP, changed, total, checksum, payload
            )
    return [found[i] for i in sorted(found)]


def _encode_chunk(old: State, new: State, cut: _Cut, coder: Coder) -> Chunk | None:
    t = old[cut.name]
    first = cut.chunk * CHUNK_ELEMENTS
    at = first - t.start
    old_M = t.bits[at : at + CHUNK_ELEMENTS]
    new_M = new[cut.name].bits[at : at + CHUNK_ELEMENTS]
    diff = _scratch.gap.diff(old_M, new_M)
    changed = diff.positions_N.size
    if not changed:
        return None
    total = (cut.total + weigh(first, *diff)) & MASK_128
    if coder == "context" and t.dtype in LAYOUTS:
        payload, code = _scratch.context.pack(old_M, diff, t.dtype), CODER_CONTEXT
    else:  # no exponent: no classes
        payload, code = _scratch.gap.pack(diff, t.dtype), CODER_GAP
    checksum = payload_checksum(payload)
    return Chunk(cut.name, t.dtype, t.shape, cut.chunk, code, changed, total, checksum, payload)
