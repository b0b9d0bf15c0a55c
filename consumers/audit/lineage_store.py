"""What the store holds of a version: the way by which it is rebuilt, and whether every object on it is there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rollwire.consumers.audit.lineage import Stored, WayStep
from rollwire.consumers.weights.manifest import MadeFrom
from rollwire.consumers.weights.paths import PathStep, plan_path
from rollwire.consumers.weights.reader import anchor_manifest, read_manifest, shards_of
from rollwire.schemas.errors import ObjectMissing, WeightError
from rollwire.schemas.records import OffsetRange, TrainStep, WeightLink, WeightVersion
from rollwire.streams.findings import Finding, Kind
from rollwire.streams.seams.store import ObjectStore


class InStore(NamedTuple):
    way: tuple[WayStep, ...]
    objects: tuple[Stored, ...]
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]


class _Look:
    """Asks for objects, each key once, and keeps what was found."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self.objects: dict[str, Stored] = {}
        self.findings: list[Finding] = []

    def at(self, key: str, size: int, sha256: str, what: str, of: str, *, must: bool = True) -> bool:
        """`must`: where it is not there that is a finding. Returns whether it is, with the size that was published."""
        known = self.objects.get(key)
        if known is not None:
            return known.there
        info = self._store.head(key)
        there = info is not None and info.size == size
        self.objects[key] = Stored(key=key, size=size, sha256=sha256, what=what, there=there)
        if must and not there:
            detail = "is not in the store" if info is None else f"has {info.size:,} bytes, not {size:,}"
            self.findings.append(
                Finding(
                    kind=Kind.OBJECT_MISSING,
                    where=key,
                    detail=f"the {what} of {of} {detail}: was it deleted, or never copied to this bucket? "
                    "`rollwire weights verify` says which ways to the version are whole",
                )
            )
        return there


def look(
    store: ObjectStore,
    versions: Mapping[int, WeightVersion],
    links: Sequence[WeightLink],
    version: int,
    step: TrainStep | None,
) -> InStore:
    """`version` must be in `versions`. Only heads and manifests are read; `audit rebuild` reads all of it. Raises
    `StoreUnavailable`."""
    event = versions[version]
    found, notes = _Look(store), list[str]()
    gone = any(
        link.kind == "gone" and (link.version, link.base_version) == (version, event.base_version)
        for link in links
    )
    if gone:
        notes.append(f"the {event.kind} of version {version} was deleted by the store's retention")
    else:
        _own(store, found, event, step)
    if event.checkpoint is not None:
        claim = event.checkpoint
        if not found.at(claim.key, claim.size, claim.sha256, "checkpoint", f"version {version}", must=False):
            notes.append(f"the checkpoint of version {version} is not in the store any more")
    try:
        path = plan_path(list(versions.values()), links, None, version)
    except WeightError as error:
        if gone:
            notes.append(f"from the store, version {version} can be rebuilt no more: {error}")
        else:
            detail = f"it cannot be rebuilt from the store: {error}"
            found.findings.append(
                Finding(kind=Kind.OBJECT_MISSING, where=f"version {version}", detail=detail)
            )
        path = []
    for one in path:
        try:
            _step(store, found, one)
        except (WeightError, ObjectMissing) as error:
            found.findings.append(_unreadable(f"version {one.event.version}", error))
    way = tuple(
        WayStep(kind=one.kind, base=one.base, version=one.event.version, bytes=one.bytes) for one in path
    )
    return InStore(way, tuple(found.objects.values()), tuple(dict.fromkeys(found.findings)), tuple(notes))


def _own(store: ObjectStore, found: _Look, event: WeightVersion, step: TrainStep | None) -> None:
    """What the version was published as; its manifest is held against the step that the log says made it."""
    claim, name = event.manifest, f"version {event.version}"
    if not found.at(claim.key, claim.size, claim.sha256, "manifest", name):
        return
    try:
        manifest = read_manifest(store, event, claim)
    except (WeightError, ObjectMissing) as error:
        found.findings.append(_unreadable(claim.key, error))
        return
    what = "anchor" if manifest.kind == "anchor" else "shard"
    for entry in manifest.objects:
        found.at(entry.key, entry.size, entry.sha256, what, name)
    if manifest.made_from is not None and (
        step is None or manifest.made_from != MadeFrom(step.consumed, step.plan_digest)
    ):
        logged = "no step" if step is None else f"{_consumed(step.consumed)} of plan {step.plan_digest[:16]}"
        stored = manifest.made_from
        found.findings.append(
            Finding(
                kind=Kind.DIGEST_DIFFERS,
                where=claim.key,
                detail=f"the manifest of {name} says that it was made from {_consumed(stored.consumed)} of plan "
                f"{stored.plan_digest[:16]}, the log says {logged}",
            )
        )


def _step(store: ObjectStore, found: _Look, step: PathStep) -> None:
    name = f"version {step.source.version}"
    if step.kind == "same":
        return
    if step.full:
        manifest = anchor_manifest(store, step.event)
        for entry in manifest.objects:
            found.at(entry.key, entry.size, entry.sha256, "anchor", name)
        return
    for shard in shards_of(store, step.source):
        found.at(shard.key, shard.size, shard.sha256, "shard", name)


def _unreadable(where: str, error: Exception) -> Finding:
    missing = isinstance(error, ObjectMissing)
    return Finding(
        kind=Kind.OBJECT_MISSING if missing else Kind.DIGEST_DIFFERS, where=where, detail=str(error)
    )


def _consumed(ranges: Sequence[OffsetRange]) -> str:
    return ", ".join(f"{r.topic}[{r.partition}] {r.start}-{r.end}" for r in ranges) or "nothing"
