"""A delta for whoever holds parts of a state: the heads of its shards, then the byte ranges of the held chunks alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from rollwire.kernels.delta.format import Head
from rollwire.kernels.delta.prepare import (
    Change,
    Incoming,
    Prepared,
    Wanted,
    check_row,
    chunks_of,
    decode_chunks,
)
from rollwire.kernels.digest import StateDigest
from rollwire.kernels.tensors import State, held_chunks
from rollwire.schemas.errors import DeltaCorrupt

Fetch = Callable[[int, int, int], bytes]
"""(shard, start, end) -> these bytes of that shard; may be called for several ranges of a shard, in order."""


class Range(NamedTuple):
    """Payloads that lie end to end in a shard; offsets from the shard's first byte."""

    shard: int
    start: int
    end: int
    wanted: tuple[Wanted, ...]


def ranges_of(state: State, head: Head) -> list[Range]:
    """What `prepare_chunks` fetches of a shard: for the chunks that `state` holds, no byte more."""
    held = {name: held_chunks(t, name) for name, t in state.items()}
    ranges: list[Range] = []
    for wanted in chunks_of(head):
        if wanted.row.chunks[wanted.at] not in held.get(wanted.row.name, ()):
            continue
        start = head.head_bytes + wanted.offset
        end = start + wanted.row.sizes[wanted.at]
        if ranges and ranges[-1].end == start:
            ranges[-1] = ranges[-1]._replace(end=end, wanted=(*ranges[-1].wanted, wanted))
        else:
            ranges.append(Range(head.shard, start, end, (wanted,)))
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
    changes: list[Change] = []
    for head in [heads] if isinstance(heads, Head) else heads:
        for row in head.rows:
            check_row(row, *digest.layout(row.name))
            if row.name in state:
                check_row(row, state[row.name].dtype, state[row.name].shape)
        incoming.accept(head)
        local: set[tuple[str, int]] = set()
        for part in ranges_of(state, head):
            data = fetch(part.shard, part.start, part.end)
            if len(data) != part.end - part.start:
                raise DeltaCorrupt(
                    f"shard {part.shard}: {len(data)} of the bytes {part.start} to {part.end} came: fetch them again"
                )
            changes += decode_chunks(
                state,
                result,
                part.wanted,
                _cut(memoryview(data), head.head_bytes - part.start),
                backwards=False,
                threads=threads,
            )
            local.update((w.row.name, w.row.chunks[w.at]) for w in part.wanted)
        for row in head.rows:
            for at, chunk in enumerate(row.chunks):
                if (row.name, chunk) not in local:
                    result.set(row.name, chunk, int.from_bytes(row.sums[16 * at : 16 * at + 16], "little"))
    incoming.finish(result)
    return Prepared(state, changes, result)


def _cut(data: memoryview, shift: int) -> Callable[[Wanted], memoryview]:
    return lambda w: data[w.offset + shift : w.offset + shift + w.row.sizes[w.at]]
