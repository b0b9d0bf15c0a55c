"""Writing one version to the store: objects first, its manifest last (law 3). Nothing here is visible without an event."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from rollwire.consumers.weights.anchor import write_anchor
from rollwire.consumers.weights.keys import anchor_key, delta_key, sha256_hex
from rollwire.consumers.weights.manifest import (
    FORMAT,
    Base,
    Manifest,
    ObjectEntry,
    TensorEntry,
    encode_manifest,
)
from rollwire.kernels.delta.encode import encode_delta
from rollwire.kernels.digest import StateDigest, tensor_blake3
from rollwire.kernels.tensors import State
from rollwire.schemas.records import Claim, WeightVersion
from rollwire.streams.seams.store import ObjectStore


class Held(NamedTuple):
    """A version in memory, as a base for the next one."""

    event: WeightVersion
    state: State
    digest: StateDigest


class SnapshotWriter:
    """Writes anchors and deltas of one lineage. Stateless between calls; publishing twice gives the same objects."""

    def __init__(
        self,
        store: ObjectStore,
        *,
        model: str,
        lineage: str,
        shard_bytes: int,
        anchor_shard_bytes: int,
        threads: int,
        hf_config: Mapping[str, Any] | None,
    ) -> None:
        self._store = store
        self._model = model
        self._lineage = lineage
        self._shard_bytes = shard_bytes
        self._anchor_shard_bytes = anchor_shard_bytes
        self._threads = threads
        self._hf_config = hf_config

    def write_first(self, version: int, step: int, state: State, published_us: int) -> Held:
        """A version that needs no other one: an anchor."""
        digest = StateDigest.of(state)
        total = sum(t.bits.size for t in state.values())
        claim, stored = self._write_anchor(version, step, state, digest, total)
        event = WeightVersion(
            model=self._model,
            lineage=self._lineage,
            version=version,
            kind="anchor",
            base_version=None,
            step=step,
            manifest=claim,
            anchor=claim,
            checkpoint=None,
            state_digest=digest.hex,
            full_bytes=_full_bytes(state),
            stored_bytes=stored,
            changed_elements=total,
            total_elements=total,
            published_us=published_us,
        )
        return Held(event, state, digest)

    def write_next(
        self, base: Held, version: int, step: int, state: State, published_us: int, *, anchor: bool
    ) -> Held:
        """A delta on `base`, and an anchor of the same version beside it if wanted.

        Raises `StateMismatch` where names, dtypes or shapes differ from the base's, and what the store raises.
        """
        delta = encode_delta(
            base.state, state, base=base.digest, shard_bytes=self._shard_bytes, threads=self._threads
        )
        objects: list[ObjectEntry] = []
        for shard in delta.shards:
            sha256 = sha256_hex(shard)
            entry = ObjectEntry(key=delta_key(self._model, sha256), size=len(shard), sha256=sha256, file="")
            self._store.create(entry.key, shard)
            objects.append(entry)
        kind: Literal["delta", "empty"] = "delta" if delta.shards else "empty"
        manifest = Manifest(
            format=FORMAT,
            model=self._model,
            lineage=self._lineage,
            version=version,
            step=step,
            kind=kind,
            base=Base(
                version=base.event.version,
                manifest=base.event.manifest.key,
                state_digest=base.event.state_digest,
            ),
            state_digest=delta.result.hex,
            full_bytes=_full_bytes(state),
            changed_elements=delta.changed_elements,
            total_elements=delta.total_elements,
            tensors=tuple(TensorEntry(name, t.dtype, t.shape, "") for name, t in sorted(state.items())),
            objects=tuple(objects),
        )
        snapshot = (
            self._write_anchor(version, step, state, delta.result, delta.total_elements)[0]
            if anchor
            else None
        )
        claim, data = encode_manifest(manifest)
        self._store.create(claim.key, data)
        event = WeightVersion(
            model=self._model,
            lineage=self._lineage,
            version=version,
            kind=kind,
            base_version=base.event.version,
            step=step,
            manifest=claim,
            anchor=snapshot,
            checkpoint=None,
            state_digest=manifest.state_digest,
            full_bytes=manifest.full_bytes,
            stored_bytes=sum(entry.size for entry in objects) + claim.size,
            changed_elements=delta.changed_elements,
            total_elements=delta.total_elements,
            published_us=published_us,
        )
        return Held(event, state, delta.result)

    def _write_anchor(
        self, version: int, step: int, state: State, digest: StateDigest, total: int
    ) -> tuple[Claim, int]:
        objects: list[ObjectEntry] = []
        for file, data in write_anchor(
            state, shard_bytes=self._anchor_shard_bytes, hf_config=self._hf_config
        ):
            sha256 = sha256_hex(data)
            entry = ObjectEntry(
                key=anchor_key(self._model, sha256, file), size=len(data), sha256=sha256, file=file
            )
            self._store.create(entry.key, data)
            objects.append(entry)
        manifest = Manifest(
            format=FORMAT,
            model=self._model,
            lineage=self._lineage,
            version=version,
            step=step,
            kind="anchor",
            base=None,
            state_digest=digest.hex,
            full_bytes=_full_bytes(state),
            changed_elements=total,
            total_elements=total,
            tensors=tuple(
                TensorEntry(name, t.dtype, t.shape, tensor_blake3(t)) for name, t in sorted(state.items())
            ),
            objects=tuple(objects),
        )
        claim, data = encode_manifest(manifest)
        self._store.create(claim.key, data)
        return claim, sum(entry.size for entry in objects) + claim.size


def _full_bytes(state: State) -> int:
    return sum(t.nbytes for t in state.values())
