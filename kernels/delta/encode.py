"""From two states to delta shards."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise, repeat
from typing import Final, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

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
from rollwire.kernels.delta.many import added
from rollwire.kernels.delta.runs import Pair, Run, encode_run
from rollwire.kernels.digest import MASK_128, StateDigest
from rollwire.kernels.tensors import CHUNK_ELEMENTS, LANE_BYTES, State, held_chunks, lane_dtype
from rollwire.schemas.errors import StateMismatch

Coder = Literal["gap", "context"]
S = TypeVar("S")
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


class _Scratch(threading.local):
    def __init__(self) -> None:
        self.gap = GapEncoder()
        self.context = ContextEncoder()


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
        if (a.start, a.bits.size, a.bits.dtype) != (b.start, b.bits.size, lane) or b.bits.dtype != lane:
            raise StateMismatch(f"{name}: bits do not fit {a.dtype}{list(a.shape)} on both sides")
        held_chunks(a, name)


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
    there = encode_chunks(old, new, base=base, coder=coder, threads=threads)
    result = _after(base, there)
    back = _inverse(old, new, base, there, coder, threads)
    return _delta(there, base, result, coder, shard_bytes), _delta(
        back, result, base.copy(), coder, shard_bytes
    )


def _inverse(
    old: State, new: State, base: StateDigest, there: Encoded, coder: Coder, threads: int
) -> Encoded:
    """The chunks that lead back: those that changed, and no others are looked at again."""

    def work(chunk: Chunk) -> Chunk | None:
        return _encode_chunk(new, old, chunk.name, chunk.chunk, coder)

    found = [c for c in _map(work, there.chunks, threads) if c is not None]
    if len(found) != len(there.chunks):
        raise StateMismatch("the states changed while the delta was encoded")
    sums = base.sums_at(_rows(base, found)).astype("<u8").tobytes()
    return there._replace(
        chunks=tuple(c._replace(total=t) for c, t in zip(found, _totals(sums), strict=True))
    )


def encode_chunks(
    old: State, new: State, *, base: StateDigest, coder: Coder = "gap", threads: int = 1
) -> Encoded:
    """The changed chunks alone: what a rank does with its part, before all ranks' sums give the result's digest.

    `base` knows the sums of the old state's chunks, of these parts at least. Raises `StateMismatch`.
    """
    check_layout(old, new)
    by_lane: dict[int, list[Pair]] = {}
    rest: list[tuple[str, int]] = []
    total = 0
    for name in sorted(old):
        t = old[name]
        total += t.bits.size
        pair = Pair.of(name, t, new[name]) if coder == "gap" or t.dtype not in LAYOUTS else None
        if pair is None:
            rest += [(name, k) for k in held_chunks(t, name)]
        else:
            by_lane.setdefault(LANE_BYTES[t.dtype], []).append(pair)
    chunks = [
        chunk
        for lane, pairs in by_lane.items()
        for chunk in _gap_chunks(Run.of(pairs, lane), pairs, base, threads)
    ]
    if rest:
        chunks += _other_chunks(old, new, rest, base, coder, threads)
    if len(by_lane) + bool(rest) > 1:
        chunks.sort(key=lambda c: (c.name, c.chunk))
    return Encoded(tuple(chunks), sum([c.changed for c in chunks]), total)


def _gap_chunks(run: Run, pairs: Sequence[Pair], base: StateDigest, threads: int) -> list[Chunk]:
    before_K = base.sums_at(base.rows([pair.name for pair in pairs])[run.tensor_K] + run.chunk_K)
    cuts = run.cuts(_TASK_ELEMENTS if threads > 1 else 4 * _TASK_ELEMENTS)
    parts = _map(lambda ends: encode_run(run, *ends), pairwise(cuts), threads)
    payloads = [payload for part in parts for payload in part]
    changed = np.flatnonzero(run.changed_K)
    after = added(before_K, run.low_K, run.high_K, run.top_K)[changed].astype("<u8").tobytes()
    tensors = [pairs[i] for i in run.tensor_K[changed].tolist()]
    columns = zip(
        [pair.name for pair in tensors],
        [pair.old.dtype for pair in tensors],
        [pair.old.shape for pair in tensors],
        run.chunk_K[changed].tolist(),
        repeat(CODER_GAP),
        run.changed_K[changed].tolist(),
        _totals(after),
        run.checksum_K[changed].tolist(),
        payloads,
        strict=False,
    )
    return list(map(Chunk._make, columns))


def _other_chunks(
    old: State,
    new: State,
    rest: Sequence[tuple[str, int]],
    base: StateDigest,
    coder: Coder,
    threads: int,
) -> list[Chunk]:
    """Chunks of the context coder, and such as lie askew in memory: `total` is a difference at first."""
    found = [c for c in _map(lambda w: _encode_chunk(old, new, *w, coder), rest, threads) if c is not None]
    before = _totals(base.sums_at(_rows(base, found)).astype("<u8").tobytes())
    return [c._replace(total=(total + c.total) & MASK_128) for c, total in zip(found, before, strict=True)]


def _rows(digest: StateDigest, chunks: Sequence[Chunk]) -> NDArray[np.int64]:
    return digest.rows([c.name for c in chunks]) + np.array([c.chunk for c in chunks], np.int64)


def _totals(sums: bytes) -> list[int]:
    return [int.from_bytes(sums[at : at + 16], "little") for at in range(0, len(sums), 16)]


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
    totals = b"".join([c.total.to_bytes(16, "little") for c in encoded.chunks])
    result.set_at(_rows(base, encoded.chunks), np.frombuffer(totals, "<u8").reshape(-1, 2))
    return result


def _map(work: Callable[[S], T], tasks: Iterable[S], threads: int) -> Iterator[T]:
    if threads <= 1:
        yield from map(work, tasks)
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="delta") as pool:
        yield from pool.map(work, tasks)


def _encode_chunk(old: State, new: State, name: str, chunk: int, coder: Coder) -> Chunk | None:
    """One chunk; its `total` is what the change adds to the sum before."""
    t = old[name]
    first = chunk * CHUNK_ELEMENTS
    at = first - t.start
    old_M = t.bits[at : at + CHUNK_ELEMENTS]
    new_M = new[name].bits[at : at + CHUNK_ELEMENTS]
    diff = _scratch.gap.diff(old_M, new_M)
    changed = diff.positions_N.size
    if not changed:
        return None
    if coder == "context" and t.dtype in LAYOUTS:
        payload, code = _scratch.context.pack(old_M, diff, t.dtype), CODER_CONTEXT
    else:  # no exponent: no classes
        payload, code = _scratch.gap.pack(diff, t.dtype), CODER_GAP
    return Chunk(
        name, t.dtype, t.shape, chunk, code, changed, weigh(first, *diff), payload_checksum(payload), payload
    )
