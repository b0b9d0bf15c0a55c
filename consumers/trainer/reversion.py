"""What a revert is, as events: decisions without I/O. `rollwire.consumers.weights.revert` makes it.

The lineage goes on: a revert of version n to version v is version n + 1 with the weights of v, and step n + 1, which
trained on nothing. What had been planned for n + 1 and later steps is passed over: the step's consumed ranges name what
stood in the log by then, and every reader of plans passes by those that were written without knowing of the revert.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import blake3

from rollwire.consumers.trainer.history import BATCHES, History, check_kept, range_ends
from rollwire.schemas.errors import OffsetLost, WeightError
from rollwire.schemas.records import Mismatch, Notice, OffsetRange, TrainStep, WeightVersion
from rollwire.streams.seams.log import TopicPartition

NAME = "revert"


class Reversion(NamedTuple):
    newest: WeightVersion
    target: WeightVersion
    consumed: tuple[OffsetRange, ...]  # by rank: planned, not trained, passed over

    @property
    def version(self) -> int:
        """That is made, as the step of the same number."""
        return self.newest.version + 1

    @property
    def before(self) -> dict[TopicPartition, int]:
        return {TopicPartition(one.topic, one.partition): one.start for one in self.consumed}

    @property
    def after(self) -> dict[TopicPartition, int]:
        return {TopicPartition(one.topic, one.partition): one.end for one in self.consumed}

    @property
    def next_offsets(self) -> tuple[int, ...]:
        """By rank, where the next plan is read from."""
        return tuple(one.end for one in self.consumed)


def plan_reversion(
    history: History,
    to: int,
    *,
    committed: Mapping[TopicPartition, int],
    beginnings: Mapping[TopicPartition, int],
    ends: Mapping[TopicPartition, int],
) -> Reversion:
    """`committed`: of the trainer's consumer group; `beginnings` and `ends`: of `packed-batches`; all by partition.

    Raises `WeightError` for a version that cannot be gone back to, with those that can; `OffsetLost` where the consumer
    group does not stand at the end of the last step.
    """
    check_restorable(history, to, beginnings)
    newest = history.versions[-1]
    partitions = trained_partitions(history)
    stands = tuple(committed.get(p, -1) for p in partitions)
    trained = range_ends(history.steps[-1].consumed, len(partitions))
    if stands != trained:
        raise OffsetLost(
            f"the consumer group stands at {stands}, step {history.steps[-1].step} ended at {trained}: its offsets were "
            "reset or belong to another run"
        )
    consumed = tuple(
        OffsetRange(topic=p.topic, partition=p.partition, start=start, end=max(start, ends[p]))
        for p, start in zip(partitions, trained, strict=True)
    )
    return Reversion(newest, history.versions[to], consumed)


def trained_partitions(history: History) -> list[TopicPartition]:
    """Of `packed-batches`, one a rank, as the last step consumed them; none where no step was taken."""
    if not history.steps:
        return []
    return [TopicPartition(BATCHES, rank) for rank in range(len(history.steps[-1].consumed))]


def check_restorable(history: History, to: int, beginnings: Mapping[TopicPartition, int]) -> None:
    """`to` is an older version, and a trainer that starts after the revert comes to its state: by its checkpoint, or by the
    nearest one that leads there and the plans from it on. In a lineage without checkpoints the trainer keeps its state
    itself. Raises `WeightError`."""
    if not history.versions:
        raise WeightError("the lineage has no version")
    newest = history.versions[-1].version
    if to == newest:
        raise WeightError(f"version {to} is the newest: there is nothing to go back from")
    if not 0 <= to < newest:
        raise WeightError(f"version {to} is not known; known are 0 to {newest}")
    if all(version.checkpoint is None for version in history.versions):
        return
    checkpoint, steps = history.way_to(to)
    try:
        check_kept(history, checkpoint, steps, beginnings)
    except OffsetLost as lost:
        kept = ", ".join(str(v.version) for v in history.versions[:-1] if v.checkpoint is not None)
        raise WeightError(
            f"version {to} has no checkpoint, and no trainer can be brought there: {lost}. Versions with a checkpoint of "
            f"their own: {kept}"
        ) from lost


def revert_step(made: Reversion, *, by: str, why: str, duration_ms: float) -> TrainStep:
    """The event of a revert's step: it trained on nothing and measured nothing. Digest and time are filled in when its
    version stands in the store."""
    target, nothing = made.target, math.nan
    return TrainStep(
        model=target.model,
        lineage=target.lineage,
        step=made.version,
        base_version=made.newest.version,
        version=made.version,
        loss=nothing,
        grad_norm=nothing,
        entropy=nothing,
        learning_rate=0.0,
        reward_mean=0.0,
        sequences=0,
        tokens=0,
        trained_tokens=0,
        groups=0,
        max_lag=0,
        lag_histogram=(),
        mismatch=Mismatch(
            tokens=0, mean=nothing, p50=nothing, p99=nothing, max=nothing, k1=nothing, k3=nothing
        ),
        mismatch_same_version=None,
        mismatch_no_replay=None,
        routes_differing=None,
        ratio_truncated=0.0,
        tokens_per_s=0.0,
        duration_ms=duration_ms,
        consumed=made.consumed,
        plan_digest=blake3.blake3(
            f"{NAME}/{target.lineage}/{made.version}/{target.version}".encode()
        ).hexdigest(),
        state_digest="",
        settings={"revert_to": str(target.version), "by": by, "why": why},
        finished_us=0,
    )


def revert_notice(made: Reversion, *, by: str, why: str, at_us: int) -> Notice:
    newest, target = made.newest.version, made.target.version
    said = f": {why}" if why else ""
    return Notice(
        model=made.target.model,
        name=NAME,
        severity="info",
        text=f"version {made.version} reverts to {target}, by {by}{said}; versions {target + 1} to {newest} are abandoned",
        attributes={
            "lineage": made.target.lineage,
            "version": str(made.version),
            "to": str(target),
            "by": by,
            "why": why,
        },
        at_us=at_us,
    )
