"""The chunk sums of an anchor: what a replica that holds a slice checks its slice by, and the rest of the state with.

Object: the sums of the tensors one after the other by name, 16 little-endian bytes a chunk (`kernels.digest`). Names,
dtypes and shapes are the manifest's. The state's digest follows from them, so they are proved by the event.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from rollwire.consumers.weights.manifest import Manifest
from rollwire.kernels.digest import StateDigest
from rollwire.kernels.tensors import chunk_count
from rollwire.schemas.errors import DeltaCorrupt, DigestMismatch

Layout = Mapping[str, tuple[str, tuple[int, ...]]]
"""name -> (dtype, shape) of whole tensors."""

_SUM_BYTES = 16


def encode_sums(digest: StateDigest) -> bytes:
    """Raises `StateMismatch` while a chunk's sum is not known."""
    table = digest.table()
    return b"".join(table[name][2] for name in sorted(table))


def decode_sums(data: bytes, manifest: Manifest) -> StateDigest:
    """The digest of the anchor's state, with every chunk's sum. Raises `DeltaCorrupt`, `DigestMismatch`."""
    table: dict[str, tuple[str, tuple[int, ...], bytes]] = {}
    at = 0
    for entry in sorted(manifest.tensors, key=lambda entry: entry.name):
        size = _SUM_BYTES * chunk_count(math.prod(entry.shape))
        table[entry.name] = (entry.dtype, entry.shape, data[at : at + size])
        at += size
    if at != len(data):
        raise DeltaCorrupt(
            f"the chunk sums of version {manifest.version} have {len(data)} bytes, its tensors need {at}"
        )
    digest = StateDigest.from_sums(table)
    if digest.hex != manifest.state_digest:
        raise DigestMismatch(
            f"the chunk sums of version {manifest.version} are those of {digest.hex[:16]}, "
            f"published is {manifest.state_digest[:16]}"
        )
    return digest


def layout_of(manifest: Manifest) -> Layout:
    return {entry.name: (entry.dtype, entry.shape) for entry in manifest.tensors}
