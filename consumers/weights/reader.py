"""From events to a verified state: which way to a version is the cheapest, and going it."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

from rollwire.consumers.weights.anchor import AnchorFile, read_anchor
from rollwire.consumers.weights.manifest import Manifest, check_tensors, decode_manifest
from rollwire.kernels.delta.apply import DeltaStage
from rollwire.kernels.digest import StateDigest, tensor_blake3
from rollwire.kernels.tensors import State
from rollwire.schemas.errors import BaseMismatch, DeltaCorrupt, DigestMismatch, WeightError
from rollwire.schemas.records import Claim, WeightVersion
from rollwire.streams.seams.store import ObjectStore


class PathStep(NamedTuple):
    """One way to get a version: its full snapshot, or its delta on `event.base_version`."""

    event: WeightVersion
    full: bool

    @property
    def bytes(self) -> int:
        return self.event.full_bytes if self.full else self.event.stored_bytes


class Loaded(NamedTuple):
    state: State
    digest: StateDigest


def plan_path(
    events: Sequence[WeightVersion],
    have: int | None,
    want: int,
    *,
    avoid: Collection[tuple[int, bool]] = (),
) -> list[PathStep]:
    """The steps from version `have` (None = nothing is held) to `want` that read the fewest bytes; [] if it is held.

    `events` are of one lineage, in any order; of repeats the first counts. `avoid` holds (version, full) of steps
    that proved unusable. Equal costs: fewer steps. Raises `WeightError` where no way leads there.
    """
    known: dict[int, WeightVersion] = {}
    for event in events:
        known.setdefault(event.version, event)
    if have == want:
        return []
    onwards: dict[int | None, list[PathStep]] = {}
    for event in known.values():
        if anchor_claim(event) is not None and (event.version, True) not in avoid:
            onwards.setdefault(None, []).append(PathStep(event, True))
        if event.base_version is not None and (event.version, False) not in avoid:
            onwards.setdefault(event.base_version, []).append(PathStep(event, False))
    # An anchor leads on from nothing, so from anything: Dijkstra over versions, with None as a start of its own.
    queue: list[tuple[int, int, int]] = []  # bytes, steps, version
    reached: dict[int, tuple[int, int, PathStep | None]] = {}

    def reach(cost: int, steps: int, version: int, step: PathStep | None) -> None:
        if version not in reached or (cost, steps) < reached[version][:2]:
            reached[version] = (cost, steps, step)
            heapq.heappush(queue, (cost, steps, version))

    if have is not None:
        reach(0, 0, have, None)
    for step in onwards.get(None, ()):
        reach(step.bytes, 1, step.event.version, step)
    while queue:
        cost, steps, version = heapq.heappop(queue)
        if (cost, steps) > reached[version][:2]:
            continue
        if version == want:
            return _walk_back(reached, want)
        for step in onwards.get(version, ()):
            reach(cost + step.bytes, steps + 1, step.event.version, step)
    raise WeightError(
        f"no way from {'nothing' if have is None else f'version {have}'} to version {want}: "
        f"{len(known)} versions known, {len(avoid)} steps proved unusable"
    )


def _walk_back(reached: dict[int, tuple[int, int, PathStep | None]], want: int) -> list[PathStep]:
    path: list[PathStep] = []
    version: int | None = want
    while version is not None and (step := reached[version][2]) is not None:
        path.append(step)
        version = None if step.full else step.event.base_version
    return path[::-1]


def anchor_claim(event: WeightVersion) -> Claim | None:
    """The manifest of the version's full snapshot, where there is one."""
    return event.manifest if event.kind == "anchor" else event.anchor


def load_path(
    store: ObjectStore,
    path: Sequence[PathStep],
    base: Loaded | None,
    *,
    entering: Callable[[PathStep], None] | None = None,
) -> Loaded:
    """Goes a path of `plan_path`; `base` is what is held. Never writes to the base's arrays.

    Every object is checked by SHA-256, every base and result by digest. `entering` is called before each step: after
    an error, the last one named is the one that failed.

    Raises `ObjectMissing`, `StoreUnavailable`; `DeltaCorrupt`, `BaseMismatch`, `StateMismatch`, `DigestMismatch`.
    """
    stage: DeltaStage | None = None
    loaded = base
    for step in path:
        if entering is not None:
            entering(step)
        if step.full:
            loaded, stage = _load_anchor(store, step.event), None
            continue
        if stage is None:
            if loaded is None:
                raise BaseMismatch(f"version {step.event.version} is a delta, and nothing is held")
            stage = DeltaStage(loaded.state, loaded.digest)
        _apply_delta(store, step.event, stage)
        done = stage.done()
        loaded = Loaded(done.state, done.digest)
    if loaded is None:
        raise WeightError("an empty path, and nothing is held")
    return loaded


def load_version(store: ObjectStore, path: Sequence[PathStep], base: State | None) -> State:
    """The state at the end of a path, verified. As `load_path`, for callers that hold no digest."""
    held = None if base is None else Loaded(base, StateDigest.of(base))
    return load_path(store, path, held).state


def read_manifest(store: ObjectStore, event: WeightVersion, claim: Claim) -> Manifest:
    """The manifest that `event` names by `claim`, checked against the event. Raises `DeltaCorrupt`."""
    manifest = decode_manifest(store.get(claim.key, sha256=claim.sha256))
    said = (event.model, event.lineage, event.version, event.step, event.state_digest, event.full_bytes)
    found = (
        manifest.model,
        manifest.lineage,
        manifest.version,
        manifest.step,
        manifest.state_digest,
        manifest.full_bytes,
    )
    if said != found:
        raise DeltaCorrupt(f"manifest {claim.key} is {found}, the event of version {event.version} {said}")
    return manifest


def read_objects(store: ObjectStore, manifest: Manifest) -> Iterator[AnchorFile]:
    """The listed objects and no others, one at a time, verified (C26)."""
    for entry in manifest.objects:
        data = store.get(entry.key, sha256=entry.sha256)
        if len(data) != entry.size:
            raise DeltaCorrupt(f"{entry.key} has {len(data)} bytes, the manifest says {entry.size}")
        yield AnchorFile(entry.file, data)


def _load_anchor(store: ObjectStore, event: WeightVersion) -> Loaded:
    claim = anchor_claim(event)
    if claim is None:
        raise WeightError(f"version {event.version} has no full snapshot")
    manifest = read_manifest(store, event, claim)
    if manifest.kind != "anchor":
        raise DeltaCorrupt(f"{claim.key} is the manifest of a {manifest.kind}, not of an anchor")
    state = read_anchor(list(read_objects(store, manifest)))
    check_tensors(manifest, state)
    for entry in manifest.tensors:
        if tensor_blake3(state[entry.name]) != entry.blake3:
            raise DigestMismatch(
                f"{entry.name} of the anchor of version {event.version} is not the published one"
            )
    digest = StateDigest.of(state)
    _check_result(event, digest)
    return Loaded(state, digest)


def _apply_delta(store: ObjectStore, event: WeightVersion, stage: DeltaStage) -> None:
    manifest = read_manifest(store, event, event.manifest)
    base = manifest.base
    if base is None:
        raise DeltaCorrupt(f"{event.manifest.key} is the manifest of an anchor, not of a delta")
    held = stage.done()
    check_tensors(manifest, held.state)
    if base.version != event.base_version or base.state_digest != held.digest.hex:
        raise BaseMismatch(
            f"version {event.version} is a delta on version {base.version} ({base.state_digest[:16]}); "
            f"held is {held.digest.hex[:16]}"
        )
    stage.apply(file.data for file in read_objects(store, manifest))
    _check_result(event, stage.done().digest)


def _check_result(event: WeightVersion, digest: StateDigest) -> None:
    if digest.hex != event.state_digest:
        raise DigestMismatch(
            f"version {event.version} came out as {digest.hex[:16]}, published is {event.state_digest[:16]}"
        )
