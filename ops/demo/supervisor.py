"""Starts the processes of a run, restarts one that dies, ends them all in order."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rollwire.schemas.errors import RollwireError

STOP_S = 11.0  # law 8 gives a process 10 s; what has not ended a moment later is killed
MAX_RESTARTS = 3
PARENT = "ROLLWIRE_PARENT"  # pid of who started a process, which is to end with it
WRONG_USE = 2  # something is set wrong or missing: another start would end the same


class ProcessDied(RollwireError):
    """A process of the run ended again and again."""


@dataclass(slots=True)
class Child:
    role: str
    arguments: tuple[str, ...]
    process: subprocess.Popen[bytes]
    log: Path
    restarts: int = 0
    finished: bool = False


@dataclass(slots=True)
class Supervisor:
    """Owns the processes of one run: `<base> <role> <arguments>` each, with its output in `<logs>/<role>.log`.

    A role of `ending` is finished when it exits with 0; any other is to run until it is stopped, and is started again.
    """

    logs: Path
    base: tuple[str, ...]
    ending: frozenset[str]
    stop_s: float = STOP_S
    children: dict[str, Child] = field(default_factory=dict)

    def start(self, role: str, *arguments: str) -> None:
        self.logs.mkdir(parents=True, exist_ok=True)
        log = self.logs / f"{role}.log"
        self.children[role] = Child(role, arguments, self._spawn(role, arguments, log), log)

    def _spawn(self, role: str, arguments: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
        with log.open("ab") as out:
            return subprocess.Popen(
                [*self.base, role, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=child_environment(os.environ),
                start_new_session=True,  # Ctrl-C reaches the demo alone, which ends them in order
            )

    def tend(self) -> list[str]:
        """Looks after the children once: those that died are started again. Returns what happened, in words.

        Raises `ProcessDied` with the end of its log when one has used up its restarts.
        """
        happened: list[str] = []
        for child in self.children.values():
            code = child.process.poll()
            if code is None or child.finished:
                continue
            if code == 0 and child.role in self.ending:
                child.finished = True
                continue
            if child.restarts >= MAX_RESTARTS or code == WRONG_USE:
                raise ProcessDied(
                    f"{child.role} ended {child.restarts + 1} times, last with {describe_exit(code)}; "
                    f"the end of {child.log}:\n{tail(child.log)}"
                )
            child.restarts += 1
            child.process = self._spawn(child.role, child.arguments, child.log)
            happened.append(f"{child.role} ended with {describe_exit(code)} and was started again")
        return happened

    def finished(self, role: str) -> bool:
        return self.children[role].finished

    def stop(self, roles: Sequence[str] | None = None) -> list[str]:
        """SIGTERM to `roles` (all, if not given), at the same time; SIGKILL at the deadline. Returns who had to be killed."""
        chosen = [self.children[r] for r in (roles or list(self.children)) if r in self.children]
        for child in chosen:
            if child.process.poll() is None:
                child.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + self.stop_s
        killed: list[str] = []
        for child in chosen:
            try:
                child.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                os.killpg(child.process.pid, signal.SIGKILL)
                child.process.wait()
                killed.append(child.role)
            child.finished = True
        return killed


def child_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """One arithmetic thread a process: two spin against each other on small machines, and their number changes bits."""
    threads = dict.fromkeys(
        ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS"), "1"
    )
    return {
        **environment,
        **threads,
        PARENT: str(os.getpid()),
        "PYTHONSAFEPATH": "1",
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def rollwire_command() -> tuple[str, ...]:
    """How to start ourselves: by the interpreter that runs us, without the current folder on its path."""
    return (sys.executable, "-P", "-c", "from rollwire.ops.cli import main; main()")


def describe_exit(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def tail(path: Path, lines: int = 15) -> str:
    try:
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
    except FileNotFoundError:
        return "(no log)"
