"""Going a path of `paths.plan_path`: from what is held to a verified state, whole or in parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from rollwire.consumers.weights.anchor import AnchorFile, read_anchor
from rollwire.consumers.weights.fetched import FetchedStore
from rollwire.consumers.weights.manifest import Manifest, check_tensors, decode_manifest
from rollwire.consumers.weights.parts import Choose, apply_to_parts, read_parts
from rollwire.consumers.weights.paths import PathStep, anchor_claim
from rollwire.kernels.delta.apply import DeltaStage
from rollwire.kernels.digest import StateDigest, tensor_blake3
from rollwire.kernels.tensors import State, Tensor
from rollwire.schemas.errors import (
    BaseMismatch,
    DeltaCorrupt,
    DigestMismatch,
    FormatUnknown,
    ObjectMissing,
    StateMismatch,
    WeightError,
)
from rollwire.schemas.records import Claim, LinkObject, WeightLink, WeightVersion
from rollwire.streams.seams.store import ObjectStore


class Loaded(NamedTuple):
    state: State
    digest: StateDigest  # of the whole state, also where parts of it are held


def load_path(
    store: ObjectStore,
    path: Sequence[PathStep],
    base: Loaded | None,
    *,
    choose: Choose | None = None,
    entering: Callable[[PathStep], None] | None = None,
) -> Loaded:
    """Goes a path of `plan_path`; `base` is what is held. Never writes to the base's arrays.

    Every object is checked by SHA-256 or, where only ranges of it are read, by the checksums and sums of its chunks;
    every base and result by digest. `choose` says which parts are to be held (`parts.py`); without it, everything is.
    Parts never go backwards: the sums of what is not held are known forwards alone (`plan_path` with a `slice_share`
    below 1 knows that).
    `entering` is called before each step: after an error, the last one named is the one that failed.

    Raises `ObjectMissing`, `StoreUnavailable`; `DeltaCorrupt`, `BaseMismatch`, `StateMismatch`, `DigestMismatch`,
    `FormatUnknown`.
    """
    loaded = base
    stage: DeltaStage | None = None
    private = False  # whether the arrays of `loaded` are ours to write to
    for step in path:
        if entering is not None:
            entering(step)
        with named(step):
            if step.full:
                loaded, stage, private = load_anchor(store, step.event, choose), None, True
                continue
            if loaded is None:
                raise BaseMismatch("a delta, and nothing is held")
            if step.kind != "same" and choose is None:
                stage = stage or DeltaStage(loaded.state, loaded.digest)
                try:
                    stage.apply(read_shards(store, step), backwards=step.backwards)
                except BaseMismatch:
                    explain_base(store, step, loaded.state)
                    raise
                done = stage.done()
                loaded = Loaded(done.state, done.digest)
            elif step.kind != "same":  # parts
                if not private:
                    loaded, private = _copied(loaded), True
                shards = shards_of(store, step.source)
                digest = apply_to_parts(store, loaded.state, loaded.digest, shards)
                loaded = Loaded(loaded.state, digest)
            check_result(step.event, loaded.digest)
    if loaded is None:
        raise WeightError("an empty path, and nothing is held")
    return loaded


def load_version(store: ObjectStore, path: Sequence[PathStep], base: State | None) -> State:
    """The state at the end of a path, verified. As `load_path`, for callers that hold no digest."""
    held = None if base is None else Loaded(base, StateDigest.of(base))
    return load_path(store, path, held).state


def check_result(event: WeightVersion, digest: StateDigest) -> None:
    """Raises `DigestMismatch` where a state is not the published version."""
    if digest.hex != event.state_digest:
        raise DigestMismatch(
            f"version {event.version} came out as {digest.hex[:16]}, published is {event.state_digest[:16]}"
        )


def shards_of(store: ObjectStore, source: WeightVersion | WeightLink) -> Sequence[LinkObject]:
    """The shards of a version's delta or of a link: from the event, or from the manifest where they are too many for it."""
    if isinstance(source, WeightLink) or source.objects or source.kind == "empty":
        return source.objects
    manifest = read_manifest(store, source, source.manifest)
    if manifest.base is None:
        raise DeltaCorrupt(f"{source.manifest.key} is the manifest of an anchor, not of a delta")
    if manifest.base.version != source.base_version:
        raise DeltaCorrupt(
            f"{source.manifest.key} is a delta on version {manifest.base.version}, its event says {source.base_version}"
        )
    return tuple(
        LinkObject(key=o.key, size=o.size, sha256=o.sha256, head_bytes=o.head) for o in manifest.objects
    )


def read_shards(store: ObjectStore, step: PathStep) -> Iterator[bytes]:
    """The delta of a step, one shard at a time, each checked by size and SHA-256. The listed ones and no others (C26)."""
    for entry in shards_of(store, step.source):
        yield read_object(store, entry.key, entry.size, entry.sha256)


def read_object(store: ObjectStore, key: str, size: int, sha256: str) -> bytes:
    data = store.get(key, sha256=sha256)
    if len(data) != size:
        raise DeltaCorrupt(f"{key} has {len(data)} bytes, {size} were published")
    return data


def read_manifest(store: ObjectStore, event: WeightVersion, claim: Claim) -> Manifest:
    """The manifest that `event` names by `claim`, checked against the event. Raises `DeltaCorrupt`, `FormatUnknown`."""
    try:
        manifest = decode_manifest(store.get(claim.key, sha256=claim.sha256))
    except (DeltaCorrupt, FormatUnknown) as error:
        raise type(error)(f"{claim.key}: {error}") from error
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


def anchor_manifest(store: ObjectStore, event: WeightVersion) -> Manifest:
    """The manifest of a version's full snapshot. Raises `WeightError` where it has none, and as `read_manifest`."""
    claim = anchor_claim(event)
    if claim is None:
        raise WeightError(f"version {event.version} has no full snapshot")
    manifest = read_manifest(store, event, claim)
    if manifest.kind != "anchor":
        raise DeltaCorrupt(f"{claim.key} is the manifest of a {manifest.kind}, not of an anchor")
    return manifest


def read_files(store: ObjectStore, manifest: Manifest) -> Iterator[AnchorFile]:
    """The files of an anchor, one at a time, verified."""
    if isinstance(store, FetchedStore):
        store.expect_all(
            [LinkObject(key=o.key, size=o.size, sha256=o.sha256, head_bytes=o.head) for o in manifest.objects]
        )
    for entry in manifest.objects:
        yield AnchorFile(entry.file, read_object(store, entry.key, entry.size, entry.sha256))


def load_anchor(store: ObjectStore, event: WeightVersion, choose: Choose | None = None) -> Loaded:
    """A version from its full snapshot; with `choose`, the parts that it names, by ranges."""
    manifest = anchor_manifest(store, event)
    if choose is not None:
        return Loaded(*read_parts(store, manifest, choose))
    state = read_anchor(list(read_files(store, manifest)))
    check_tensors(manifest, state)
    for entry in manifest.tensors:
        if tensor_blake3(state[entry.name]) != entry.blake3:
            raise DigestMismatch(
                f"{entry.name} of the anchor of version {event.version} is not the published one"
            )
    digest = StateDigest.of(state)
    check_result(event, digest)
    return Loaded(state, digest)


def _copied(loaded: Loaded) -> Loaded:
    state: Mapping[str, Tensor] = {name: t._replace(bits=t.bits.copy()) for name, t in loaded.state.items()}
    return Loaded(state, loaded.digest.copy())


def explain_base(store: ObjectStore, step: PathStep, state: State) -> None:
    """Why a state is no base of a version's delta, where the reason is its tensors: raises `StateMismatch` with the first
    one that is missing, extra, reshaped or of another type (C27)."""
    if step.kind == "delta" and isinstance(step.source, WeightVersion):
        check_tensors(read_manifest(store, step.source, step.source.manifest), state)


@contextmanager
def named(step: PathStep) -> Iterator[None]:
    """Errors of the codec know shards and tensors; here the step is put before them."""
    try:
        yield
    except (DeltaCorrupt, BaseMismatch, StateMismatch, DigestMismatch, FormatUnknown) as error:
        raise type(error)(f"version {step.event.version} by {step}: {error}") from error
    except ObjectMissing as error:
        raise ObjectMissing(
            f"version {step.event.version} by {step}: {error}: it was deleted, or never copied to this bucket; "
            f"`rollwire weights verify {step.event.version}` says which ways are whole"
        ) from error
