"""Drives `pack`: one transactional loop for all ranks, in one of the processes that were started; the others stand by.

Who packs is who is assigned the one partition of `weight-versions` in the group `<prefix>pack`: when that process stops
or is missed by the broker, the next one gets it and takes over.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Final

from rollwire.kernels.packing import plan_microbatches
from rollwire.schemas.errors import ConfigError
from rollwire.streams.pack import PackConfig
from rollwire.streams.pack_step import NAME, VERSIONS, PackStep
from rollwire.streams.runtime import Drive, RuntimeConfig
from rollwire.streams.seams.clock import Clock, SystemClock
from rollwire.streams.seams.log import Log, SharedLog, TopicPartition
from rollwire.streams.workers import run_shared

# A batch may fill the buffer beyond its limit, so it is short; an outage of the broker is waited out for longer, since
# one process packs for all ranks.
_MAX_RECORDS: Final = 500
_PATIENCE_S: Final = 120.0


def run_pack(
    log: SharedLog,
    config: PackConfig,
    *,
    prefix: str,
    model: str,
    lineage: str,
    stop: threading.Event,
    clock: Clock | None = None,
    runtime: RuntimeConfig | None = None,
) -> None:
    """Packs, or stands by, until `stop` is set; returns within one transaction's time.

    Raises what `run_step` raises, `PlanViolation`, and `ConfigError` where a plan does not fit a record or there are
    fewer partitions than ranks.
    """
    # A standby that has to compile its kernels first would not take over in time.
    warm_up(config)
    runtime = runtime or RuntimeConfig()
    runtime = runtime.model_copy(
        update={
            "max_records": min(runtime.max_records, _MAX_RECORDS),
            "patience_s": max(runtime.patience_s, _PATIENCE_S),
        }
    )
    packing = drive(log, config, prefix, model, lineage)

    def plan(held: frozenset[TopicPartition]) -> Mapping[str, Drive]:
        return {packing.transactional_id: packing} if VERSIONS in held else {}

    run_shared(
        log,
        packing.group,
        [VERSIONS.topic],
        plan,
        runtime,
        stop=stop,
        clock=clock or SystemClock(),
    )


def warm_up(config: PackConfig) -> None:
    """Plans a step of nothing, so that the kernels are compiled."""
    budget = config.token_budget // config.context_parallel
    lengths_B = [min(budget, 1 + i % 7) for i in range(8 * config.ranks)]
    plan_microbatches(
        lengths_B,
        [float(length) for length in lengths_B],
        config.ranks,
        budget,
        objective=config.objective,
        context_parallel=config.context_parallel,
    )


def drive(log: Log, config: PackConfig, prefix: str, model: str, lineage: str) -> Drive:
    """What drives `pack`: its ids on the broker and its state machine."""

    def make() -> PackStep:
        ranks = log.partitions("packed-batches")
        if ranks < config.ranks:
            raise ConfigError(
                f"packed-batches has {ranks} partitions, one for each of {config.ranks} ranks is needed: lower "
                "`ranks` or add partitions"
            )
        return PackStep(
            config,
            model=model,
            lineage=lineage,
            groups=log.partitions("groups"),
            fates=log.partitions("group-fates"),
        )

    return Drive(f"{prefix}{NAME}", f"{prefix}{NAME}", make)
