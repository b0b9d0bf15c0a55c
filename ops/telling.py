"""A role says its settings in the log before it decides anything by them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import structlog
from pydantic import BaseModel

from rollwire.ops.role_run import Run
from rollwire.schemas.errors import DeadlineExceeded, LogError
from rollwire.schemas.release import code_version
from rollwire.streams.seams.clock import SystemClock
from rollwire.streams.seams.log import Log
from rollwire.streams.settings_notice import tell

_logger = structlog.get_logger("rollwire.settings")


def tell_settings(
    run: Run, log: Log, processor: str, config: Mapping[str, BaseModel | Mapping[str, Any]]
) -> None:
    """`config` by section. A broker that is away is waited for as long as the role itself would wait for it; then the role
    goes on, and what it decides can only be audited with settings that somebody names."""
    clock, runtime = SystemClock(), run.settings.runtime
    deadline = clock.monotonic_s() + runtime.patience_s
    while not run.stop.is_set():
        try:
            tell(
                log,
                processor,
                config,
                model=run.settings.model,
                lineage=run.settings.lineage,
                code=code_version(),
                clock=clock,
            )
            return
        except (LogError, DeadlineExceeded) as error:
            if clock.monotonic_s() > deadline:
                _logger.warning("settings.untold", processor=processor, error=str(error))
                return
        run.stop.wait(runtime.backoff_s)
