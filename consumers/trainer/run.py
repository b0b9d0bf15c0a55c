"""The trainer of the built-in policy, on torch, as a service."""

from __future__ import annotations

import threading

from rollwire.consumers.trainer.config import TrainerConfig
from rollwire.consumers.trainer.life import run_sessions
from rollwire.consumers.trainer.pipeline import Run
from rollwire.consumers.trainer.ranks import Connect, RankGroup
from rollwire.consumers.weights.publisher import PublisherConfig
from rollwire.kernels.policy.config import PolicyConfig, hf_config
from rollwire.kernels.tensors import State
from rollwire.schemas.records import WeightVersion
from rollwire.streams.seams.clock import Clock, SystemClock
from rollwire.streams.seams.log import Log
from rollwire.streams.seams.sealing import OpenKeys
from rollwire.streams.seams.store import ObjectStore
from rollwire.streams.seams.work import Threads


def run_trainer(
    log: Log,
    store: ObjectStore,
    policy_config: PolicyConfig,
    config: TrainerConfig,
    *,
    prefix: str,
    model: str,
    lineage: str,
    initial: State | None,
    stop: threading.Event,
    until_step: int | None = None,
    clock: Clock | None = None,
    publisher_config: PublisherConfig | None = None,
    connect: Connect | None = None,
    keys: OpenKeys | None = None,
) -> WeightVersion | None:
    """Trains `lineage`: one plan, one optimiser step, one version, one transaction. Returns the last version committed.

    A lineage without versions begins with `initial` as version 0. `until_step` ends it after that step is committed;
    `stop` ends it after the running step, within `shutdown_s`. `connect` opens the log and the store of the other
    ranks' processes, for `ranks` > 1. `keys` opens the key store, in each rank's process, when a plan holds sealed tokens.

    When a version cannot be published (store or broker away beyond their deadlines), the steps that are not committed
    are discarded and the trainer starts again from its checkpoint, at most `max_restarts` times in a row without
    progress. Raises then what stopped it, and at once: `Fenced` (another trainer took over), `PlanViolation`,
    `OffsetLost`, `ReplayDiverged`, `MismatchDrift` (paused, the step that raised the alarm being committed), `RankLost`, `ConfigError`, `StateMismatch`,
    `KeyMissing`, `Erased` (a step that must be replayed holds what was erased since).
    """
    clock = clock or SystemClock()
    return run_sessions(
        Run(
            log=log,
            store=store,
            learner=lambda: RankGroup(
                log,
                store,
                policy_config,
                config,
                model=model,
                lineage=lineage,
                clock=clock,
                connect=connect,
                initial=initial,
                keys=keys,
            ),
            config=config,
            publisher_config=publisher_config,
            hf_config=hf_config(policy_config),
            prefix=prefix,
            model=model,
            lineage=lineage,
            until_step=until_step,
            stopped=stop.is_set,
            clock=clock,
            work=Threads(),
        ),
        stop.wait,
    )
