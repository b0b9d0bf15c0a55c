"""A snapshot read as fast as it comes: by ranges, several at once, each copied to its place; a tensor that is there is
checked while others arrive.

Every bit of the state is proved by BLAKE3 of its tensor, as the manifest has it, whose SHA-256 the event says; then by the
state's digest. So the SHA-256 of the files, which would go over the same bytes once more, is left to `rollwire weights verify`.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Final, NamedTuple

import numpy as np

from rollwire.consumers.weights.anchor import Extent, read_extents, safetensors_head
from rollwire.consumers.weights.manifest import ObjectEntry, TensorEntry, check_tensors
from rollwire.consumers.weights.reader import Loaded, anchor_manifest, check_result
from rollwire.kernels.digest import StateDigest, held_sums, tensor_blake3
from rollwire.kernels.tensors import Tensor, lane_dtype
from rollwire.schemas.errors import DeltaCorrupt, DigestMismatch, StateMismatch
from rollwire.schemas.records import WeightVersion
from rollwire.streams.seams.store import ObjectStore

_THREADS: Final = 4
_RANGE_BYTES: Final = 8 << 20
"""That are asked for at once: neighbours together, large tensors in parts. Smaller than what the heap gives back, so that ranges follow one another in the same memory."""


def load_snapshot(store: ObjectStore, event: WeightVersion) -> Loaded:
    """The arrays are the caller's. Raises as `weights.reader.load_anchor`, but for a file whose tensors alone are right."""
    manifest = anchor_manifest(store, event)
    said = {entry.name: entry for entry in manifest.tensors}
    pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="snapshot")
    try:
        places = [place for some in pool.map(lambda o: _places(store, o), manifest.objects) for place in some]
        state = _state(places)
        check_tensors(manifest, state)
        tensors = {place.name: _Coming(event, state[place.name], said[place.name]) for place in places}
        for _ in pool.map(lambda some: _read(store, some, tensors), _ranges(places)):
            pass  # an error of any
    finally:
        pool.shutdown(cancel_futures=True)
    digest = StateDigest.from_sums(
        {name: (one.tensor.dtype, one.tensor.shape, one.sums) for name, one in tensors.items()}
    )
    check_result(event, digest)
    return Loaded(state, digest)


class _Place(NamedTuple):
    """A tensor in a file."""

    key: str
    name: str
    extent: Extent


def _places(store: ObjectStore, entry: ObjectEntry) -> list[_Place]:
    if not entry.file.endswith(".safetensors"):
        data = store.get(entry.key)
        if len(data) != entry.size:
            raise DeltaCorrupt(f"{entry.key} has {len(data)} bytes, {entry.size} were published")
        return []
    info = store.head(entry.key)
    if info is not None and info.size != entry.size:
        raise DeltaCorrupt(f"{entry.key} has {info.size} bytes, {entry.size} were published")
    head = store.get_range(entry.key, 0, max(8, entry.head))
    if safetensors_head(entry.file, head) != len(head):
        raise DeltaCorrupt(
            f"{entry.key} does not begin with the {entry.head} bytes of head that were published"
        )
    return [_Place(entry.key, *one) for one in read_extents(entry.file, head, entry.size).items()]


def _state(places: list[_Place]) -> dict[str, Tensor]:
    """Arrays that are still to be filled."""
    state: dict[str, Tensor] = {}
    for _, name, at in places:
        if name in state:
            raise StateMismatch(f"{name!r} is in two shards of an anchor")
        lane = lane_dtype(at.dtype)
        state[name] = Tensor(at.dtype, at.shape, np.empty((at.end - at.start) // lane.itemsize, lane))
    return state


class _Piece(NamedTuple):
    """Bytes [start, end) of a tensor's own."""

    place: _Place
    start: int
    end: int


def _ranges(places: list[_Place]) -> list[list[_Piece]]:
    """Every tensor, cut to pieces; those of one list lie side by side in a file. An empty tensor is a piece as well."""
    ranges: list[list[_Piece]] = []
    key, behind, room = "", 0, 0
    for place in sorted(places, key=lambda p: (p.key, p.extent.start, p.extent.end)):
        size, at, begun = place.extent.end - place.extent.start, 0, False
        while at < size or not begun:
            if room <= 0 or key != place.key or behind != place.extent.start + at:
                ranges.append([])
                key, room = place.key, _RANGE_BYTES
            piece = _Piece(place, at, min(size, at + room))
            ranges[-1].append(piece)
            room -= piece.end - at
            at, begun = piece.end, True
            behind = place.extent.start + at
    return ranges


class _Coming:
    """A tensor that several threads fill; the one that brings the last of it checks it."""

    def __init__(self, event: WeightVersion, tensor: Tensor, entry: TensorEntry) -> None:
        self._event, self._entry = event, entry
        self._bytes = tensor.bits.view(np.uint8)
        self._lock = threading.Lock()
        self._left = self._bytes.size
        self.tensor = tensor
        self.sums = b""  # of its chunks, once it is checked

    def put(self, start: int, data: memoryview) -> None:
        self._bytes[start : start + len(data)] = np.frombuffer(data, np.uint8)
        with self._lock:
            self._left -= len(data)
            last = self._left == 0
        if last:
            _check_tensor(self._event, self._entry, self.tensor)
            self.sums = b"".join(total.to_bytes(16, "little") for total in held_sums(self.tensor))


def _read(store: ObjectStore, pieces: list[_Piece], tensors: dict[str, _Coming]) -> None:
    first, last = pieces[0], pieces[-1]
    key = first.place.key
    start, end = first.place.extent.start + first.start, last.place.extent.start + last.end
    data = store.get_range(key, start, end) if start < end else b""
    if len(data) != end - start:
        raise DeltaCorrupt(f"{key} gave {len(data)} of the bytes {start} to {end}")
    at = 0
    for piece in pieces:
        size = piece.end - piece.start
        tensors[piece.place.name].put(piece.start, memoryview(data)[at : at + size])
        at += size


def _check_tensor(event: WeightVersion, entry: TensorEntry, tensor: Tensor) -> None:
    if tensor_blake3(tensor) != entry.blake3:
        raise DigestMismatch(
            f"{entry.name} of the anchor of version {event.version} is not the published one"
        )
