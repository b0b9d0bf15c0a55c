"""Processes that outlive the command which started them, told apart from strangers by pid *and* start time."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from rollwire.schemas.errors import EnvironmentMissing, StackError

_POLL_S = 0.02


class Spawned(NamedTuple):
    pid: int
    started: str


def spawn(command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> Spawned:
    """Starts `command` in its own session, with its output appended to `log`.

    Its own session: a terminal's Ctrl-C or hang-up does not reach it. Raises `EnvironmentMissing` where the program is not there.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, str(log), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600),
        (os.POSIX_SPAWN_DUP2, 1, 2),
    ]
    try:
        pid = os.posix_spawn(
            command[0],
            list(command),
            dict(os.environ if environment is None else environment),
            file_actions=actions,
            setsid=True,
            setsigmask=[],
            setsigdef=[signal.SIGINT, signal.SIGTERM, signal.SIGPIPE],
        )
    except FileNotFoundError:
        raise EnvironmentMissing(f"{command[0]} is not there") from None
    except PermissionError:
        raise EnvironmentMissing(f"{command[0]} may not be run") from None
    started = start_time(pid)
    if started is None:
        raise StackError(f"{command[0]} ended at once; its output is in {log}")
    return Spawned(pid, started)


def start_time(pid: int) -> str | None:
    """When process `pid` started, as an opaque text that no later process of the same pid shares; None if there is none.

    A process that ended but was not yet waited for counts as gone.
    """
    _reap(pid)
    if sys.platform == "linux":
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return None
        fields = stat.rpartition(")")[2].split()  # the name before it may hold spaces and brackets
        # The first thread of a killed JVM is a zombie while the others still hold its ports.
        ended = fields[0] == "X" or (fields[0] == "Z" and int(fields[17]) <= 1)
        # Ticks since boot: unlike a wall-clock time, it does not move when the clock is set.
        return None if ended else fields[19]
    found = _ps(pid, "state=,lstart=")
    if found is None or found.startswith("Z"):
        return None
    return found.partition(" ")[2].strip()


def is_alive(pid: int, started: str) -> bool:
    """Whether the process that we started is still there (and not another one with its pid)."""
    return start_time(pid) == started


def resident_bytes(pid: int) -> int | None:
    """Memory in use, or None if the process is gone."""
    if sys.platform == "linux":
        try:
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        except (FileNotFoundError, ProcessLookupError):
            return None
        return pages * os.sysconf("SC_PAGE_SIZE")
    found = _ps(pid, "rss=")
    return int(found) * 1024 if found else None


def end(processes: Sequence[Spawned], deadline_s: float) -> None:
    """Asks all to end, waits together, kills those left at the deadline. Strangers are not touched.

    Raises `StackError` where one survives even that.
    """
    for process in processes:
        _signal(process, signal.SIGTERM)
    if not _wait_gone(processes, deadline_s):
        for process in processes:
            _signal(process, signal.SIGKILL)
        if not _wait_gone(processes, deadline_s):
            left = [process.pid for process in processes if is_alive(*process)]
            raise StackError(f"processes {left} did not end, even when killed")


def kill(process: Spawned, deadline_s: float = 10.0) -> None:
    """kill -9, and waits until it is gone."""
    _signal(process, signal.SIGKILL)
    if not _wait_gone([process], deadline_s):
        raise StackError(f"process {process.pid} did not end when killed")


def _signal(process: Spawned, number: signal.Signals) -> None:
    if is_alive(*process):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)


def _wait_gone(processes: Sequence[Spawned], deadline_s: float) -> bool:
    deadline = time.monotonic() + deadline_s
    while any(is_alive(*process) for process in processes):
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


def _reap(pid: int) -> None:
    """Takes the exit status of a child of this process, so that it does not stay as a zombie."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def _ps(pid: int, columns: str) -> str | None:
    done = subprocess.run(
        ["ps", "-o", columns, "-p", str(pid)], capture_output=True, text=True, timeout=10, check=False
    )
    return done.stdout.strip() or None
