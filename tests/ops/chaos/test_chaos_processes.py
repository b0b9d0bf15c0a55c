from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rollwire.ops.chaos.processes import MAX_DEATHS, Processes
from rollwire.ops.demo.supervisor import ProcessDied

# Says its pid, then does as its argument says.
PROGRAM = """
import os, signal, sys, threading
stop = threading.Event()
if sys.argv[1] == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
else:
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
print(os.getpid(), flush=True)
if sys.argv[1] == "dies":
    sys.exit(1)
if sys.argv[1] == "wrong":
    sys.exit(2)
stop.wait()
"""


def command(manner: str) -> tuple[str, ...]:
    return (sys.executable, "-P", "-c", PROGRAM, manner)


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    made = Processes(tmp_path, stop_s=2.0)
    yield made
    made.stop()


def pids(processes: Processes, name: str) -> list[int]:
    path = processes.logs / f"{name}.log"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"


def is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_what_was_killed_is_started_again_and_is_no_death(processes: Processes) -> None:
    processes.start("a", command("good"))
    until(lambda: len(pids(processes, "a")) == 1)
    processes.kill("a")
    until(lambda: len(pids(processes, "a")) == 2)
    assert processes.tend() == []
    first, second = pids(processes, "a")
    assert not is_there(first)
    assert is_there(second)


def test_a_stop_is_timed_and_others_are_tended_meanwhile(processes: Processes) -> None:
    processes.start("good", command("good"))
    processes.start("deaf", command("deaf"))
    until(lambda: bool(pids(processes, "good")) and bool(pids(processes, "deaf")))
    calls: list[int] = []
    quick = processes.terminate("good", lambda: calls.append(len(processes.tend())))
    assert not quick.late
    assert quick.how == "exit code 0"
    slow = processes.terminate("deaf", lambda: calls.append(len(processes.tend())))
    assert slow.late
    assert slow.how == "signal SIGKILL"
    # It ended as it was told to: nobody's death.
    assert set(calls) == {0}
    until(lambda: len(pids(processes, "good")) == 2 and len(pids(processes, "deaf")) == 2)
    os.kill(pids(processes, "deaf")[-1], signal.SIGKILL)


def test_one_that_dies_by_itself_is_started_again_and_told_of(processes: Processes) -> None:
    processes.start("a", command("good"))
    until(lambda: len(pids(processes, "a")) == 1)
    os.kill(pids(processes, "a")[0], signal.SIGKILL)
    deaths: list[tuple[str, str]] = []

    def died() -> bool:
        deaths.extend((death.name, death.how) for death in processes.tend())
        return bool(deaths)

    until(died)
    assert deaths == [("a", "signal SIGKILL")]
    until(lambda: len(pids(processes, "a")) == 2)


@pytest.mark.parametrize("manner", ["dies", "wrong"])
def test_one_that_does_nothing_but_die_ends_the_run(processes: Processes, manner: str) -> None:
    processes.start("a", command(manner))
    died = 0

    def tended() -> bool:
        nonlocal died
        died += len(processes.tend())
        return False

    with pytest.raises(ProcessDied, match="by itself"):
        until(tended, 60.0)
    assert died == (MAX_DEATHS if manner == "dies" else 0)


def test_what_stands_still_ends_with_the_others(processes: Processes) -> None:
    processes.start("a", command("good"))
    until(lambda: len(pids(processes, "a")) == 1)
    processes.pause("a")
    (stop,) = processes.stop()
    assert (stop.name, stop.how, stop.late) == ("a", "exit code 0", False)
    assert processes.names == ()
