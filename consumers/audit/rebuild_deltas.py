"""Versions from snapshots and deltas alone: what was published is walked again, object by object.

Each wanted version comes from the nearest snapshot or from the version before it, by the cheapest way over published
snapshots and deltas. An object that is missing or damaged is a finding, and another way is taken where there is one, at
last over links (`weight-links`). Every result is checked three times: its incremental digest, updated from the changed
elements alone, is the published one; names, dtypes and shapes are those of its manifest; and where the version has a
snapshot too, blake3 of every tensor is the one that the snapshot's manifest says.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from rollwire.consumers.audit.rebuild_past import Past
from rollwire.consumers.weights.fetched import FetchedStore
from rollwire.consumers.weights.manifest import Manifest, check_tensors
from rollwire.consumers.weights.paths import PathStep, StepKey, Ways, anchor_claim, cheapest
from rollwire.consumers.weights.reader import (
    anchor_manifest,
    check_result,
    explain_base,
    load_anchor,
    named,
    read_manifest,
    read_shards,
)
from rollwire.consumers.weights.staging import objects_of
from rollwire.kernels.delta.apply import DeltaStage
from rollwire.kernels.digest import StateDigest, tensor_blake3
from rollwire.kernels.tensors import State
from rollwire.schemas.errors import (
    BaseMismatch,
    DeltaCorrupt,
    FormatUnknown,
    ObjectMissing,
    StateMismatch,
    WeightError,
)
from rollwire.schemas.records import LinkObject, WeightVersion
from rollwire.streams.findings import Finding, Kind
from rollwire.streams.seams.store import ObjectStore

AHEAD: Final = 256
"""Versions whose objects are asked for at once."""


class ByDeltas(NamedTuple):
    """One version. `state` is valid until the next one is asked for, and is not to be written to."""

    event: WeightVersion
    state: State | None  # None: no way led there; `findings` say why
    digest: StateDigest | None
    way: tuple[PathStep, ...]
    findings: tuple[Finding, ...]

    @property
    def equal(self) -> bool:
        return self.state is not None and not self.findings


class _Planned(NamedTuple):
    version: int
    way: list[PathStep] | None  # from the version planned before it; None = there is none


class DeltaRebuild:
    """Walks one lineage. What is read comes in parallel, ahead of what is applied."""

    def __init__(self, store: ObjectStore, past: Past, *, threads: int = 2) -> None:
        self._store = FetchedStore(store)
        self._past = past
        self._threads = threads
        self._ways = [Ways(past.versions, links) for links in (past.gone, past.links)]
        self._avoid: set[StepKey] = set()
        self._held: int | None = None
        self._stage: DeltaStage | None = None

    @property
    def read_bytes(self) -> int:
        return self._store.read_bytes

    def close(self) -> None:
        self._store.close()

    def versions(self, wanted: Sequence[int]) -> Iterator[ByDeltas]:
        """Each of `wanted`, which are published, in this order. Raises `StoreUnavailable`."""
        planned: deque[_Planned] = deque()
        for index, version in enumerate(wanted):
            if not planned:
                planned.extend(self._plan(wanted[index : index + AHEAD]))
                self._store.expect([entry for one in planned for entry in self._objects(one)])
            made = self._version(self._past.versions[version], planned.popleft().way)
            if made.findings:  # what was planned led from there on
                planned.clear()
            yield made

    def _plan(self, wanted: Sequence[int]) -> Iterator[_Planned]:
        have = self._held
        for version in wanted:
            way = self._way(have, version)
            yield _Planned(version, way)
            if way is None:
                return
            have = version

    def _objects(self, one: _Planned) -> list[LinkObject]:
        """What a version will ask for: the objects of its way, then its manifest."""
        found = objects_of(one.way or ())
        event = self._past.versions[one.version]
        if one.way is not None and event.kind != "anchor":
            claim = event.manifest
            found.append(LinkObject(key=claim.key, size=claim.size, sha256=claim.sha256, head_bytes=0))
        return found

    def _way(self, have: int | None, want: int) -> list[PathStep] | None:
        for ways in self._ways:
            way = cheapest(lambda v: (s for s in ways.into(v) if s.key not in self._avoid), have, want)  # noqa: B023  asked now
            if way is not None:
                return way
        return None

    def _version(self, event: WeightVersion, way: list[PathStep] | None) -> ByDeltas:
        findings: list[Finding] = []
        while way is not None:
            entered: list[PathStep] = []
            try:
                self._go(way, entered)
                stage = self._stage_of(event).done()
            except WeightError as error:
                findings.append(_finding(event, error))
            except ObjectMissing as error:
                findings.append(_finding(event, error))
            else:
                findings += self._against_manifests(event, stage.state, proved=bool(way) and way[-1].full)
                return ByDeltas(event, stage.state, stage.digest, tuple(way), tuple(findings))
            self._drop(entered)
            way = self._way(None, event.version)
        findings.append(_no_way(self._past, event))
        return ByDeltas(event, None, None, (), tuple(findings))

    def _stage_of(self, event: WeightVersion) -> DeltaStage:
        if self._stage is None:
            raise BaseMismatch(f"version {event.version}: nothing is held")
        return self._stage

    def _drop(self, entered: Sequence[PathStep]) -> None:
        """A stage is spoilt by an error, and the way over the last step leads nowhere."""
        if entered:
            self._avoid.add(entered[-1].key)
        self._held, self._stage = None, None
        self._store.expect(())

    def _go(self, way: Sequence[PathStep], entered: list[PathStep]) -> None:
        for step in way:
            entered.append(step)
            with named(step):
                if step.full:
                    loaded = load_anchor(self._store, step.event)
                    self._stage = DeltaStage(loaded.state, loaded.digest, threads=self._threads)
                elif step.kind != "same":
                    stage = self._stage_of(step.event)
                    try:
                        stage.apply(read_shards(self._store, step), backwards=step.backwards)
                    except BaseMismatch:
                        explain_base(self._store, step, stage.done().state)
                        raise
                check_result(step.event, self._stage_of(step.event).done().digest)
            self._held = step.event.version

    def _against_manifests(self, event: WeightVersion, state: State, *, proved: bool) -> list[Finding]:
        """Names, dtypes, shapes; and of a version with a snapshot every tensor's blake3, unless it was `proved` when the
        snapshot was read."""
        found: list[Finding] = []
        manifests: list[Manifest] = []
        for read in (_own_manifest,) if proved else (_own_manifest, _anchor_manifest):
            try:
                manifest = read(self._store, event)
            except (WeightError, ObjectMissing) as error:
                found.append(_finding(event, error))
                continue
            if manifest is not None:
                manifests.append(manifest)
        for manifest in manifests:
            try:
                check_tensors(manifest, state)
            except StateMismatch as error:
                found.append(_finding(event, error))
                continue
            found += [
                Finding(
                    kind=Kind.DIGEST_DIFFERS,
                    where=f"version {event.version}, tensor {entry.name}",
                    detail=f"blake3 is {tensor_blake3(state[entry.name])}, its snapshot's manifest says {entry.blake3}",
                )
                for entry in manifest.tensors
                if entry.blake3 and tensor_blake3(state[entry.name]) != entry.blake3
            ]
        return found


def _own_manifest(store: ObjectStore, event: WeightVersion) -> Manifest | None:
    return read_manifest(store, event, event.manifest) if event.kind != "anchor" else None


def _anchor_manifest(store: ObjectStore, event: WeightVersion) -> Manifest | None:
    return None if anchor_claim(event) is None else anchor_manifest(store, event)


def _finding(event: WeightVersion, error: Exception) -> Finding:
    kind = Kind.DIGEST_DIFFERS
    if isinstance(error, ObjectMissing):
        kind = Kind.OBJECT_MISSING
    elif isinstance(error, DeltaCorrupt | FormatUnknown):
        kind = Kind.OBJECT_CORRUPT
    return Finding(kind=kind, where=f"version {event.version}", detail=str(error))


def _no_way(past: Past, event: WeightVersion) -> Finding:
    collected = sum(link.version == event.version for link in past.gone)
    why = "the collector deleted the ways to it" if collected else "see what is missing above"
    return Finding(
        kind=Kind.OBJECT_MISSING,
        where=f"version {event.version}",
        detail=f"no snapshot and no delta leads to it any more: {why}",
    )
