"""Versions by training again: the nearest checkpoint is restored, and the recorded plans are taken step by step.

Nothing is written, and the published weights are looked at only where a digest differs, to name the tensor. One pass goes
over all wanted versions: each goes on from the one before it, and a checkpoint is restored at the start, after a revert,
where the settings of the steps change, and behind a step that could not be taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from rollwire.consumers.audit.rebuild_compare import first_difference
from rollwire.consumers.audit.rebuild_past import Past
from rollwire.consumers.audit.rebuild_recipe import Recipe, differing, recipe_of
from rollwire.consumers.audit.rebuild_ways import Way, way_back
from rollwire.consumers.trainer.history import BATCHES, range_ends
from rollwire.consumers.trainer.learner import Learner
from rollwire.consumers.trainer.plan import check_agreement
from rollwire.kernels.digest import StateDigest
from rollwire.kernels.tensors import State
from rollwire.schemas.errors import (
    DeadlineExceeded,
    DeltaCorrupt,
    Fenced,
    ObjectMissing,
    OffsetLost,
    PlanViolation,
    ReplayDiverged,
    RollwireError,
    StateMismatch,
)
from rollwire.schemas.records import TrainStep, WeightVersion
from rollwire.streams.findings import Finding, Kind
from rollwire.streams.seams.log import Log, TopicPartition

_KINDS: tuple[tuple[type[RollwireError], Kind], ...] = (
    (OffsetLost, Kind.HISTORY_GAP),
    (DeadlineExceeded, Kind.HISTORY_GAP),
    (ObjectMissing, Kind.OBJECT_MISSING),
    (DeltaCorrupt, Kind.OBJECT_CORRUPT),
    (StateMismatch, Kind.OBJECT_CORRUPT),
    (PlanViolation, Kind.OUTCOME_DIFFERS),
    (ReplayDiverged, Kind.OUTCOME_DIFFERS),
    (Fenced, Kind.OUTCOME_DIFFERS),
)


class ByTraining(NamedTuple):
    """One version."""

    version: int
    equal: bool  # the published digest came out
    trained: bool  # by recorded steps from an older checkpoint; False: from its own alone, or not reached
    behind: int | None  # it follows from this version, whose step could not be taken or came out otherwise
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]


class _Stopped(Exception):
    """A step cannot be taken, or came out otherwise: what follows from it is not reached."""

    def __init__(self, version: int, finding: Finding) -> None:
        super().__init__(finding.detail)
        self.version = version
        self.finding = finding


class TrainingRebuild:
    """`learner` makes one that reads plans from `log`; `published` rebuilds a version from deltas, None where none lead there."""

    def __init__(
        self,
        log: Log,
        past: Past,
        learner: Callable[[Recipe], Learner],
        published: Callable[[int], State | None],
        *,
        deadline_s: float = 30.0,
    ) -> None:
        self._log = log
        self._past = past
        self._make = learner
        self._published = published
        self._deadline_s = deadline_s
        self._learner: Learner | None = None
        self._recipe: Recipe | None = None
        self._held: int | None = None
        self._broken: set[int] = set()
        self._unusable: set[int] = set()
        self._notes: list[str] = []
        self._found: list[Finding] = []
        self._told: set[str] = set()

    @property
    def state(self) -> State | None:
        """The weights of the version that was asked for last; None where it was not reached."""
        return None if self._held is None or self._learner is None else self._learner.published()

    def close(self) -> None:
        self._held = None
        if self._learner is not None:
            self._learner.close()
            self._learner = None

    def versions(self, wanted: Sequence[int]) -> Iterator[ByTraining]:
        """Each of `wanted`, which are published, ascending. Raises `ConfigError` for steps of another trainer, and where the
        log, the store or the key store is away."""
        for version in wanted:
            yield self._version(version)

    def _version(self, version: int) -> ByTraining:
        trained = False
        try:
            way = self._go_on(version) or self._restored(version)
            trained = way.trains
            behind = next((step.version for step in way.steps if step.version in self._broken), None)
            if behind is not None:
                self._held = None
                return self._made(version, behind=behind)
            for step in way.steps:
                self._take(step)
        except _Stopped as stopped:
            self._broken.add(stopped.version)
            self.close()
            behind = None if stopped.version == version else stopped.version
            return self._made(version, findings=[stopped.finding], behind=behind)
        if not trained and version > 0:
            self._notes.append(
                f"version {version} was restored from its own checkpoint: no older one leads to it, so no step of it was "
                "trained again"
            )
        return self._made(version, equal=True, trained=trained)

    def _made(
        self,
        version: int,
        *,
        equal: bool = False,
        trained: bool = False,
        behind: int | None = None,
        findings: Sequence[Finding] = (),
    ) -> ByTraining:
        notes, self._notes = tuple(self._notes), []
        findings, self._found = (*self._found, *findings), []
        return ByTraining(version, equal, trained, behind, findings, notes)

    # -- where to begin ---------------------------------------------------------------------------------------------

    def _go_on(self, version: int) -> Way | None:
        """By one step from what is held."""
        step = self._past.steps.get(version)
        if self._held is None or step is None or version in self._broken:
            return None
        if self._held == version:
            return Way(version, ())
        if self._past.made_from(version) != self._held or self._past.versions[version].reverts_to is not None:
            return None
        return Way(self._held, (step,)) if recipe_of(step.settings) == self._recipe else None

    def _restored(self, version: int) -> Way:
        """From a checkpoint, which the learner holds then."""
        while True:
            way = way_back(self._past, version, self._usable)
            if way is None:
                raise _Stopped(version, self._no_checkpoint(version))
            if any(step.version in self._broken for step in way.steps):
                return way
            try:
                self._restore(way)
            except ObjectMissing as error:
                self._unusable.add(way.start)
                self._notes.append(
                    f"the checkpoint of version {way.start} is not in the store ({error}): an older one is taken"
                )
            except _Stopped as stopped:
                self._unusable.add(way.start)
                self._found.append(stopped.finding)
            else:
                return way

    def _usable(self, version: int) -> bool:
        event = self._past.versions.get(version)
        return event is not None and event.checkpoint is not None and version not in self._unusable

    def _restore(self, way: Way) -> None:
        """Raises `ObjectMissing`, and `_Stopped` where the checkpoint is damaged or not of its version."""
        self.close()
        event = self._past.versions[way.start]
        before = self._past.steps.get(way.start)
        # Right behind the start: it knows where plans were read on from.
        first = way.steps[0] if way.steps else self._past.steps.get(way.start + 1) or before
        if event.checkpoint is None or first is None:
            raise ObjectMissing(f"version {way.start} has none, or no step is known beside it")
        # Whoever took the last of the steps had started at this checkpoint and taken the others again, the same.
        trains = [step for step in way.steps if self._past.versions[step.version].reverts_to is None]
        trained = trains[-1] if trains else self._trained(way.start)
        if trained is None:
            raise ObjectMissing(f"version {way.start} has one, but no step says how it is trained")
        self._recipe = recipe_of(trained.settings)
        self._learner = learner = self._make(self._recipe)
        what = f"the checkpoint of version {way.start}"
        try:
            learner.restore(event.checkpoint)
        except (DeltaCorrupt, StateMismatch) as error:
            raise _Stopped(way.start, _finding(error, what)) from error
        learner.start(
            way.start,
            tuple(one.start for one in sorted(first.consumed, key=lambda one: one.partition)),
            None if before is None else before.plan_digest,
            self._past.reverts.newest_at(way.start),
        )
        self._held = way.start
        self._compare(event, what, before)

    def _trained(self, version: int) -> TrainStep | None:
        """The last step up to a version that trained, or the first one behind it: a revert has no settings of a trainer."""
        trained = [
            step
            for step in self._past.steps.values()
            if step.version not in self._past.versions or self._past.versions[step.version].reverts_to is None
        ]
        before = [step for step in trained if step.version <= version]
        return before[-1] if before else next(iter(trained), None)

    def _no_checkpoint(self, version: int) -> Finding:
        return Finding(
            kind=Kind.OBJECT_MISSING,
            where=f"version {version}",
            detail="no checkpoint that is still in the store leads to it: it cannot be trained again; `--via deltas` needs "
            "none",
        )

    # -- a step -----------------------------------------------------------------------------------------------------

    def _take(self, step: TrainStep) -> None:
        learner = self._learner
        if learner is None:
            raise OffsetLost("nothing is restored")
        ranks = len(step.consumed)
        ends = range_ends(step.consumed, ranks)
        event = self._past.versions.get(step.version)
        try:
            if event is not None and event.reverts_to is not None:
                learner.move(step.version, ends, step.plan_digest, step.version)
            else:
                self._train(learner, step, ends)
        except tuple(kind for kind, _ in _KINDS) as error:
            raise _Stopped(step.version, _finding(error, f"step {step.step}")) from error
        self._held = step.version
        if event is not None:
            self._compare(event, f"step {step.step}", step)

    def _train(self, learner: Learner, step: TrainStep, ends: tuple[int, ...]) -> None:
        self._check_kept(step)
        heads = learner.read(self._deadline_s)
        if heads is None:
            raise OffsetLost(f"the plan of step {step.step} is not in {BATCHES} up to {ends}")
        check_agreement([head.digest for head in heads], step.step)
        found = tuple(head.end for head in heads)
        if found != ends or heads[0].digest != step.plan_digest:
            raise PlanViolation(
                f"it was taken from the plan {step.plan_digest} that ends at {ends}; there is {heads[0].digest} that ends at "
                f"{found}"
            )
        erased = sum(one.erased_sequences for one in learner.compute()) - step.erased_sequences
        if erased > 0:
            raise _Stopped(
                step.version,
                Finding(
                    kind=Kind.ERASED,
                    where=f"step {step.step}",
                    detail=f"it was trained on {erased} sequences of people who were erased since: version {step.version} and "
                    "what follows from it up to the next checkpoint can be rebuilt from deltas, not by training",
                ),
            )
        learner.apply()

    def _check_kept(self, step: TrainStep) -> None:
        """Before a wait for what will never come."""
        partitions = [TopicPartition(one.topic, one.partition) for one in step.consumed]
        begins, ends = self._log.beginning_offsets(partitions), self._log.end_offsets(partitions)
        for one, at in zip(step.consumed, partitions, strict=True):
            if one.start < begins[at] or one.end > ends[at]:
                raise OffsetLost(
                    f"{one.topic}[{one.partition}] from {one.start} to {one.end} is not kept any more: the log has "
                    f"{begins[at]} to {ends[at]}"
                )

    def _compare(self, event: WeightVersion, what: str, step: TrainStep | None) -> None:
        learner = self._learner
        if learner is None:
            raise OffsetLost("nothing is restored")
        state = learner.published()
        changed = (
            "" if step is None or event.reverts_to is not None else differing(step.settings, learner.settings)
        )
        digest = StateDigest.of(state).hex
        if digest == event.state_digest:
            if changed and changed not in self._told:
                self._told.add(changed)
                self._notes.append(f"equal from {what} on though settings differ: {changed}")
            return
        published = self._published(event.version)
        difference = None if published is None else first_difference(published, state)
        tensor = "" if difference is None else f", tensor {difference.tensor}"
        raise _Stopped(
            event.version,
            Finding(
                kind=Kind.DIGEST_DIFFERS,
                where=f"version {event.version}, {what}{tensor}",
                detail=f"{digest} came out, published is {event.state_digest}; "
                + (
                    f"{difference}; "
                    if difference is not None
                    else "its deltas do not lead to it, so no tensor is named; "
                )
                + (f"settings that differ: {changed}" if changed else "the settings are the same"),
            ),
        )


def _finding(error: RollwireError, where: str) -> Finding:
    kind = next((kind for of, kind in _KINDS if isinstance(error, of)), Kind.OUTCOME_DIFFERS)
    return Finding(kind=kind, where=where, detail=str(error))
