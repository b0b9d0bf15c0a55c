"""A Faust worker that ends within 10 s of being told to, whatever it waits for (law 8).

Faust waits for its tasks, and the interpreter for their threads: one that asks a broker that stands still may take a minute. What was not
committed is read again by whoever comes next, so cutting it off is safe at any moment.
"""

from __future__ import annotations

import faulthandler
import sys
from signal import Signals
from typing import Final

import faust
from mode import Worker

STOP_S: Final = 9.0  # of the 10 s: the rest is the interpreter's


class BoundedStop(Worker):
    """Exits with 1 where it has not ended `stop_s` after its first signal; the stacks of what did not end go to standard error."""

    stop_s: float = STOP_S

    def _schedule_shutdown(self, signal: Signals) -> None:
        if not self._signal_stop_time:
            faulthandler.dump_traceback_later(self.stop_s, exit=True, file=sys.stderr)
        super()._schedule_shutdown(signal)


class BoundedWorker(BoundedStop, faust.Worker):
    """`faust.Worker`, its stop bounded."""


def run_to_its_end(app: faust.App, loglevel: str) -> None:
    """Runs an app as this process's worker until it is told to stop. For the main thread, whose signal handlers it sets.

    Raises `SystemExit` where it ended by a fault.
    """
    worker = BoundedWorker(app, loglevel=loglevel, redirect_stdouts=False, quiet=True)
    worker.spinner = None  # it writes control characters even where nobody looks
    try:
        worker.execute_from_commandline()
    except SystemExit as ended:
        if ended.code not in (0, None):
            raise
