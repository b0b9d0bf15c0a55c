"""`rollwire bench pack` in its small form, its recorded workload, and the bars that do not depend on a machine."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from rollwire.ops.bench import pack
from rollwire.ops.bench.pack import (
    BUDGET,
    COST,
    SIZES,
    Case,
    bench_pack,
    draw_lengths,
    plain_layout,
    recorded_lengths,
)
from rollwire.ops.cli import run
from rollwire.ops.settings import build_settings
from rollwire.schemas.errors import ConfigError


@pytest.mark.parametrize(
    ("size", "tokens"), [("1k", 13_200_459), ("10k", 136_022_068), ("100k", 1_386_149_544)]
)
def test_the_recorded_lengths_are_what_the_generator_draws(size: str, tokens: int) -> None:
    lengths = recorded_lengths(size)
    assert lengths.size == SIZES[size]
    assert (lengths.min() >= 256) & (lengths.max() <= BUDGET)
    assert int(lengths.sum()) == tokens
    # `exp` may round another way on another machine: then a length is off by one.
    apart = np.abs(draw_lengths(SIZES[size]) - lengths)
    assert apart.max() <= 1
    assert np.count_nonzero(apart) <= 10


def test_the_plain_method_is_longest_first_then_best_fit() -> None:
    lengths = [8, 7, 6, 5, 4]
    assert plain_layout(lengths, [float(n) for n in lengths], 2, 12) == [[[0, 4], [3]], [[1], [2]]]


def test_layouts_keep_the_bars() -> None:
    figures = {figure.name: figure for figure in bench_pack(repeats=1)}
    cases = [
        "sum_10k_64",
        "lockstep_10k_64",
        "sum_1k_64",
        "lockstep_100k_64",
        "lockstep_100k_512",
        "sum_100k_64",
    ]
    names = {f"pack.{name}" for case in cases for name in (case, f"{case}.s")}
    assert {*names, "pack.sum_1k_64.bound", "pack.over_budget", "pack.above_bound"} <= set(figures)
    values = {name: figure.value for name, figure in figures.items()}
    assert values["pack.sum_10k_64"] <= 1.0002
    assert values["pack.lockstep_10k_64"] <= 1.02
    assert values["pack.sum_1k_64"] <= 1.0005 * values["pack.sum_1k_64.bound"]
    assert values["pack.lockstep_100k_64"] <= 1.003
    assert values["pack.lockstep_100k_512"] <= 1.015
    assert values["pack.sum_100k_64"] <= 1.0001
    assert values["pack.lockstep_1k_64"] <= 1.27
    assert values["pack.sum_10k_512"] <= 1.0001 * values["pack.sum_10k_512.bound"]
    assert values["pack.lockstep_10k_512"] <= 1.48
    assert values["pack.over_budget"] == values["pack.above_bound"] == 0
    assert values["pack.lockstep_10k_64.bound"] == pytest.approx(1.01067, abs=1e-5)
    for name, value in values.items():
        assert values.get(f"{name}.bound", 0.0) <= value * (1 + 1e-12), name
    for name, figure in figures.items():
        if not name.endswith((".s", ".bound", ".over_budget")):
            assert figure.baseline is not None
            assert figure.value <= figure.baseline, name


def test_the_command_shows_its_figures_and_writes_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = partial(bench_pack, cases=[Case("sum", "1k", 64)])
    monkeypatch.setattr(pack, "bench_pack", small)
    at = tmp_path / "figures.json"
    assert run(["bench", "pack", "--json", str(at)]) == 0
    shown, written = capsys.readouterr().out, json.loads(at.read_text())
    assert written["command"] == "rollwire bench pack --repeats 5"
    figures = {figure["name"]: figure for figure in written["results"]}
    assert set(figures) == {
        *("pack.sum_1k_64", "pack.sum_1k_64.s", "pack.sum_1k_64.bound"),
        *("pack.over_budget", "pack.above_bound"),
    }
    assert all(name in shown for name in figures)
    one = figures["pack.sum_1k_64"]
    assert figures["pack.sum_1k_64.bound"]["value"] <= one["value"] <= one["baseline"]


def test_a_layout_that_loses_a_sequence_or_changes_between_runs_is_no_measurement(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def short(*_: object, **__: object) -> list[list[list[int]]]:
        return [[[0]]] * 64

    with monkeypatch.context() as patch:
        patch.setattr(pack, "plan_microbatches", short)
        with pytest.raises(ValueError, match="loses or repeats"):
            bench_pack(repeats=1, cases=[Case("sum", "1k", 64)])
    order = iter(([[[0]]], [[[1]]]))
    monkeypatch.setattr(pack, "plan_microbatches", lambda *_, **__: next(order))
    with pytest.raises(ValueError, match="different layouts"):
        bench_pack(repeats=1, cases=[Case("sum", "1k", 64)])


def test_the_workload_has_the_cost_of_a_large_mixture_of_experts() -> None:
    assert COST.equal_at == 51_230


def test_a_run_with_the_built_in_trainer_refuses_context_parallelism() -> None:
    assert build_settings({"pack": {"objective": "lockstep"}}, where="x").pack.objective == "lockstep"
    with pytest.raises(ConfigError, match="splits no sequence"):
        build_settings({"pack": {"context_parallel": 2}}, where="x")
