"""Seeds of the simulation: the laws hold, a seed replays itself, and every place to die is known."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from rollwire.ops.cli import run
from rollwire.ops.commands.simulate import simulate
from rollwire.ops.simulate import sweep
from rollwire.ops.simulate.points import POINTS
from rollwire.ops.simulate.run import REAL, Outcome, run_seed
from rollwire.ops.simulate.sweep import Tally, search, tally
from rollwire.ops.simulate.world import Point

SEEDS: Final = 60
LEAST_EFFECTS: Final = 200


def test_the_laws_hold_for_these_seeds() -> None:
    counted = tally(list(search(0, SEEDS)))
    assert counted.failures == ()
    assert counted.effects_min >= LEAST_EFFECTS
    assert counted.unknown == []
    assert counted.versions > 2 * SEEDS  # weights are published, not only version 0
    assert len(counted.deaths) > len(POINTS) / 2


def test_a_seed_is_the_same_in_another_process_with_other_hashes() -> None:
    code = "from rollwire.ops.simulate.run import run_seed; print(*[run_seed(s).digest for s in (3, 4)])"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env={**os.environ, "PYTHONHASHSEED": "7"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.split() == [run_seed(seed).digest for seed in (3, 4)]


def test_a_replay_tells_every_effect() -> None:
    told: list[str] = []
    outcome = run_seed(5, trace=told.append)
    assert outcome.failure is None
    assert sum(line.endswith(" before") for line in told) >= outcome.effects
    assert tuple(told[-len(outcome.last) :]) == outcome.last


def _failed(seed: int) -> Outcome:
    return Outcome(
        seed, "law 4: twice", 250, "0" * 64, {Point("nobody", "call", "after"): 1}, {}, ("a", "b"), 1, 1
    )


def test_failing_seeds_and_unknown_places_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    counted = tally([_failed(7), _failed(4)])
    assert [outcome.seed for outcome in counted.failures] == [4, 7]
    assert counted.unknown == [Point("nobody", "call", "after")]

    def run(_first: int, _seeds: int, *, jobs: int, told: Callable[[int, list[Outcome]], None]) -> Tally:
        told(jobs, list(counted.failures))
        return counted

    monkeypatch.setattr(sweep, "sweep", run)
    assert simulate(seeds=2, first=4, jobs=1, json=tmp_path / "figures.json") == 1
    said = capsys.readouterr().err
    assert "seed 4 at " in said
    assert "law 4: twice" in said
    assert "rollwire simulate --seed 4" in said
    figures = {f["name"]: f["value"] for f in json.loads((tmp_path / "figures.json").read_text())["results"]}
    assert figures == {
        "simulate.seeds": 2,
        "simulate.failures": 2,
        "simulate.effects_min": 250,
        "simulate.crash_points": 0,
    }


def test_the_command_runs_seeds_in_processes_of_their_own(tmp_path: Path) -> None:
    assert simulate(seeds=4, jobs=2, json=tmp_path / "figures.json") == 0
    figures = {f["name"]: f["value"] for f in json.loads((tmp_path / "figures.json").read_text())["results"]}
    assert (figures["simulate.seeds"], figures["simulate.failures"]) == (4, 0)


def test_one_seed_is_replayed_aloud(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulate", "--seed", "5"]) == 0
    out = capsys.readouterr().out
    assert "pack#1 init_transactions before" in out
    assert "all laws hold" in out
    assert run_seed(5, REAL).digest[:16] in out
