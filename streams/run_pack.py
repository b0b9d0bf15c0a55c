"""Drives `pack`: one transactional loop for all ranks."""

from __future__ import annotations

import threading

from rollwire.schemas.errors import ConfigError
from rollwire.streams.pack import PackConfig
from rollwire.streams.pack_step import NAME, PackStep
from rollwire.streams.runtime import Drive, RuntimeConfig, run_step
from rollwire.streams.seams.clock import Clock, SystemClock
from rollwire.streams.seams.log import Log

# A batch may fill the buffer beyond its limit, so it is short; an outage of the broker is waited out for longer, since
# one process packs for all ranks.
RUNTIME = RuntimeConfig(max_records=500, patience_s=120.0)


def run_pack(
    log: Log,
    config: PackConfig,
    *,
    prefix: str,
    model: str,
    lineage: str,
    stop: threading.Event,
    clock: Clock | None = None,
    runtime: RuntimeConfig | None = None,
) -> None:
    """Packs until `stop` is set; returns within one transaction's time.

    Raises what `run_step` raises, `PlanViolation`, and `ConfigError` where a plan does not fit a record or there are
    fewer partitions than ranks.
    """
    run_step(
        log,
        drive(log, config, prefix, model, lineage),
        runtime or RUNTIME,
        stop=stop,
        clock=clock or SystemClock(),
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
