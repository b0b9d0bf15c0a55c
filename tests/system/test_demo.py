"""The demo as a person runs it: to its end, interrupted, and continued."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rollwire.ops.demo.folders import runs
from rollwire.ops.demo.supervisor import child_environment, rollwire_command
from rollwire.ops.stack.info import stack_file

pytestmark = [pytest.mark.system, pytest.mark.torch, pytest.mark.timeout(480)]

# Small enough for a test; the flow, the processes and the checks are those of the real demo.
SMALL = (
    "warm_start.steps=40",
    "warm_start.demonstrations=4000",
    "pack.groups_per_step=8",
    "fleet.max_open_groups=24",
    "trainer.checkpoint_every=3",
)


@contextmanager
def demo(folder: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """The command, which is ended with the block whatever happens."""
    sets = [part for value in SMALL for part in ("--set", value)] if "--continue" not in arguments else []
    process = subprocess.Popen(
        [*rollwire_command(), "demo", "--plain", "--dir", str(folder), *sets, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=child_environment(os.environ),
    )
    try:
        yield process
    finally:
        process.terminate()
        process.communicate()


def processes_of(folder: Path) -> list[str]:
    """Command lines of all processes that name `folder`."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = entry.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(folder) in line and "pytest" not in line:
            found.append(line)
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="looks for left-over processes in /proc")
def test_a_demo_runs_is_interrupted_and_goes_on(tmp_path: Path) -> None:
    folder, figures = tmp_path / "rw", tmp_path / "demo.json"
    with demo(folder, "--steps", "40") as first:
        seen = ""
        assert first.stdout is not None
        for line in first.stdout:
            seen += line
            if "step 0/" not in line and "step " in line and "held-out" in line:
                break  # training has begun
        first.send_signal(signal.SIGINT)
        began = time.monotonic()
        rest = first.communicate(timeout=60)[0]
    assert first.returncode == 130, seen + rest
    assert "--continue" in rest
    assert time.monotonic() - began < 45
    assert processes_of(folder) == []
    assert not stack_file(folder).exists()

    # The trainer was ahead of the interruption by some steps; four more than it has done are new ones.
    done = max(
        int(text.split("version=")[1].split()[0])
        for text in (runs(folder)[-1] / "logs" / "trainer.log").read_text().splitlines()
        if "version=" in text
    )
    steps = done + 4
    with demo(folder, "--continue", "--steps", str(steps), "--json", str(figures)) as second:
        text = second.communicate(timeout=300)[0]
    assert second.returncode == 0, text
    assert len(runs(folder)) == 1
    assert (runs(folder)[-1] / "curves.png").stat().st_size > 10_000
    named = {r["name"]: r["value"] for r in json.loads(figures.read_text())["results"]}
    assert named["demo.versions"] == steps + 1
    assert named["demo.version_holes"] == 0
    assert named["demo.ledger_gap"] == 0
    assert named["demo.replica_digest_equal"] == 1
    assert processes_of(folder) == []


def test_a_policy_that_calls_a_tool_is_not_trained_on_what_the_tool_says(tmp_path: Path) -> None:
    folder, figures = tmp_path / "rw", tmp_path / "demo.json"
    # The warm start of the real demo: a weaker one has hardly a group of unequal rewards.
    warm = ("--set", "warm_start.steps=300", "--set", "warm_start.demonstrations=20000")
    with demo(folder, "--environment", "calculator", "--steps", "8", *warm, "--json", str(figures)) as run:
        text = run.communicate(timeout=400)[0]
    assert run.returncode == 0, text
    named = {r["name"]: r["value"] for r in json.loads(figures.read_text())["results"]}
    assert named["demo.tool_tokens"] > 100
    assert named["demo.tool_tokens_trained"] == 0
    assert named["demo.versions"] == 9
    assert named["demo.ledger_gap"] == 0
    assert named["demo.mixed_version_share"] > 0
    assert 0 < named["demo.heldout_before"] < 0.5


def test_a_wrong_setting_starts_nothing(tmp_path: Path) -> None:
    with demo(tmp_path / "rw", "--set", "trainer.learning_rat=1") as run:
        text = run.communicate(timeout=60)[0]
    assert run.returncode == 2
    assert "learning_rate" in text
    assert not (tmp_path / "rw").exists()


def test_every_click_of_a_feedback_demo_reaches_a_reward_and_its_versions_are_served(tmp_path: Path) -> None:
    folder, figures = tmp_path / "rw", tmp_path / "demo.json"
    sets = ("pack.groups_per_step=24", "people.questions_per_s=40", "pack.max_lag_versions=100")
    more = [part for value in sets for part in ("--set", value)]
    with demo(folder, "--feedback", "--steps", "4", *more, "--json", str(figures)) as run:
        text = run.communicate(timeout=400)[0]
    assert run.returncode == 0, text
    named = {r["name"]: r["value"] for r in json.loads(figures.read_text())["results"]}
    assert named["demo.versions"] == 5
    assert named["demo.version_holes"] == 0
    assert named["demo.served_versions"] >= 2
    assert named["demo.clicks"] > 20
    assert named["demo.clicks_lost"] == named["demo.unrewarded"] == named["demo.ledger_gap"] == 0
    assert 0 < named["demo.coverage"] < 1
    assert 0 < named["demo.cycle_s_p50"] <= named["demo.cycle_s_p95"]
    assert "fleet" not in {log.stem for log in (runs(folder)[-1] / "logs").glob("*.log")}
    assert processes_of(folder) == []
