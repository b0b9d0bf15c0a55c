"""A snapshot read as fast as it comes: its tensors are copied once, and checked, beside one another.

Every bit of the state is proved by BLAKE3 of its tensor, as the manifest has it, whose SHA-256 the event says; then by the
state's digest. So the SHA-256 of the files, which would go over the same bytes once more, is left to `rollwire weights verify`.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np

from rollwire.consumers.weights.anchor import read_extents, safetensors_head
from rollwire.consumers.weights.manifest import Manifest, ObjectEntry, TensorEntry, check_tensors
from rollwire.consumers.weights.reader import Loaded, anchor_manifest, check_result
from rollwire.kernels.digest import StateDigest, tensor_blake3
from rollwire.kernels.tensors import State, Tensor, lane_dtype
from rollwire.schemas.errors import DeltaCorrupt, DigestMismatch, StateMismatch
from rollwire.schemas.records import WeightVersion
from rollwire.streams.seams.store import ObjectStore

_THREADS = 4


def load_snapshot(store: ObjectStore, event: WeightVersion) -> Loaded:
    """The arrays are the caller's. Raises as `weights.reader.load_anchor`, but for a file whose tensors alone are right."""
    manifest = anchor_manifest(store, event)
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="snapshot") as pool:
        files = list(pool.map(lambda entry: _read(store, entry), manifest.objects))
        views = _state(manifest, files)
        check_tensors(manifest, views)
        state = dict(zip(views, pool.map(_copied, views.values()), strict=True))
        del views, files
        proofs = [pool.submit(_check_tensor, event, entry, state[entry.name]) for entry in manifest.tensors]
        digest = StateDigest.of(state)
        for proof in proofs:
            proof.result()
    check_result(event, digest)
    return Loaded(state, digest)


def _copied(tensor: Tensor) -> Tensor:
    return tensor._replace(bits=np.array(tensor.bits))


def _read(store: ObjectStore, entry: ObjectEntry) -> bytes:
    data = store.get(entry.key)
    if len(data) != entry.size:
        raise DeltaCorrupt(f"{entry.key} has {len(data)} bytes, {entry.size} were published")
    return data


def _state(manifest: Manifest, files: list[bytes]) -> State:
    state: dict[str, Tensor] = {}
    for entry, data in zip(manifest.objects, files, strict=True):
        if not entry.file.endswith(".safetensors"):
            continue
        head = data[: safetensors_head(entry.file, data)]
        for name, at in read_extents(entry.file, head, len(data)).items():
            if name in state:
                raise StateMismatch(f"{name!r} is in two shards of an anchor")
            lane = lane_dtype(at.dtype)
            bits_N = np.frombuffer(data, lane, (at.end - at.start) // lane.itemsize, at.start)
            state[name] = Tensor(at.dtype, at.shape, bits_N)
    return state


def _check_tensor(event: WeightVersion, entry: TensorEntry, tensor: Tensor) -> None:
    if tensor_blake3(tensor) != entry.blake3:
        raise DigestMismatch(
            f"{entry.name} of the anchor of version {event.version} is not the published one"
        )
