"""Who publishes which elements of a sharded tensor, and what ranks must hand to one another for it. Pure; needs no torch.

A rank's shard ends where its rows end, deltas and digests are made of whole chunks (`kernels.tensors`). So each chunk is
published by the rank that holds its first element, and the ranks behind it hand over what they hold of it: the halo, less
than a chunk at each border. All intervals are flat elements [start, end) of one tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rollwire.kernels.tensors import CHUNK_ELEMENTS, chunk_count
from rollwire.schemas.errors import StateMismatch

Span = tuple[int, int]


class Sharded(NamedTuple):
    """One tensor, as all ranks hold it."""

    dtype: str  # published as
    shape: tuple[int, ...]  # of the whole
    held: tuple[Span, ...]  # by rank, ascending, end to end; a rank may hold nothing


class Move(NamedTuple):
    """Elements that one rank hands to another."""

    name: str
    source: int
    target: int
    start: int
    end: int


def rows_held(rows: int, ranks: int, rank: int) -> Span:
    """Rows of a dimension that is cut for `ranks` the way `torch.chunk` cuts: the last ranks may hold less, or nothing."""
    per = -(-rows // ranks) if rows else 0
    return min(rank * per, rows), min((rank + 1) * per, rows)


def published_by(sharded: Sharded, name: str) -> tuple[Span, ...]:
    """By rank, on the chunk grid, end to end. Raises `StateMismatch` where the shards do not join."""
    elements = 1
    for size in sharded.shape:
        elements *= size
    at = 0
    for start, end in sharded.held:
        if start != at or end < start:
            raise StateMismatch(
                f"{name}: a rank holds elements {start} to {end}, the one before it ended at {at}"
            )
        at = end
    if at != elements:
        raise StateMismatch(f"{name}: ranks hold {at} of {elements} elements")

    def up(element: int) -> int:
        return min(chunk_count(element) * CHUNK_ELEMENTS, elements)

    return tuple((up(start), up(end)) for start, end in sharded.held)


def moves(held: Mapping[str, Sequence[Span]], wanted: Mapping[str, Sequence[Span]]) -> list[Move]:
    """What has to go where for each rank to have what is `wanted` of it, in an order that is the same on every rank."""
    found: list[Move] = []
    for name in sorted(wanted):
        for source, (first, last) in enumerate(held[name]):
            for target, (start, end) in enumerate(wanted[name]):
                begin, stop = max(first, start), min(last, end)
                if source != target and begin < stop:
                    found.append(Move(name, source, target, begin, stop))
    return found
