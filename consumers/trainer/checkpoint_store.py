"""Checkpoints in the store: content-addressed vectors and one manifest, written last, named by a `WeightVersion`.

    checkpoints/<lineage>/<sha256>.safetensors    one vector each; which ones there are is the learner's business
    checkpoints/<lineage>/<sha256>.json           the manifest; the claim of the event names it

A crash between them leaves orphans, never a checkpoint that cannot be read (law 3). Needs no torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Final

import msgspec

from rollwire.schemas.errors import DeltaCorrupt, ObjectMissing, StateMismatch
from rollwire.schemas.records import Claim
from rollwire.streams.seams.store import ObjectStore

FORMAT: Final = "rollwire.checkpoint.1"


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
    state_digest: str  # of the version published from these vectors
    updates: int  # optimiser steps taken, the place in the learning-rate schedule
    next_offsets: tuple[int, ...]
    parameters: tuple[Part, ...]  # what the vectors are laid end to end from
    vectors: dict[str, Claim]
    settings: dict[str, str]


class DueCheckpoint:
    """A checkpoint on its way: the vectors at once, the manifest when the version's digest is known.

    `vectors` gives names and safetensors bytes, one at a time, when they are written.
    """

    def __init__(
        self,
        store: ObjectStore,
        vectors: Iterable[tuple[str, bytes]],
        *,
        model: str,
        lineage: str,
        step: int,
        updates: int,
        next_offsets: tuple[int, ...],
        parameters: tuple[Part, ...],
        settings: dict[str, str],
    ) -> None:
        self._store = store
        self._vectors = vectors
        self._model = model
        self._lineage = lineage
        self._step = step
        self._updates = updates
        self._next_offsets = next_offsets
        self._parameters = parameters
        self._settings = settings
        self._claims: dict[str, Claim] = {}

    def vectors(self) -> None:
        """Writes the vectors; raises `StoreUnavailable`."""
        for name, data in self._vectors:
            self._claims[name] = _create(self._store, self._lineage, data, "safetensors")

    def manifest(self, state_digest: str) -> Claim:
        """Writes the manifest, after its vectors; the claim goes into the version's event."""
        checkpoint = Checkpoint(
            format=FORMAT,
            model=self._model,
            lineage=self._lineage,
            step=self._step,
            version=self._step,  # one step, one version
            state_digest=state_digest,
            updates=self._updates,
            next_offsets=self._next_offsets,
            parameters=self._parameters,
            vectors=self._claims,
            settings=self._settings,
        )
        return _create(self._store, self._lineage, msgspec.json.encode(checkpoint), "json")


class CarriedCheckpoint:
    """The checkpoint of an older version for a new one that has its weights: its vectors, under a manifest of their own."""

    def __init__(
        self,
        store: ObjectStore,
        claim: Claim,
        *,
        lineage: str,
        version: int,
        next_offsets: tuple[int, ...],
    ) -> None:
        self._store = store
        self._claim = claim
        self._lineage = lineage
        self._version = version
        self._next_offsets = next_offsets

    def vectors(self) -> None:
        """They stand there already; raises `ObjectMissing` where one does not, and what reading the manifest raises."""
        for name, claim in self._read().vectors.items():
            if self._store.head(claim.key) is None:
                raise ObjectMissing(f"{claim.key}, {name!r} of checkpoint {self._claim.key}, is not there")

    def manifest(self, state_digest: str) -> Claim:
        """Raises `StateMismatch` where the checkpoint is of other weights."""
        old = self._read()
        if old.state_digest != state_digest:
            raise StateMismatch(
                f"checkpoint {self._claim.key} is of state {old.state_digest}, not {state_digest}"
            )
        carried = msgspec.structs.replace(
            old, step=self._version, version=self._version, next_offsets=self._next_offsets
        )
        return _create(self._store, self._lineage, msgspec.json.encode(carried), "json")

    def _read(self) -> Checkpoint:
        return _read_manifest(self._store, self._claim, self._lineage)


def renew_checkpoint(store: ObjectStore, claim: Claim, *, lineage: str) -> None:
    """Puts a checkpoint again, verified, a vector at a time: an object that is about to be named anew must not be one that
    the collector is about to take (law 3). Raises `ObjectMissing`, `DeltaCorrupt`, `StateMismatch`."""
    for vector in _read_manifest(store, claim, lineage).vectors.values():
        store.create(vector.key, store.get(vector.key, sha256=vector.sha256))
    store.create(claim.key, store.get(claim.key, sha256=claim.sha256))


def read_checkpoint(
    store: ObjectStore, claim: Claim, *, lineage: str, parameters: tuple[Part, ...]
) -> Checkpoint:
    """Reads and verifies. Raises `ObjectMissing`, `DeltaCorrupt`, and `StateMismatch` for another model or lineage."""
    checkpoint = _read_manifest(store, claim, lineage)
    if checkpoint.parameters != parameters:
        raise StateMismatch(f"checkpoint {claim.key} holds other parameters than the configured policy")
    return checkpoint


def _read_manifest(store: ObjectStore, claim: Claim, lineage: str) -> Checkpoint:
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
    return checkpoint


def read_vector(store: ObjectStore, checkpoint: Checkpoint, name: str) -> bytes:
    """The safetensors bytes of one vector. Raises `ObjectMissing`, `DeltaCorrupt`."""
    claim = checkpoint.vectors.get(name)
    if claim is None:
        raise DeltaCorrupt(f"the checkpoint of version {checkpoint.version} holds no {name!r}")
    return store.get(claim.key, sha256=claim.sha256)


def _create(store: ObjectStore, lineage: str, data: bytes, suffix: str) -> Claim:
    digest = hashlib.sha256(data).hexdigest()
    key = f"checkpoints/{lineage}/{digest}.{suffix}"
    store.create(key, data)
    return Claim(key=key, size=len(data), sha256=digest)
