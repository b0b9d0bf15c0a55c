"""The torch trainer's checkpoints: its masters, moments and generator as vectors of `checkpoint_store`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from rollwire.consumers.trainer.checkpoint_store import Checkpoint, Part, read_checkpoint, read_vector
from rollwire.consumers.trainer.weights import Snapshot
from rollwire.kernels.policy.config import PolicyConfig
from rollwire.kernels.policy.states import disk_layout
from rollwire.schemas.errors import DeltaCorrupt
from rollwire.schemas.records import Claim
from rollwire.streams.seams.store import ObjectStore

VECTORS: Final = ("masters", "exp_avg", "exp_avg_sq", "rng")


def parameter_layout(config: PolicyConfig) -> tuple[Part, ...]:
    return tuple(Part(name=part.name, shape=part.shape) for part in disk_layout(config))


def snapshot_vectors(snapshot: Snapshot) -> Iterator[tuple[str, bytes]]:
    """What `checkpoint_store.DueCheckpoint` writes of a snapshot."""
    parts = (snapshot.masters_N, snapshot.exp_avg_N, snapshot.exp_avg_sq_N, snapshot.rng)
    for name, part in zip(VECTORS, parts, strict=True):
        yield name, save_tensors({name: part.contiguous()})


def load_checkpoint(
    store: ObjectStore, claim: Claim, *, lineage: str, parameters: tuple[Part, ...]
) -> tuple[Checkpoint, Snapshot]:
    """Reads and verifies. Raises `ObjectMissing`, `DeltaCorrupt`, and `StateMismatch` for another policy or lineage."""
    checkpoint = read_checkpoint(store, claim, lineage=lineage, parameters=parameters)
    vectors = {name: _tensor(name, read_vector(store, checkpoint, name)) for name in VECTORS}
    return checkpoint, Snapshot(
        vectors["masters"], vectors["exp_avg"], vectors["exp_avg_sq"], checkpoint.updates, vectors["rng"]
    )


def _tensor(name: str, data: bytes) -> Tensor:
    try:
        return load_tensors(data)[name]
    except (SafetensorError, KeyError) as error:
        raise DeltaCorrupt(f"a checkpoint's vector does not hold {name!r}: {error}") from error
