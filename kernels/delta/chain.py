"""Gap deltas that follow one another, applied in one pass: all of them to a few chunks, then all of them to the next few.

Changes lie scattered, so a delta alone takes a line of memory for nearly every element that it changes. A few chunks stay in
the caches while every delta goes over them, and threads need not wait for one another between deltas. The sum of each chunk
after each delta is checked as ever: only the order of the work is another.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollwire.kernels.delta import many
from rollwire.kernels.delta.format import CODER_GAP, FLOATS, Head, read_head
from rollwire.kernels.delta.prepare import Incoming, check_tensors, chunk_addresses, settle
from rollwire.kernels.digest import StateDigest
from rollwire.kernels.tensors import CHUNK_ELEMENTS, LANE_BYTES, State
from rollwire.schemas.errors import DeltaCorrupt

_CHUNKS: Final = 4
"""That are worked on at a time, by a thread."""


class _Shard(NamedTuple):
    """One shard, K changed chunks; what the work on them gives is written into the last four."""

    head: Head
    body: NDArray[np.uint8]
    row_K: NDArray[np.int64]  # among all chunks of the state, ascending
    address_K: NDArray[np.uint64]
    start_K: NDArray[np.uint64]
    floats_K: NDArray[np.uint8]
    at_K: NDArray[np.int64]  # [K + 1]
    status_K: NDArray[np.int64]
    low_K: NDArray[np.int64]
    high_K: NDArray[np.int64]
    top_K: NDArray[np.uint64]


def chains(heads: Sequence[Head]) -> bool:
    """Whether `apply_chain` can: gap deltas of elements of one size."""
    lanes = {LANE_BYTES.get(dtype) for head in heads for dtype in head.columns.dtypes}
    return len(lanes) == 1 and all((head.columns.coder_K == CODER_GAP).all() for head in heads)


def apply_chain(
    state: State, digest: StateDigest, deltas: Sequence[Sequence[bytes]], *, threads: int = 1
) -> list[StateDigest] | None:
    """Writes deltas, each given by all of its shards in any order, into `state`, one after the other; the digests that they
    give. None: they are not of the kind that this can, and nothing was written.

    After an error the state is spoilt. Raises as `prepare_delta`; where several deltas are wrong, of the first.
    """
    limit = digest.table_limit
    heads = [[read_head(data, limit) for data in shards] for shards in deltas]
    flat = [head for some in heads for head in some]
    if not chains(flat):
        return None
    made = [
        [_shard(state, digest, head, data) for head, data in zip(some, shards, strict=True)]
        for some, shards in zip(heads, deltas, strict=True)
    ]
    _work(state, [shard for some in made for shard in some], threads)
    digests: list[StateDigest] = []
    for some in made:
        incoming = Incoming(digest, backwards=False)
        digest = digest.copy()
        for shard in some:
            incoming.accept(shard.head)
            every_K = np.arange(shard.row_K.size)
            weights = (shard.low_K, shard.high_K, shard.top_K)
            settle(digest, shard.head.columns, every_K, shard.status_K, weights, backwards=False)
        incoming.finish(digest)
        digests.append(digest)
    return digests


def _shard(state: State, digest: StateDigest, head: Head, data: bytes) -> _Shard:
    if len(data) != head.size:
        raise DeltaCorrupt(
            f"shard {head.shard} of {head.shards} has {len(data)} bytes, its head says {head.size}"
        )
    columns = head.columns
    check_tensors(state, columns)
    count = columns.chunk_K.size
    at_K = np.zeros(count + 1, np.int64)
    np.cumsum(columns.changed_K, out=at_K[1:])
    floats_T = np.array([dtype in FLOATS for dtype in columns.dtypes], np.uint8)
    status_K, low_K, high_K = np.zeros((3, count), np.int64)
    return _Shard(
        head,
        np.frombuffer(data, np.uint8)[head.head_bytes :],
        digest.rows(columns.names)[columns.tensor_K] + columns.chunk_K,
        chunk_addresses(state, columns.names, columns.tensor_K, columns.chunk_K),
        (columns.chunk_K * CHUNK_ELEMENTS).astype(np.uint64),
        floats_T[columns.tensor_K],
        at_K,
        status_K,
        low_K,
        high_K,
        np.zeros(count, np.uint64),
    )


def _work(state: State, shards: Sequence[_Shard], threads: int) -> None:
    if not shards:
        return
    lane = LANE_BYTES[shards[0].head.columns.dtypes[0]]
    decode, scatter = many.decode_kernel(lane), many.scatter_kernel(lane)
    rows = max(int(shard.row_K[-1]) + 1 for shard in shards if shard.row_K.size)
    bounds = np.arange(0, rows + _CHUNKS, _CHUNKS)
    cuts = [np.searchsorted(shard.row_K, bounds).tolist() for shard in shards]
    lane_type = np.dtype(f"<u{lane}")

    def some(groups: range) -> None:
        room = max(
            int(shard.at_K[cut[g + 1]] - shard.at_K[cut[g]])
            for g in groups
            for shard, cut in zip(shards, cuts, strict=True)
        )
        positions_N = np.empty(room, np.uint32)
        old_N, new_N = np.empty(room, lane_type), np.empty(room, lane_type)
        for g in groups:
            for shard, cut in zip(shards, cuts, strict=True):
                if cut[g] < cut[g + 1]:
                    _go(shard, slice(cut[g], cut[g + 1]), positions_N, old_N, new_N)

    def _go(
        shard: _Shard, mine: slice, positions_N: NDArray[np.uint32], old_N: NDArray[Any], new_N: NDArray[Any]
    ) -> None:
        columns = shard.head.columns
        at_K = shard.at_K[mine.start : mine.stop + 1] - shard.at_K[mine.start]
        decode(
            0,
            mine.stop - mine.start,
            shard.body,
            columns.offset_K[mine],
            columns.size_K[mine],
            columns.checksum_K[mine],
            columns.coder_K[mine],
            shard.address_K[mine],
            columns.elements_K[mine],
            shard.start_K[mine],
            shard.floats_K[mine],
            at_K,
            lane,
            False,
            positions_N,
            old_N,
            new_N,
            shard.status_K[mine],
            shard.low_K[mine],
            shard.high_K[mine],
            shard.top_K[mine],
        )
        if not shard.status_K[mine].any():  # what does not decode has no positions
            scatter(shard.address_K[mine], columns.elements_K[mine], at_K, positions_N, new_N)

    count = len(bounds) - 1
    if threads <= 1:
        some(range(count))
        return
    parts = [range(at, min(at + 4, count)) for at in range(0, count, 4)]
    with ThreadPoolExecutor(threads, thread_name_prefix="delta") as pool:
        list(pool.map(some, parts))
