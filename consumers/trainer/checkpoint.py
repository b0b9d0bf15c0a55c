"""Checkpoints: content-addressed vectors and one manifest, written last, named by a `WeightVersion`.

    checkpoints/<lineage>/<sha256>.safetensors    one vector each: masters, exp_avg, exp_avg_sq, rng
    checkpoints/<lineage>/<sha256>.json           the manifest; the claim of the event names it

A crash between them leaves orphans, never a checkpoint that cannot be read (law 3).
"""

from __future__ import annotations

import hashlib
from typing import Final

import msgspec
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from rollwire.consumers.trainer.weights import Snapshot
from rollwire.kernels.policy.config import PolicyConfig
from rollwire.kernels.policy.states import disk_layout
from rollwire.schemas.errors import DeltaCorrupt, StateMismatch
from rollwire.schemas.records import Claim
from rollwire.streams.seams.store import ObjectStore

FORMAT: Final = "rollwire.checkpoint.1"
VECTORS: Final = ("masters", "exp_avg", "exp_avg_sq", "rng")


class Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str  # as in a published state
    shape: tuple[int, ...]


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The manifest. `next_offsets[r]` is where rank r reads on in `packed-batches`."""

    format: str
    model: str
    lineage: str
    step: int
    version: int
    state_digest: str  # of the version published from these masters
    updates: int  # optimiser steps taken, the place in the learning-rate schedule
    next_offsets: tuple[int, ...]
    parameters: tuple[Part, ...]  # what the vectors are laid end to end from
    vectors: dict[str, Claim]
    settings: dict[str, str]


def parameter_layout(config: PolicyConfig) -> tuple[Part, ...]:
    return tuple(Part(name=part.name, shape=part.shape) for part in disk_layout(config))


class DueCheckpoint:
    """A checkpoint on its way: the vectors at once, the manifest when the version's digest is known."""

    def __init__(
        self,
        store: ObjectStore,
        snapshot: Snapshot,
        *,
        model: str,
        lineage: str,
        step: int,
        next_offsets: tuple[int, ...],
        parameters: tuple[Part, ...],
        settings: dict[str, str],
    ) -> None:
        self._store = store
        self._snapshot = snapshot
        self._model = model
        self._lineage = lineage
        self._step = step
        self._next_offsets = next_offsets
        self._parameters = parameters
        self._settings = settings
        self._vectors: dict[str, Claim] = {}

    def vectors(self) -> None:
        """Writes the vectors; raises `StoreUnavailable`."""
        snapshot = self._snapshot
        parts = (snapshot.masters_N, snapshot.exp_avg_N, snapshot.exp_avg_sq_N, snapshot.rng)
        self._vectors = {
            name: _create(self._store, self._lineage, save_tensors({name: part.contiguous()}), "safetensors")
            for name, part in zip(VECTORS, parts, strict=True)
        }

    def manifest(self, state_digest: str) -> Claim:
        """Writes the manifest, after its vectors; the claim goes into the version's event."""
        checkpoint = Checkpoint(
            format=FORMAT,
            model=self._model,
            lineage=self._lineage,
            step=self._step,
            version=self._step,  # one step, one version
            state_digest=state_digest,
            updates=self._snapshot.updates,
            next_offsets=self._next_offsets,
            parameters=self._parameters,
            vectors=self._vectors,
            settings=self._settings,
        )
        return _create(self._store, self._lineage, msgspec.json.encode(checkpoint), "json")


def load_checkpoint(
    store: ObjectStore, claim: Claim, *, lineage: str, parameters: tuple[Part, ...]
) -> tuple[Checkpoint, Snapshot]:
    """Reads and verifies. Raises `ObjectMissing`, `DeltaCorrupt`, and `StateMismatch` for another policy or lineage."""
    try:
        checkpoint = msgspec.json.decode(store.get(claim.key, sha256=claim.sha256), type=Checkpoint)
    except msgspec.DecodeError as error:
        raise DeltaCorrupt(f"checkpoint manifest {claim.key} does not decode: {error}") from error
    if checkpoint.format != FORMAT:
        raise StateMismatch(
            f"checkpoint {claim.key} has format {checkpoint.format!r}, this trainer reads {FORMAT!r}"
        )
    if checkpoint.lineage != lineage:
        raise StateMismatch(f"checkpoint {claim.key} is of lineage {checkpoint.lineage}, not {lineage}")
    if checkpoint.parameters != parameters:
        raise StateMismatch(f"checkpoint {claim.key} holds other parameters than the configured policy")
    vectors = {name: _load(store, name, checkpoint.vectors[name]) for name in VECTORS}
    return checkpoint, Snapshot(
        vectors["masters"], vectors["exp_avg"], vectors["exp_avg_sq"], checkpoint.updates, vectors["rng"]
    )


def _create(store: ObjectStore, lineage: str, data: bytes, suffix: str) -> Claim:
    digest = hashlib.sha256(data).hexdigest()
    key = f"checkpoints/{lineage}/{digest}.{suffix}"
    store.create(key, data)
    return Claim(key=key, size=len(data), sha256=digest)


def _load(store: ObjectStore, name: str, claim: Claim) -> Tensor:
    try:
        return load_tensors(store.get(claim.key, sha256=claim.sha256))[name]
    except (SafetensorError, KeyError) as error:
        raise DeltaCorrupt(f"checkpoint vector {claim.key} does not hold {name!r}: {error}") from error
