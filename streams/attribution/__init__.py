"""Attribution: a Faust app that joins feedback to live answers and gives each answer one reward when its window closes.

`faust -A rollwire.streams.attribution worker` takes its settings from `ROLLWIRE_BOOTSTRAP`, `ROLLWIRE_PREFIX`,
`ROLLWIRE_RULES`, `ROLLWIRE_MODEL`, `ROLLWIRE_ATTRIBUTION_HOST`, `ROLLWIRE_ATTRIBUTION_PORT`, `ROLLWIRE_CLOCK_SKEW_S` and
`ROLLWIRE_REPLICATION`; `run_attribution` is the same worker inside this process.
"""

from __future__ import annotations

from typing import Any

from rollwire.streams.attribution.worker import run_attribution as run_attribution


def __getattr__(name: str) -> Any:
    # Made when asked for: importing the pure parts must neither need a broker nor import faust.
    if name == "app":
        from rollwire.streams.attribution.worker import app_from_environment

        return app_from_environment()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
