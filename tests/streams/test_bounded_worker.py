"""A Faust worker ends in time when it is told to, whatever it waits for."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from typing import Final

import faust

from rollwire.streams.monitor.bounded import STOP_S, BoundedStop, BoundedWorker

_HANGS: Final = """
import asyncio, time
from mode import Service
from rollwire.streams.monitor.bounded import BoundedStop

class Hangs(Service):
    async def on_start(self) -> None:
        self.asked = asyncio.get_running_loop().run_in_executor(None, time.sleep, 600)
        print("ready", flush=True)

    async def on_stop(self) -> None:
        await self.asked

class Bounded(BoundedStop):
    stop_s = 0.5

Bounded(Hangs(), loglevel="ERROR", redirect_stdouts=False, quiet=True).execute_from_commandline()
"""


def test_a_worker_that_waits_for_what_does_not_answer_is_cut_off() -> None:
    with subprocess.Popen(
        [sys.executable, "-P", "-c", _HANGS], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            began = time.monotonic()
            process.send_signal(signal.SIGTERM)
            _, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 1
    assert "Timeout" in errors
    assert time.monotonic() - began < 60


def test_the_workers_of_this_release_have_that_bound_within_ten_seconds() -> None:
    assert issubclass(BoundedWorker, BoundedStop)
    assert BoundedWorker.__mro__.index(BoundedStop) < BoundedWorker.__mro__.index(faust.Worker)
    assert BoundedWorker.stop_s == STOP_S < 10
