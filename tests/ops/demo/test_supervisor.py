from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rollwire.ops.demo.supervisor import MAX_RESTARTS, ProcessDied, Supervisor, child_environment

READY = "import sys, signal, time, pathlib\n"


def supervisor(folder: Path, script: str) -> Supervisor:
    return Supervisor(folder / "logs", (sys.executable, "-P", "-c", READY + script), frozenset({"role"}))


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"


def test_a_process_that_ends_well_is_finished(tmp_path: Path) -> None:
    children = supervisor(tmp_path, "print('done', sys.argv[1:])")
    children.start("role", "--x")
    until(lambda: children.tend() == [] and children.finished("role"))
    assert "done ['role', '--x']" in (tmp_path / "logs" / "role.log").read_text()


def test_a_process_that_dies_is_started_again_a_few_times_then_named_with_its_log(tmp_path: Path) -> None:
    children = supervisor(tmp_path, "print('the cause'); sys.exit(1)")
    children.start("role")
    said: list[str] = []

    def died() -> bool:
        said.extend(children.tend())
        return False

    with pytest.raises(ProcessDied, match="the cause"):
        until(died)
    assert len(said) == MAX_RESTARTS


def test_a_process_that_should_have_gone_on_is_started_again(tmp_path: Path) -> None:
    children = supervisor(tmp_path, "sys.exit(0)")
    children.start("server")
    with pytest.raises(ProcessDied, match="exit code 0"):
        until(lambda: children.finished("server") or (bool(children.tend()) and False))


def test_wrong_use_is_not_tried_again(tmp_path: Path) -> None:
    children = supervisor(tmp_path, "sys.exit(2)")
    children.start("role")
    with pytest.raises(ProcessDied, match="exit code 2"):
        until(lambda: bool(children.tend()))


def test_stop_ends_what_listens_and_kills_what_does_not(tmp_path: Path) -> None:
    mark = "pathlib.Path(sys.argv[2]).touch(); time.sleep(60)"
    polite = supervisor(tmp_path / "polite", mark)
    polite.start("polite", str(tmp_path / "p"))
    until((tmp_path / "p").exists)
    began = time.monotonic()
    assert polite.stop() == []
    assert time.monotonic() - began < 10

    deaf = supervisor(tmp_path / "deaf", "signal.signal(signal.SIGTERM, signal.SIG_IGN);" + mark)
    deaf.stop_s = 0.3
    deaf.start("deaf", str(tmp_path / "d"))
    until((tmp_path / "d").exists)
    assert deaf.stop() == ["deaf"]
    assert deaf.children["deaf"].process.poll() is not None


def test_children_compute_with_one_thread() -> None:
    assert child_environment({"OMP_NUM_THREADS": "8", "HOME": "/h"}) == {
        **child_environment({}),
        "HOME": "/h",
        "OMP_NUM_THREADS": "1",
    }
