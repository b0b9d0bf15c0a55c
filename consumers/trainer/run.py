"""The trainer as a service: sessions, one after another, until it is stopped or must not go on."""

from __future__ import annotations

import threading

import structlog

from rollwire.consumers.trainer.config import TrainerConfig
from rollwire.consumers.trainer.ranks import Connect
from rollwire.consumers.trainer.session import Run, Session
from rollwire.consumers.weights.publisher import PublisherConfig
from rollwire.kernels.policy.config import PolicyConfig
from rollwire.kernels.tensors import State
from rollwire.schemas.errors import DeadlineExceeded, LogUnavailable, StoreUnavailable, TransactionUnknown
from rollwire.schemas.records import WeightVersion
from rollwire.streams.seams.clock import Clock, SystemClock
from rollwire.streams.seams.log import Log
from rollwire.streams.seams.store import ObjectStore

_log = structlog.get_logger()


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
) -> WeightVersion | None:
    """Trains `lineage`: one plan, one optimiser step, one version, one transaction. Returns the last version committed.

    A lineage without versions begins with `initial` as version 0. `until_step` ends it after that step is committed;
    `stop` ends it after the running step, within `shutdown_s`. `connect` opens the log and the store of the other
    ranks' processes, for `ranks` > 1.

    When a version cannot be published (store or broker away beyond their deadlines), the steps that are not committed
    are discarded and the trainer starts again from its checkpoint, at most `max_restarts` times in a row without
    progress. Raises then what stopped it, and at once: `Fenced` (another trainer took over), `PlanViolation`,
    `OffsetLost`, `ReplayDiverged`, `MismatchDrift` (paused, the step that raised the alarm being committed), `RankLost`, `ConfigError`, `StateMismatch`.
    """
    run = Run(
        log=log,
        store=store,
        policy_config=policy_config,
        config=config,
        publisher_config=publisher_config,
        prefix=prefix,
        model=model,
        lineage=lineage,
        initial=initial,
        stop=stop,
        until_step=until_step,
        clock=clock or SystemClock(),
        connect=connect,
    )
    fruitless = 0
    while True:
        progressed = False
        try:
            session = Session(run)
            try:
                return session.run()
            finally:
                progressed = session.progressed
                session.close()
        except (StoreUnavailable, LogUnavailable, TransactionUnknown, DeadlineExceeded) as failure:
            fruitless = 0 if progressed else fruitless + 1
            if fruitless > config.max_restarts:
                raise
            wait_s = min(30.0, 0.5 * 2**fruitless)
            _log.warning("trainer.restarts", error=str(failure), wait_s=wait_s, fruitless=fruitless)
            if stop.wait(wait_s):
                raise
