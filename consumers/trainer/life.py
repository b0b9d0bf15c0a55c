"""Sessions of a trainer, one after another, until it is stopped or must not go on. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import structlog

from rollwire.consumers.trainer.pipeline import Run
from rollwire.consumers.trainer.session import Session
from rollwire.schemas.errors import DeadlineExceeded, LogUnavailable, StoreUnavailable, TransactionUnknown
from rollwire.schemas.records import WeightVersion

_log = structlog.get_logger()

RECOVERABLE: Final = (StoreUnavailable, LogUnavailable, TransactionUnknown, DeadlineExceeded)
"""What another session may get over: the steps that are not committed are discarded and taken again."""


def run_sessions(run: Run, wait: Callable[[float], bool]) -> WeightVersion | None:
    """Returns the last version committed. `wait` sleeps between two sessions and says whether to stop.

    Raises what is not recoverable, at once, and what is when `max_restarts` sessions in a row committed nothing.
    """
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
        except RECOVERABLE as failure:
            fruitless = 0 if progressed else fruitless + 1
            if fruitless > run.config.max_restarts:
                raise
            wait_s = min(30.0, 0.5 * 2**fruitless)
            _log.warning("trainer.restarts", error=str(failure), wait_s=wait_s, fruitless=fruitless)
            if wait(wait_s):
                raise
