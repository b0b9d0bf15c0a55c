"""A delta for whoever holds parts of a state: the heads of its shards, then the byte ranges of the held chunks alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from rollwire.kernels.delta.format import Head
from rollwire.kernels.delta.prepare import Changes, Incoming, Prepared, check_layout, decode_chunks
from rollwire.kernels.digest import StateDigest
from rollwire.kernels.tensors import State, held_chunks, lane_dtype
from rollwire.schemas.errors import DeltaCorrupt, StateMismatch

Fetch = Callable[[int, int, int], bytes]
"""(shard, start, end) -> these bytes of that shard; may be called for several ranges of a shard, in order."""


class Range(NamedTuple):
    """Payloads that lie end to end in a shard; offsets from the shard's first byte."""

    shard: int
    start: int
    end: int
    first: int  # rows of the shard's table: [first, last)
    last: int


def ranges_of(state: State, head: Head) -> list[Range]:
    """What `prepare_chunks` fetches of a shard: for the chunks that `state` holds, no byte more."""
    columns = head.columns
    held = [held_chunks(state[name], name) if name in state else range(0) for name in columns.names]
    ranges: list[Range] = []
    for k, (tensor, chunk, offset, size) in enumerate(
        zip(
            columns.tensor_K.tolist(),
            columns.chunk_K.tolist(),
            columns.offset_K.tolist(),
            columns.size_K.tolist(),
            strict=True,
        )
    ):
        if chunk not in held[tensor]:
            continue
        start = head.head_bytes + offset
        if ranges and ranges[-1].end == start:
            ranges[-1] = ranges[-1]._replace(end=start + size, last=k + 1)
        else:
            ranges.append(Range(head.shard, start, start + size, k, k + 1))
    return ranges


def prepare_chunks(
    state: State, digest: StateDigest, heads: Head | Sequence[Head], fetch: Fetch, *, threads: int = 1
) -> Prepared:
    """Verifies a delta against held parts; as `prepare_delta`, but reads the payloads of held chunks alone.

    `digest` is that of the *whole* state. Chunks that are not held take their sums from the heads' tables, so
    the result's digest is that of the whole too, and is compared with the announced one. Only forwards: the tables do not
    say the sums before. Raises what `prepare_delta` raises, and what `fetch` raises.
    """
    result = digest.copy()
    incoming = Incoming(digest, backwards=False)
    changes: list[Changes] = []
    for head in [heads] if isinstance(heads, Head) else heads:
        columns = head.columns
        for name, dtype, shape in zip(columns.names, columns.dtypes, columns.shapes, strict=True):
            check_layout(name, (dtype, shape), digest.layout(name))
            held = state.get(name)
            if held is not None:
                check_layout(name, (dtype, shape), (held.dtype, held.shape))
                if held.bits.dtype != lane_dtype(dtype):
                    raise StateMismatch(f"{name}: bits of {held.bits.dtype} are no {dtype}")
        incoming.accept(head)
        local_K = np.zeros(columns.chunk_K.size, np.bool_)
        for part in ranges_of(state, head):
            data = fetch(part.shard, part.start, part.end)
            if len(data) != part.end - part.start:
                raise DeltaCorrupt(
                    f"shard {part.shard}: {len(data)} of the bytes {part.start} to {part.end} came: fetch them again"
                )
            local_K[part.first : part.last] = True
            changes += decode_chunks(
                state,
                result,
                columns,
                np.arange(part.first, part.last),
                np.frombuffer(data, np.uint8),
                part.start - head.head_bytes,
                backwards=False,
                threads=threads,
            )
        for k in np.flatnonzero(~local_K).tolist():
            result.set(columns.names[columns.tensor_K[k]], int(columns.chunk_K[k]), columns.total(k))
    incoming.finish(result)
    return Prepared(state, changes, result)
