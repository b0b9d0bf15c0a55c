"""The monitor: a Faust app that folds a run's events into one page, in Redis and on a web port.

`faust -A rollwire.streams.monitor worker` takes its settings from `ROLLWIRE_BOOTSTRAP`, `ROLLWIRE_PREFIX`,
`ROLLWIRE_REDIS_URL` and `ROLLWIRE_MONITOR_PORT`; `run_monitor` is the same worker inside this process.
"""

from __future__ import annotations

from typing import Any

from rollwire.streams.monitor.worker import run_monitor as run_monitor


def __getattr__(name: str) -> Any:
    # Made when asked for: importing the page's record must neither need a broker nor import faust.
    if name == "app":
        from rollwire.streams.monitor.worker import app_from_environment

        return app_from_environment()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
