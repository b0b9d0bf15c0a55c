"""The processes under fire: each is started again at once when it died, whoever killed it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from rollwire.ops.demo.supervisor import WRONG_USE, ProcessDied, child_environment, describe_exit, tail

STOP_S: Final = 10.0  # law 8
MAX_DEATHS: Final = (
    12  # of one process, by itself: then something is broken, and another start would end the same
)
_KILL_S: Final = 10.0  # for a killed process to be gone
_TICK_S: Final = 0.02


class Death(NamedTuple):
    """A process ended without having been told to."""

    name: str
    how: str
    log_end: str


class Stop(NamedTuple):
    """A process was told to stop. `late`: it had to be killed at the deadline."""

    name: str
    seconds: float
    how: str
    late: bool


@dataclass(slots=True)
class _Child:
    command: tuple[str, ...]
    log: Path
    process: subprocess.Popen[bytes]
    deaths: int = 0
    ending: bool = False  # it was told to


@dataclass(slots=True)
class Processes:
    """Owns processes by name. Not thread-safe: whoever waits for anything calls `tend` meanwhile."""

    logs: Path
    stop_s: float = STOP_S
    _children: dict[str, _Child] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._children)

    def start(self, name: str, command: Sequence[str]) -> None:
        self.logs.mkdir(parents=True, exist_ok=True)
        log = self.logs / f"{name}.log"
        self._children[name] = _Child(tuple(command), log, _spawn(command, log))

    def tend(self) -> list[Death]:
        """Starts what died again. Raises `ProcessDied` for one that does nothing else, or was used wrongly."""
        deaths: list[Death] = []
        for name, child in self._children.items():
            code = child.process.poll()
            if code is None or child.ending:
                continue
            child.deaths += 1
            how = describe_exit(code)
            if code == WRONG_USE or child.deaths > MAX_DEATHS:
                raise ProcessDied(
                    f"{name} ended by itself {child.deaths} times, last with {how}; the end of {child.log}:\n{tail(child.log)}"
                )
            deaths.append(Death(name, how, tail(child.log, 1)))
            self._start_again(child)
        return deaths

    def kill(self, name: str) -> None:
        """kill -9, and a new one."""
        child = self._children[name]
        self._signal(child, signal.SIGKILL)
        child.process.wait(_KILL_S)
        self._start_again(child)

    def terminate(self, name: str, meanwhile: Callable[[], None]) -> Stop:
        """SIGTERM, and a new one when it has ended; SIGKILL where it does not. `meanwhile` is called again and again."""
        child = self._children[name]
        began = time.monotonic()
        child.ending = True
        self._signal(child, signal.SIGTERM)
        pause = threading.Event()
        while child.process.poll() is None and time.monotonic() - began <= self.stop_s:
            meanwhile()
            pause.wait(_TICK_S)
        seconds = time.monotonic() - began
        code = child.process.poll()
        late = code is None
        if code is None:
            self._signal(child, signal.SIGKILL)
            code = child.process.wait(_KILL_S)
        self._start_again(child)
        return Stop(name, seconds, describe_exit(code), late)

    def pause(self, name: str) -> None:
        self._signal(self._children[name], signal.SIGSTOP)

    def resume(self, name: str) -> None:
        self._signal(self._children[name], signal.SIGCONT)

    def stop(self) -> list[Stop]:
        """SIGTERM to all at the same time, SIGKILL to those left after `stop_s`. Nothing is started again."""
        children, self._children = self._children, {}
        began = time.monotonic()
        for child in children.values():
            self._signal(child, signal.SIGCONT)
            self._signal(child, signal.SIGTERM)
        left, stops = dict(children), []
        pause = threading.Event()
        while left:
            for name, child in list(left.items()):
                code, seconds = child.process.poll(), time.monotonic() - began
                late = code is None and seconds > self.stop_s
                if late:
                    self._signal(child, signal.SIGKILL)
                    code = child.process.wait(_KILL_S)
                if code is not None:
                    stops.append(Stop(name, seconds, describe_exit(code), late))
                    del left[name]
            pause.wait(_TICK_S)
        return stops

    def _start_again(self, child: _Child) -> None:
        child.process, child.ending = _spawn(child.command, child.log), False

    @staticmethod
    def _signal(child: _Child, number: signal.Signals) -> None:
        """To the whole session of the process: whatever it started is hit with it."""
        if child.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.process.pid, number)


def _spawn(command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as out:
        return subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=child_environment(os.environ),
            start_new_session=True,  # Ctrl-C reaches the run alone, which ends them in order
        )
