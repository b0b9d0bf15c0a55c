"""Writing one version to the store: objects first, its manifest last (law 3). Nothing here is visible without an event."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

from rollwire.consumers.weights.anchor import AnchorFile, anchor_file, plan_anchor, safetensors_head
from rollwire.consumers.weights.keys import anchor_key, sha256_hex, sums_key
from rollwire.consumers.weights.links import put_shards
from rollwire.consumers.weights.manifest import (
    FORMAT,
    FORMAT_MADE,
    Base,
    MadeFrom,
    Manifest,
    ObjectEntry,
    TensorEntry,
    encode_manifest,
)
from rollwire.consumers.weights.sums import Layout, encode_sums
from rollwire.kernels.delta.encode import encode_delta
from rollwire.kernels.digest import StateDigest, tensor_blake3
from rollwire.kernels.tensors import LANE_BYTES, State
from rollwire.schemas.records import Claim, LinkObject, WeightVersion
from rollwire.streams.seams.store import ObjectStore

MAX_EVENT_OBJECTS: Final = 1_000
"""A version's event names its shards up to so many (about 200 bytes each); of more, only its manifest does."""


class Held(NamedTuple):
    """A version in memory, as a base for the next one."""

    event: WeightVersion
    state: State
    digest: StateDigest


class Written(NamedTuple):
    """A delta whose shards stand in the store."""

    objects: tuple[LinkObject, ...]  # none = nothing changed
    coder: str
    result: StateDigest
    changed_elements: int


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
        coder: Literal["gap", "context"] = "gap",
        puts: int = 1,
    ) -> None:
        self._store = store
        self._model = model
        self._lineage = lineage
        self._shard_bytes = shard_bytes
        self._anchor_shard_bytes = anchor_shard_bytes
        self._threads = threads
        self._hf_config = hf_config
        self._coder: Literal["gap", "context"] = coder
        self._puts = puts

    def write_first(self, version: int, step: int, state: State, published_us: int) -> Held:
        """A version that needs no other one: an anchor."""
        digest = StateDigest.of(state)
        written = self.write_anchor(version, step, state, digest)
        return Held(
            self.first_version(version, step, layout_of_state(state), digest, written, published_us),
            state,
            digest,
        )

    def first_version(
        self,
        version: int,
        step: int,
        layout: Layout,
        digest: StateDigest,
        written: tuple[Claim, int],
        published_us: int,
    ) -> WeightVersion:
        """The event of a version whose snapshot (`write_anchor_manifest`'s answer) stands in the store."""
        claim, stored = written
        total = sum(math.prod(shape) for _, shape in layout.values())
        return WeightVersion(
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
            full_bytes=_full_bytes(layout),
            stored_bytes=stored,
            changed_elements=total,
            total_elements=total,
            published_us=published_us,
        )

    def write_next(
        self,
        base: Held,
        version: int,
        step: int,
        state: State,
        published_us: int,
        *,
        anchor: bool,
        kind: Literal["delta", "revert"] = "delta",
        made_from: MadeFrom | None = None,
    ) -> Held:
        """A delta on `base`, and an anchor of the same version beside it if wanted.

        Raises `StateMismatch` where names, dtypes or shapes differ from the base's, and what the store raises.
        """
        delta = encode_delta(
            base.state,
            state,
            base=base.digest,
            coder=self._coder,
            shard_bytes=self._shard_bytes,
            threads=self._threads,
        )
        objects = put_shards(self._store, self._model, delta.shards, delta.heads, puts=self._puts)
        written = Written(objects, self._coder if objects else "", delta.result, delta.changed_elements)
        snapshot = self.write_anchor(version, step, state, delta.result)[0] if anchor else None
        event = self.write_version(
            base.event,
            version,
            step,
            layout_of_state(state),
            written,
            published_us,
            anchor=snapshot,
            kind=kind,
            made_from=made_from,
        )
        return Held(event, state, delta.result)

    def write_version(
        self,
        base: WeightVersion,
        version: int,
        step: int,
        layout: Layout,
        written: Written,
        published_us: int,
        *,
        anchor: Claim | None = None,
        kind: Literal["delta", "revert"] = "delta",
        made_from: MadeFrom | None = None,
    ) -> WeightVersion:
        """The manifest of a delta whose shards stand in the store, wherever they were encoded (each rank its own part,
        say), and the version's event. `layout` is of the whole state, `written.result` its digest."""
        objects = written.objects
        named: Literal["delta", "empty", "revert"] = kind if objects or kind == "revert" else "empty"
        total = sum(math.prod(shape) for _, shape in layout.values())
        manifest = Manifest(
            format=FORMAT if made_from is None else FORMAT_MADE,
            model=self._model,
            lineage=self._lineage,
            version=version,
            step=step,
            kind=named,
            coder=written.coder,
            base=Base(version=base.version, manifest=base.manifest.key, state_digest=base.state_digest),
            state_digest=written.result.hex,
            full_bytes=_full_bytes(layout),
            changed_elements=written.changed_elements,
            total_elements=total,
            tensors=tuple(TensorEntry(name, *layout[name], "") for name in sorted(layout)),
            objects=tuple(
                ObjectEntry(key=o.key, size=o.size, sha256=o.sha256, file="", head=o.head_bytes)
                for o in objects
            ),
            sums=None,
            made_from=made_from,
        )
        claim, data = encode_manifest(manifest)
        self._store.create(claim.key, data)
        return WeightVersion(
            model=self._model,
            lineage=self._lineage,
            version=version,
            kind=named,
            base_version=base.version,
            step=step,
            manifest=claim,
            anchor=anchor,
            checkpoint=None,
            state_digest=manifest.state_digest,
            full_bytes=manifest.full_bytes,
            stored_bytes=sum(entry.size for entry in objects) + claim.size,
            changed_elements=written.changed_elements,
            total_elements=total,
            published_us=published_us,
            coder=written.coder,
            objects=objects if len(objects) <= MAX_EVENT_OBJECTS else (),
        )

    def write_anchor(self, version: int, step: int, state: State, digest: StateDigest) -> tuple[Claim, int]:
        """A full snapshot of whole tensors: its files, its chunk sums and its manifest; the bytes of all of them."""
        sizes = {name: t.nbytes for name, t in state.items()}
        plan = plan_anchor(sizes, shard_bytes=self._anchor_shard_bytes, hf_config=self._hf_config)
        objects = [  # one file in memory at a time
            self.put_anchor_file(AnchorFile(file, anchor_file(state, names))) for file, names in plan.files
        ]
        objects += [self.put_anchor_file(file) for file in plan.others]
        tensors = [TensorEntry(name, t.dtype, t.shape, tensor_blake3(t)) for name, t in sorted(state.items())]
        return self.write_anchor_manifest(version, step, tensors, digest, objects)

    def put_anchor_file(self, file: AnchorFile) -> ObjectEntry:
        sha256 = sha256_hex(file.data)
        entry = ObjectEntry(
            key=anchor_key(self._model, sha256, file.file),
            size=len(file.data),
            sha256=sha256,
            file=file.file,
            head=safetensors_head(file.file, file.data),
        )
        self._store.create(entry.key, file.data)
        return entry

    def write_anchor_manifest(
        self,
        version: int,
        step: int,
        tensors: Sequence[TensorEntry],
        digest: StateDigest,
        objects: Sequence[ObjectEntry],
    ) -> tuple[Claim, int]:
        """The chunk sums and the manifest of a snapshot whose files stand in the store, whoever wrote them; `tensors` by
        name. The manifest's claim, and the bytes of everything."""
        packed = encode_sums(digest)
        sums: Claim | None = None
        if packed:
            sha256 = sha256_hex(packed)
            sums = Claim(key=sums_key(self._model, sha256), size=len(packed), sha256=sha256)
            self._store.create(sums.key, packed)
        total = sum(math.prod(entry.shape) for entry in tensors)
        manifest = Manifest(
            format=FORMAT,
            model=self._model,
            lineage=self._lineage,
            version=version,
            step=step,
            kind="anchor",
            coder="",
            base=None,
            state_digest=digest.hex,
            full_bytes=_full_bytes({entry.name: (entry.dtype, entry.shape) for entry in tensors}),
            changed_elements=total,
            total_elements=total,
            tensors=tuple(tensors),
            objects=tuple(objects),
            sums=sums,
        )
        claim, data = encode_manifest(manifest)
        self._store.create(claim.key, data)
        return claim, sum(entry.size for entry in objects) + len(packed) + claim.size


def layout_of_state(state: State) -> Layout:
    return {name: (t.dtype, t.shape) for name, t in state.items()}


def _full_bytes(layout: Layout) -> int:
    return sum(math.prod(shape) * LANE_BYTES[dtype] for dtype, shape in layout.values())
