"""What the log says of a lineage, and where the trainer goes on. Pure but for `read_history`.

After a crash the log alone decides: versions without holes, one `train-steps` event for each, their consumed ranges
without gaps and ending at the committed offsets. Anything else halts; lost offsets never retrain history (law 3).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce
from itertools import pairwise
from typing import NamedTuple

import structlog

from rollwire.schemas.errors import OffsetLost, PlanViolation, Refused
from rollwire.schemas.records import Event, OffsetRange, TrainStep, WeightVersion
from rollwire.streams.emit import decode_record
from rollwire.streams.reverts import NO_REVERTS, Reverts
from rollwire.streams.seams.clock import Clock
from rollwire.streams.seams.log import Log, Record, TopicPartition
from rollwire.streams.seams.scan import scan

_log = structlog.get_logger()

BATCHES = "packed-batches"
STEPS = "train-steps"
VERSIONS = "weight-versions"


class History(NamedTuple):
    """The committed past of one lineage, in order. `versions[v]` is version v; `steps[s - 1]` is step s."""

    versions: tuple[WeightVersion, ...]
    steps: tuple[TrainStep, ...]
    reverts: Reverts = NO_REVERTS

    def version(self, number: int) -> WeightVersion | None:
        """None where it is not there."""
        return next((one for one in self.versions if one.version == number), None)

    def line(self, version: int) -> tuple[TrainStep, ...]:
        """The steps that `version` was made by, in order; a revert is one, behind those of the version it went back to."""
        return tuple(reversed(list(self._back(version))))

    def way_to(self, version: int) -> tuple[WeightVersion, tuple[TrainStep, ...]]:
        """The nearest version with a checkpoint that leads to `version`, and the steps from there on; the same where it has
        one itself. Raises `PlanViolation` where none leads there."""
        steps: list[TrainStep] = []
        at = self.versions[version]
        for step in self._back(version):
            if at.checkpoint is not None:
                break
            steps.append(step)
            at = self.versions[self._made_from(step)]
        if at.checkpoint is None:
            raise PlanViolation(f"lineage {at.lineage} names no checkpoint, not even at version 0")
        return at, tuple(reversed(steps))

    def _back(self, version: int) -> Iterator[TrainStep]:
        while version > 0:
            step = self.steps[version - 1]
            yield step
            version = self._made_from(step)

    def _made_from(self, step: TrainStep) -> int:
        to = self.versions[step.version].reverts_to
        return step.base_version if to is None else to


class Resume(NamedTuple):
    """Restore `checkpoint`, replay `steps` from `offsets`, go on after the last of them. A revert among the steps changes no
    weights: the version and the offsets are then those behind it."""

    checkpoint: WeightVersion
    steps: tuple[TrainStep, ...]
    offsets: tuple[int, ...]  # by rank, at the checkpoint
    last: WeightVersion


def batch_partitions(ranks: int) -> list[TopicPartition]:
    """Rank r reads partition r."""
    return [TopicPartition(BATCHES, rank) for rank in range(ranks)]


def read_history(
    log: Log, model: str, lineage: str, *, deadline_s: float, clock: Clock, running: bool = False
) -> History:
    """Both topics to where they end now. Repeats are dropped by their natural keys (law 4).

    `running`: for an onlooker. A trainer may commit meanwhile: a version whose step was not read yet, or the reverse, is
    left out.
    """
    versions: dict[int, WeightVersion] = {}
    steps: dict[int, TrainStep] = {}
    for event in decoded(scan(log, (VERSIONS, STEPS), patience_s=deadline_s, clock=clock, hidden=True)):
        if not isinstance(event, WeightVersion | TrainStep) or (event.model, event.lineage) != (
            model,
            lineage,
        ):
            continue
        if isinstance(event, WeightVersion):
            versions.setdefault(event.version, event)
        else:
            steps.setdefault(event.step, event)
    if running and (steps or len(versions) < 4):  # versions without any step are no matter of moments
        last = min(max(versions, default=-1), max(steps, default=0))
        versions = {number: event for number, event in versions.items() if number <= last}
        steps = {number: event for number, event in steps.items() if number <= last}
    return order_history(versions.values(), steps.values())


def decoded(records: Iterable[Record]) -> Iterator[Event]:
    """The events of `records`. What does not decode was not written by a trainer and stops none (law 7): it is passed by
    and said; were it a version or a step, it would be missed as a hole."""
    for record in records:
        try:
            yield decode_record(record)
        except Refused as refused:
            _log.warning(
                "history.skipped",
                topic=record.topic,
                partition=record.partition,
                offset=record.offset,
                reason=refused.reason,
                detail=refused.detail,
            )


def order_history(versions: Iterable[WeightVersion], steps: Iterable[TrainStep]) -> History:
    """Raises `PlanViolation` for a hole, `OffsetLost` for consumed ranges that do not join."""
    ordered_versions = tuple(sorted(versions, key=lambda event: event.version))
    ordered_steps = tuple(sorted(steps, key=lambda event: event.step))
    numbers = [event.version for event in ordered_versions]
    if numbers != list(range(len(numbers))):
        raise PlanViolation(f"the lineage's versions have a hole: {_holes(numbers)}")
    if numbers[1:] and not ordered_steps:
        raise PlanViolation(
            f"{len(numbers)} versions and no train-steps: the lineage is published without plans, so no trainer starts from "
            "it or goes back over it; to go back, publish an older version's weights as its next one"
        )
    if [event.step for event in ordered_steps] != numbers[1:]:
        raise PlanViolation(
            f"{len(numbers)} versions, but train-steps {[e.step for e in ordered_steps][-5:]} (last 5)"
        )
    for version, step in zip(ordered_versions[1:], ordered_steps, strict=True):
        if version.version != step.version or version.state_digest != step.state_digest:
            raise PlanViolation(f"version {version.version} and train-step {step.step} name different states")
        to = version.reverts_to
        if to is not None and ordered_versions[to].state_digest != version.state_digest:
            raise PlanViolation(f"version {version.version} reverts to {to} and is another state")
    for before, after in pairwise(ordered_steps):
        check_joined(before.consumed, after.consumed, after.step)
    return History(ordered_versions, ordered_steps, reduce(Reverts.add, ordered_versions, NO_REVERTS))


def check_joined(before: Sequence[OffsetRange], after: Sequence[OffsetRange], step: int) -> None:
    """Step `step` began where the step before it had ended, on every rank."""
    ends = {(r.topic, r.partition): r.end for r in before}
    starts = {(r.topic, r.partition): r.start for r in after}
    if ends != starts:
        raise OffsetLost(
            f"step {step} began at {starts}, the step before it ended at {ends}: records were passed over"
        )


def plan_resume(
    history: History,
    committed: Mapping[TopicPartition, int],
    beginnings: Mapping[TopicPartition, int],
    ranks: int,
) -> Resume:
    """Where to go on. Needs at least version 0.

    Raises `OffsetLost` where the committed offsets are not the end of the last step, or where the batches since the
    newest checkpoint are no longer in the log.
    """
    last = history.versions[-1]
    checkpoint, replayed = history.way_to(last.version)
    partitions = batch_partitions(ranks)
    missing = [p for p in partitions if p not in committed]
    if missing:
        raise OffsetLost(
            f"version {last.version} is committed, but the consumer group has no offset for {missing}"
        )
    offsets = tuple(committed[p] for p in partitions)
    if history.steps:
        ends = range_ends(history.steps[-1].consumed, ranks)
        if ends != offsets:
            raise OffsetLost(
                f"the consumer group stands at {offsets}, step {history.steps[-1].step} ended at {ends}: the group's "
                "offsets were reset or belong to another run; restore them, they are not skipped"
            )
    check_kept(history, checkpoint, replayed, beginnings)
    start = offsets_at(history, checkpoint.version, ranks) if replayed else offsets
    return Resume(checkpoint, replayed, start, last)


def offsets_at(history: History, version: int, ranks: int) -> tuple[int, ...]:
    """By rank, where `packed-batches` was read on after `version`; there is at least one step."""
    if version > 0:
        return range_ends(history.steps[version - 1].consumed, ranks)
    return tuple(_range(history.steps[0].consumed, rank).start for rank in range(ranks))


def check_kept(
    history: History,
    checkpoint: WeightVersion,
    steps: Sequence[TrainStep],
    beginnings: Mapping[TopicPartition, int],
) -> None:
    """The plans of `steps`, which are replayed from `checkpoint`, still stand in the log. Raises `OffsetLost`."""
    for step in steps:
        if history.versions[step.version].reverts_to is not None:
            continue
        for one in step.consumed:
            begins = beginnings.get(TopicPartition(one.topic, one.partition), 0)
            if one.start < begins:
                raise OffsetLost(
                    f"{one.topic}[{one.partition}] begins at {begins}, the checkpoint of version "
                    f"{checkpoint.version} needs it from {one.start}: retention removed steps that must be replayed"
                )


def range_ends(consumed: Sequence[OffsetRange], ranks: int) -> tuple[int, ...]:
    return tuple(_range(consumed, rank).end for rank in range(ranks))


def _range(consumed: Sequence[OffsetRange], rank: int) -> OffsetRange:
    for one in consumed:
        if (one.topic, one.partition) == (BATCHES, rank):
            return one
    raise PlanViolation(f"a train-step names no range of {BATCHES}[{rank}]: was the number of ranks changed?")


def _holes(numbers: Sequence[int]) -> str:
    return (
        ", ".join(str(n) for n in range(max(numbers) + 1) if n not in set(numbers)) or f"repeats in {numbers}"
    )
