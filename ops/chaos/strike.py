"""Carries out one fault: on a process of the run, or on the broker."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, NamedTuple

from rollwire.ops.chaos.faults import BROKER, Fault
from rollwire.ops.chaos.processes import Processes, Stop
from rollwire.ops.stack import StackInfo, kill_service, read_stack, up
from rollwire.ops.stack.processes import Spawned, end, is_alive
from rollwire.schemas.errors import StackError

_TICK_S: Final = 0.02
_BROKER_STOP_S: Final = 30.0  # a broker writes its state before it ends; that is not ours to bound
_BROKER_UP_S: Final = 120.0


class Hit(NamedTuple):
    """A fault that was carried out."""

    fault: Fault
    began_s: float  # since the load began
    seconds: float  # kill -9: until it was started again; SIGTERM: until it had ended; SIGSTOP: how long it stood still
    note: str
    late: bool = False  # it did not end within law 8's 10 s


class Striker:
    """`tend` is called all the while that a fault lasts: whatever else dies meanwhile is started again at once."""

    def __init__(
        self, stack: StackInfo, processes: Processes, tend: Callable[[], None], pause_s: float
    ) -> None:
        self._stack = stack
        self._processes = processes
        self._tend = tend
        self._pause_s = pause_s
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="chaos-broker")

    def strike(self, fault: Fault, began_s: float) -> Hit:
        """Returns when the fault is over: what was hit runs again."""
        start = time.monotonic()
        note, late = self._broker(fault) if fault.whom == BROKER else self._process(fault)
        seconds = time.monotonic() - start
        if isinstance(note, Stop):
            seconds, note = note.seconds, note.how
        return Hit(fault, began_s, seconds, note, late)

    def close(self) -> None:
        """Ends no process; a broker that is being started is waited for."""
        self._pool.shutdown(wait=True)

    def _process(self, fault: Fault) -> tuple[str | Stop, bool]:
        match fault.how:
            case "kill -9":
                self._processes.kill(fault.whom)
                return "started again", False
            case "SIGTERM":
                stop = self._processes.terminate(fault.whom, self._tend)
                return stop, stop.late
            case "SIGSTOP":
                self._processes.pause(fault.whom)
                try:
                    self._wait(self._pause_s)
                finally:
                    self._processes.resume(fault.whom)
                return "continued", False

    def _broker(self, fault: Fault) -> tuple[str | Stop, bool]:
        known = read_stack(self._stack.dir).services["kafka"]
        match fault.how:
            case "kill -9":
                kill_service(self._stack, "kafka")
            case "SIGTERM":
                self._until(self._pool.submit(end, [Spawned(known.pid, known.started)], _BROKER_STOP_S))
            case "SIGSTOP":
                if not is_alive(known.pid, known.started):
                    raise StackError("the broker is not there: who ended it?")
                os.kill(known.pid, signal.SIGSTOP)
                try:
                    self._wait(self._pause_s)
                finally:
                    os.kill(known.pid, signal.SIGCONT)
                return "continued", False
        self._until(self._pool.submit(up, self._stack.config))
        return "answers again", False

    def _wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        pause = threading.Event()
        while time.monotonic() < deadline:
            self._tend()
            pause.wait(_TICK_S)

    def _until(self, work: Future[object]) -> None:
        deadline = time.monotonic() + _BROKER_UP_S
        pause = threading.Event()
        while not work.done():
            if time.monotonic() > deadline:
                raise StackError(f"the broker was not back after {_BROKER_UP_S:.0f} s")
            self._tend()
            pause.wait(_TICK_S)
        work.result()
