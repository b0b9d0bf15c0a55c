"""The manifest of a version: the object that makes its other objects findable. Written last, read first.

Canonical JSON without times, so that publishing the same weights again gives the same bytes and the same key.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from rollwire.consumers.weights.keys import manifest_key, sha256_hex
from rollwire.kernels.tensors import State
from rollwire.schemas.errors import DeltaCorrupt, FormatUnknown, StateMismatch
from rollwire.schemas.records import Claim, OffsetRange

FORMAT: Final = 2
FORMAT_MADE: Final = 3
"""Of a manifest that says what its version was made from. Any other is written as format 2, byte for byte as before."""
_READ: Final = (FORMAT, FORMAT_MADE)


class TensorEntry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One tensor of the resulting state. An array in JSON: there are thousands of them."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    blake3: str  # hex, of dtype, shape and bits; "" in deltas, whose result the state digest covers


class ObjectEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One object of the version."""

    key: str
    size: int  # bytes
    sha256: str  # hex
    file: str  # an anchor's file name in Hugging Face's layout; "" for a delta shard
    head: int  # bytes of header and table (delta shard) or header (safetensors): a slice reads these first; else 0


class Base(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a delta applies to."""

    version: int
    manifest: str  # key of the base's manifest
    state_digest: str


class MadeFrom(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the step that made a version consumed: the same as in its `train-steps` event, so that store and log can be held
    against each other."""

    consumed: tuple[OffsetRange, ...]  # of packed-batches, one per rank
    plan_digest: str


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    format: int
    model: str
    lineage: str
    version: int
    step: int
    kind: Literal["anchor", "delta", "empty", "revert"]
    coder: str  # of the delta; "" where there is none
    base: Base | None  # None for anchors
    state_digest: str  # incremental digest of the resulting state, hex
    full_bytes: int
    changed_elements: int
    total_elements: int
    tensors: tuple[TensorEntry, ...]  # by name
    objects: tuple[ObjectEntry, ...]  # in order
    sums: (
        Claim | None
    )  # an anchor's chunk sums (`sums.py`), by which a slice of it is checked; None for deltas
    made_from: MadeFrom | None = None  # None = by no step, or by one that trained on nothing (a revert)


class _Format(msgspec.Struct):
    """What every format has."""

    format: int


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Manifest, strict=True)


def encode_manifest(manifest: Manifest) -> tuple[Claim, bytes]:
    data = _encoder.encode(manifest)
    sha256 = sha256_hex(data)
    return Claim(key=manifest_key(manifest.model, sha256), size=len(data), sha256=sha256), data


def decode_manifest(data: bytes) -> Manifest:
    """Strict. Raises `FormatUnknown` for another format, `DeltaCorrupt` for an unknown key, a missing one or damage."""
    try:
        found = msgspec.json.decode(data, type=_Format).format
    except msgspec.MsgspecError as error:
        raise DeltaCorrupt(f"a manifest does not decode: {error}") from error
    if found not in _READ:
        advice = (
            "upgrade rollwire here" if found > FORMAT_MADE else "publish the weights again with this release"
        )
        raise FormatUnknown(
            f"a manifest has format {found}, this release reads {FORMAT} and {FORMAT_MADE}: {advice}"
        )
    try:
        manifest = _decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise DeltaCorrupt(f"a manifest does not decode: {error}") from error
    if (manifest.format == FORMAT_MADE) != (manifest.made_from is not None):
        raise DeltaCorrupt(f"a manifest of format {manifest.format} with made_from {manifest.made_from}")
    if (manifest.kind == "anchor") != (manifest.base is None):
        raise DeltaCorrupt(f"a manifest of kind {manifest.kind} with base {manifest.base}")
    return manifest


def check_tensors(manifest: Manifest, state: State) -> None:
    """Names, dtypes and shapes of `state` are the manifest's, on both sides. Raises `StateMismatch` (C27)."""
    listed = {entry.name: (entry.dtype, entry.shape) for entry in manifest.tensors}
    held = {name: (t.dtype, t.shape) for name, t in state.items()}
    differing = sorted(name for name in listed.keys() | held.keys() if listed.get(name) != held.get(name))
    if differing:
        name = differing[0]
        raise StateMismatch(
            f"{len(differing)} tensors differ from the manifest of version {manifest.version}, "
            f"first {name!r}: {listed.get(name)} listed, {held.get(name)} held"
        )
