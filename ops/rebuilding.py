"""What a rebuild by training is wired from: the past of a run, the learner that its steps say, the keys of people."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rollwire.consumers.audit.plans_log import DerivedPlansLog
from rollwire.consumers.audit.rebuild_past import Past, read_past
from rollwire.consumers.audit.rebuild_recipe import Recipe
from rollwire.consumers.trainer.connect import LiveKeys, LiveStack
from rollwire.consumers.trainer.learner import Learner
from rollwire.ops.broker import run_bucket
from rollwire.ops.history import History
from rollwire.ops.stack import read_stack
from rollwire.ops.stack.master_key import master_key_file
from rollwire.schemas.errors import ConfigError, EnvironmentMissing, OffsetLost
from rollwire.schemas.records import PackedBatch
from rollwire.streams.archive.log import ArchivedLog
from rollwire.streams.replay.plans import rederived_plans
from rollwire.streams.replay.settings import Spoken
from rollwire.streams.seams.clock import SystemClock
from rollwire.streams.seams.log import Log
from rollwire.streams.seams.sealing import OpenKeys
from rollwire.streams.seams.store import ObjectStore


@dataclass(frozen=True)
class PastStack:
    """Calling it opens, in a rank's process, the log and the archive of a run as one. `lineage`: plans that neither has any
    more are derived anew for it; None = all are there."""

    live: LiveStack
    name: str
    lineage: str | None

    def __call__(self) -> tuple[Log, ObjectStore]:
        """Raises `OffsetLost` where the lineage is not there any more."""
        live, store = self.live()
        log: Log = ArchivedLog(live, store, self.name)
        if self.lineage is not None:
            past = read_past(log, self.lineage).past
            if past is None:
                raise OffsetLost(f"lineage {self.lineage} has no version in the log")
            log = deriving(log, past)
        return log, store


def deriving(log: Log, past: Past, spoken: Spoken | None = None) -> DerivedPlansLog:
    """The log, with the plans that it has no more derived anew from rollouts, rewards and fates. `spoken`: settings of the
    processors that come before those that the log says."""

    def derive(first: int, last: int) -> Iterator[tuple[PackedBatch, ...]]:
        try:
            yield from rederived_plans(
                log, lineage=past.lineage, first_step=first, last_step=last, spoken=spoken
            )
        except ConfigError as error:  # of a run from before settings stood in the log
            raise OffsetLost(
                f"the plans of steps {first} to {last} cannot be derived anew: {error}"
            ) from error

    return DerivedPlansLog(log, past, derive)


def past_stack(past: History, folder: Path, bucket: str | None, lineage: str | None) -> PastStack:
    """`lineage` as in `PastStack`."""
    stack = read_stack(folder)
    live = LiveStack(
        past.at.bootstrap,
        past.at.prefix,
        stack.s3_endpoint,
        bucket or run_bucket(folder, past.at.prefix) or stack.bucket,
        stack.access_key,
        stack.secret_key,
        stack.region,
        past.at.registry,
    )
    return PastStack(live, past.name, lineage)


def past_keys(folder: Path) -> LiveKeys:
    stack = read_stack(folder)
    return LiveKeys(
        master_key_file(stack.dir),
        stack.s3_endpoint,
        stack.bucket,
        stack.access_key,
        stack.secret_key,
        stack.region,
    )


def learner_of(
    recipe: Recipe,
    log: Log,
    store: ObjectStore,
    past: Past,
    *,
    connect: PastStack | None,
    keys: OpenKeys | None,
) -> Learner:
    """The learner that took a step, made anew. Raises `EnvironmentMissing` where it is the policy and torch is not here."""
    if recipe.policy is None:
        from rollwire.consumers.trainer.arithmetic import ArithmeticLearner

        return ArithmeticLearner(
            log,
            store,
            recipe.config,
            model=past.model,
            lineage=past.lineage,
            clock=SystemClock(),
            keys=keys,
        )
    # Read when torch is loaded; the number of threads is among what the bits depend on.
    os.environ.setdefault("OMP_NUM_THREADS", str(recipe.config.threads))
    try:
        from rollwire.consumers.trainer.ranks import RankGroup
    except ImportError as error:
        raise EnvironmentMissing(
            f"training again needs torch ({error}): install `rollwire[train]`, or use `--via deltas`"
        ) from error
    return RankGroup(
        log,
        store,
        recipe.policy,
        recipe.config,
        model=past.model,
        lineage=past.lineage,
        clock=SystemClock(),
        connect=connect,
        keys=keys,
    )
