"""Reading parts of a state: ranges of an anchor, chunks of deltas. What is not held is known by its sums alone.

A replica that holds a slice chooses, for each tensor, a run of flat elements; it is rounded out to the chunk grid. An
anchor's chunk sums (`sums.py`) prove what is read of it, and let the digest of the *whole* state be followed from
version to version and compared with the event, though most of the state is somewhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, NamedTuple

import numpy as np

from rollwire.consumers.weights.anchor import Extent, read_extents
from rollwire.consumers.weights.manifest import Manifest
from rollwire.consumers.weights.sums import Layout, decode_sums, layout_of
from rollwire.kernels.delta.format import Head, read_head
from rollwire.kernels.delta.prepare import Prepared
from rollwire.kernels.delta.slices import prepare_chunks, ranges_of
from rollwire.kernels.digest import StateDigest
from rollwire.kernels.tensors import CHUNK_ELEMENTS, State, Tensor, chunk_count, lane_dtype
from rollwire.schemas.errors import DeltaCorrupt, StateMismatch
from rollwire.schemas.records import LinkObject
from rollwire.streams.seams.store import ObjectStore

FETCHERS: Final = 4
"""Ranges that are fetched at once."""

Choose = Callable[[Layout], Mapping[str, tuple[int, int]]]
"""From names with dtypes and shapes to the flat elements [start, end) that are held of each; a name left out is not held."""


def read_parts(
    store: ObjectStore, manifest: Manifest, choose: Choose
) -> tuple[dict[str, Tensor], StateDigest]:
    """The chosen parts of an anchor, by ranges of its files, proved by its chunk sums; and the digest of the whole state.

    Raises `DeltaCorrupt`, `DigestMismatch`, `StateMismatch` (a name that is not there, elements beyond a tensor).
    """
    claim = manifest.sums
    packed = b"" if claim is None else store.get(claim.key, sha256=claim.sha256)
    digest = decode_sums(packed, manifest)
    layout = layout_of(manifest)
    wanted = {name: _run(layout, name, *ends) for name, ends in choose(layout).items()}
    state: dict[str, Tensor] = {}
    with ThreadPoolExecutor(FETCHERS, thread_name_prefix="parts") as pool:
        for name, t in pool.map(lambda cut: _read_cut(store, cut), _cuts(store, manifest, layout, wanted)):
            state[name] = t
    missing = wanted.keys() - state.keys()
    if missing:
        raise StateMismatch(f"the anchor of version {manifest.version} has no {min(missing)!r}")
    digest.check(state)
    return state, digest


class _Cut(NamedTuple):
    """A run of elements of one tensor, in one file."""

    key: str
    name: str
    extent: Extent
    start: int  # elements
    end: int


def _cuts(
    store: ObjectStore, manifest: Manifest, layout: Layout, wanted: Mapping[str, tuple[int, int]]
) -> list[_Cut]:
    cuts: list[_Cut] = []
    for entry in manifest.objects:
        if not entry.head:
            continue
        extents = read_extents(entry.file, store.get_range(entry.key, 0, entry.head), entry.size)
        for name, extent in extents.items():
            if name not in wanted:
                continue
            if layout.get(name) != (extent.dtype, extent.shape):
                raise StateMismatch(
                    f"{name}: {extent.dtype}{list(extent.shape)} in {entry.key}, {layout.get(name)} in the manifest"
                )
            cuts.append(_Cut(entry.key, name, extent, *wanted[name]))
    return cuts


def _read_cut(store: ObjectStore, cut: _Cut) -> tuple[str, Tensor]:
    lane = lane_dtype(cut.extent.dtype)
    first, last = (cut.extent.start + place * lane.itemsize for place in (cut.start, cut.end))
    data = store.get_range(cut.key, first, last) if first < last else b""
    if len(data) != last - first:
        raise DeltaCorrupt(f"{cut.key} gave {len(data)} of the bytes {first} to {last}")
    bits = np.array(np.frombuffer(data, lane))  # ours, and writable
    return cut.name, Tensor(cut.extent.dtype, cut.extent.shape, bits, cut.start)


def _run(layout: Layout, name: str, start: int, end: int) -> tuple[int, int]:
    """The elements, rounded out to the chunk grid."""
    if name not in layout:
        raise StateMismatch(f"no tensor {name!r}: a slice of it cannot be held")
    size = int(np.prod(layout[name][1], dtype=np.int64))
    if not 0 <= start <= end <= size:
        raise StateMismatch(f"{name}: elements {start} to {end} of {size} cannot be held")
    if start == end:
        return start // CHUNK_ELEMENTS * CHUNK_ELEMENTS, start // CHUNK_ELEMENTS * CHUNK_ELEMENTS
    return start // CHUNK_ELEMENTS * CHUNK_ELEMENTS, min(chunk_count(end) * CHUNK_ELEMENTS, size)


def apply_to_parts(
    store: ObjectStore, state: State, digest: StateDigest, shards: Sequence[LinkObject]
) -> StateDigest:
    """Brings held parts forward by a delta, in place: of each shard its head, then the held chunks' payloads alone.

    `digest` is that of the whole state; returned is that of the whole result. Nothing is written before all of it is
    verified. Raises what `prepare_chunks` and the store raise.
    """
    prepared = prepare_parts(store, state, digest, shards)
    prepared.apply()
    return prepared.digest


def prepare_parts(
    store: ObjectStore, state: State, digest: StateDigest, shards: Sequence[LinkObject]
) -> Prepared:
    """As `apply_to_parts`, without writing. A tensor's chunks lie together, so there is about one range a tensor: they are
    fetched `FETCHERS` at a time."""
    with ThreadPoolExecutor(FETCHERS, thread_name_prefix="parts") as pool:
        limit = digest.table_limit
        heads = list(pool.map(lambda entry: _head(store, entry, limit), shards))
        keys = {head.shard: entry.key for head, entry in zip(heads, shards, strict=True)}
        coming: dict[tuple[int, int, int], Future[bytes]] = {}
        fits = [head for head in heads if head.base == digest.hex]  # others are refused, and need no payload
        for part in (part for head in fits for part in ranges_of(state, head)):
            place = (part.shard, part.start, part.end)
            coming[place] = pool.submit(store.get_range, keys[part.shard], part.start, part.end)
        try:
            return prepare_chunks(state, digest, heads, lambda *place: coming[place].result())
        finally:
            for future in coming.values():
                future.cancel()


def _head(store: ObjectStore, entry: LinkObject, table_limit: int) -> Head:
    head = read_head(store.get_range(entry.key, 0, entry.head_bytes), table_limit)
    if (head.head_bytes, head.size) != (entry.head_bytes, entry.size):
        raise DeltaCorrupt(
            f"{entry.key} says it has {head.head_bytes} of {head.size} bytes of head, "
            f"published were {entry.head_bytes} of {entry.size}"
        )
    return head
