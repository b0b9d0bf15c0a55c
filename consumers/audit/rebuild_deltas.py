"""Versions from snapshots and deltas alone: what was published is walked again, object by object.

Each wanted version comes from the nearest snapshot or from the version before it, by the cheapest way over published
snapshots and deltas. An object that is missing or damaged is a finding, and another way is taken where there is one, at
last over links (`weight-links`). Every result is checked three times: its incremental digest, updated from the changed
elements alone, is the published one; names, dtypes and shapes are those of its manifest; and where the version has a
snapshot too, blake3 of every tensor is the one that the snapshot's manifest says.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Final, NamedTuple

from rollwire.consumers.audit.rebuild_anchor import load_snapshot
from rollwire.consumers.audit.rebuild_past import Past
from rollwire.consumers.weights.fetched import FetchedStore
from rollwire.consumers.weights.manifest import Manifest, check_tensors
from rollwire.consumers.weights.paths import PathStep, StepKey, Ways, anchor_claim, cheapest
from rollwire.consumers.weights.reader import (
    anchor_manifest,
    check_result,
    explain_base,
    named,
    read_manifest,
    read_shards,
)
from rollwire.consumers.weights.staging import objects_of
from rollwire.kernels.delta.apply import DeltaStage
from rollwire.kernels.digest import tensor_blake3
from rollwire.kernels.tensors import State
from rollwire.schemas.errors import (
    BaseMismatch,
    DeltaCorrupt,
    DigestMismatch,
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


CHAINED: Final = 64
"""Versions that are made in one pass over the state, at most."""

_FEW: Final = 16
_CHAIN_BYTES: Final = 64 << 20
"""Deltas of one pass, which are held all at once: with more bytes than this a pass makes no more than `_FEW` versions."""


class ByDeltas(NamedTuple):
    """One version."""

    event: WeightVersion
    digest: (
        str | None
    )  # of the result, which is the published one; None: no way led there, `findings` say why
    way: tuple[PathStep, ...]
    findings: tuple[Finding, ...]

    @property
    def equal(self) -> bool:
        return self.digest is not None and not self.findings


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

    @property
    def state(self) -> State | None:
        """The weights of the last version, once `versions` has ended; not to be written to. None: no way led there."""
        return None if self._stage is None else self._stage.done().state

    def versions(self, wanted: Sequence[int]) -> Iterator[ByDeltas]:
        """Each of `wanted`, which are published, in this order. Raises `StoreUnavailable`."""
        planned: deque[_Planned] = deque()
        index = 0
        while index < len(wanted):
            if not planned:
                planned.extend(self._plan(wanted[index : index + AHEAD]))
                self._store.expect([entry for one in planned for entry in self._objects(one)])
            for made in self._next(planned):
                if made.findings:  # what was planned led from there on
                    planned.clear()
                yield made
                index += 1

    def _next(self, planned: deque[_Planned]) -> Iterator[ByDeltas]:
        """The versions that are planned next: several, where they are made in one pass."""
        chain = self._chain(planned)
        if len(chain) < 2:
            one = planned.popleft()
            yield self._version(self._past.versions[one.version], one.way)
            return
        for _ in chain:
            planned.popleft()
        steps = [step for one in chain for step in one.way or ()]
        try:
            self._go_chain(steps)
        except (WeightError, ObjectMissing):
            self._spoil()  # one by one it comes out which
            planned.clear()
            for one in chain:
                yield self._version(self._past.versions[one.version], self._way(self._held, one.version))
            return
        for step in steps:
            findings = self._against_manifests(step.event, proved=step is not steps[-1])
            yield ByDeltas(step.event, step.event.state_digest, (step,), tuple(findings))

    def _chain(self, planned: Iterable[_Planned]) -> list[_Planned]:
        """The first of `planned`, as far as each is one delta on the one before it. A version with a snapshot ends it, since
        its tensors are looked at."""
        chain: list[_Planned] = []
        nbytes = 0
        for one in planned:
            if one.way is None or len(one.way) != 1 or not _forward(one.way[0]):
                break
            nbytes += one.way[0].bytes
            if _full(len(chain), nbytes):
                break
            chain.append(one)
            if anchor_claim(one.way[0].event) is not None:
                break
        return chain

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
        careful = False
        while way is not None:
            entered: list[PathStep] = []
            try:
                self._go(way, entered, careful=careful)
            except (WeightError, ObjectMissing) as error:
                self._spoil()
                if careful:
                    findings.append(_finding(event, error))
                    self._avoid.update(step.key for step in entered[-1:])
                    way = self._way(None, event.version)
                else:  # step by step it comes out which of them is wrong
                    careful, way = True, self._from_nothing(way) or self._way(None, event.version)
            else:
                findings += self._against_manifests(event, proved=bool(way) and way[-1].full)
                return ByDeltas(event, event.state_digest, tuple(way), tuple(findings))
        findings.append(_no_way(self._past, event))
        return ByDeltas(event, None, (), tuple(findings))

    def _from_nothing(self, way: Sequence[PathStep]) -> list[PathStep] | None:
        """The same way, and before it one to where it begins."""
        before = [] if not way or way[0].base is None else self._way(None, way[0].base)
        return None if before is None else [*before, *way]

    def _held_stage(self) -> DeltaStage:
        if self._stage is None:
            raise BaseMismatch("a delta, and nothing is held")
        return self._stage

    def _spoil(self) -> None:
        """A stage is spoilt by an error; what was asked for led from there on."""
        self._held, self._stage = None, None
        self._store.expect(())

    def _go(self, way: Sequence[PathStep], entered: list[PathStep], *, careful: bool) -> None:
        for chained, some in groupby(way, lambda step: not careful and _forward(step)):
            steps = list(some)
            if chained:
                self._go_chain(steps)
                continue
            for step in steps:
                entered.append(step)
                with named(step):
                    self._step(step)
                self._held = step.event.version

    def _step(self, step: PathStep) -> None:
        if step.full:
            loaded = load_snapshot(self._store, step.event)
            self._stage = DeltaStage(loaded.state, loaded.digest, threads=self._threads, owned=True)
        elif step.kind != "same":
            stage = self._held_stage()
            try:
                stage.apply(read_shards(self._store, step), backwards=step.backwards)
            except BaseMismatch:
                explain_base(self._store, step, stage.done().state)
                raise
        check_result(step.event, self._held_stage().done().digest)

    def _go_chain(self, steps: Sequence[PathStep]) -> None:
        """Deltas that follow one another, many in a pass. An error does not say at which of them."""
        for some in passes(steps):
            found = self._held_stage().apply_chain([list(read_shards(self._store, step)) for step in some])
            for step, digest in zip(some, found, strict=True):
                if digest != step.event.state_digest:
                    raise DigestMismatch(f"version {step.event.version} came out as {digest[:16]}")
            self._held = some[-1].event.version

    def _against_manifests(self, event: WeightVersion, *, proved: bool) -> list[Finding]:
        """Names, dtypes, shapes, which no delta changes; and of a version with a snapshot every tensor's blake3, unless it
        was `proved` when the snapshot was read."""
        state = self._held_stage().done().state
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


def _forward(step: PathStep) -> bool:
    return not step.full and not step.backwards and step.kind != "same"


def _full(count: int, nbytes: int) -> bool:
    """Whether a pass of `count` deltas takes no more: with the next one it would hold `nbytes`."""
    return count >= CHAINED or (count >= _FEW and nbytes > _CHAIN_BYTES)


def passes(steps: Iterable[PathStep]) -> Iterator[list[PathStep]]:
    """Deltas that follow one another, in runs of those that one pass over the state makes."""
    some: list[PathStep] = []
    nbytes = 0
    for step in steps:
        if _full(len(some), nbytes + step.bytes):
            yield some
            some, nbytes = [], 0
        some.append(step)
        nbytes += step.bytes
    if some:
        yield some


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
