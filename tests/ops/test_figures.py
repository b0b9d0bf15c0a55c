"""The common form of figures, and the delta benchmark that writes it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from rollwire.ops.bench.delta import adam_states, bench_delta, to_bf16
from rollwire.ops.figures import Figure, write_figures


def test_common_form(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "figures.json"
    results = [
        Figure(name="a.b", value=3.0, unit="s", baseline=2.0),
        Figure(name="c", value=1, unit="%"),
        Figure(name="d", value=1.0, unit="%", baseline=0.0),
    ]
    write_figures(path, "rollwire test", results)
    value = json.loads(path.read_text())
    assert set(value) == {"command", "commit", "machine", "results"}
    assert value["command"] == "rollwire test"
    assert value["machine"]["cores"] >= 1
    assert value["results"] == [
        {"name": "a.b", "value": 3.0, "unit": "s", "baseline": 2.0, "ratio": 1.5},
        {"name": "c", "value": 1, "unit": "%", "baseline": None, "ratio": None},
        {"name": "d", "value": 1.0, "unit": "%", "baseline": 0.0, "ratio": None},
    ]
    assert list(path.parent.iterdir()) == [path]
    with pytest.raises(ValueError, match="same name"):
        write_figures(path, "x", [results[0], results[0]])


def test_bench_delta_at_small_size() -> None:
    figures = {figure.name: figure for figure in bench_delta(mib=1, repeats=1)}
    for dtype in ("bf16", "f32"):
        assert figures[f"delta.digest.{dtype}.gbps"].value > 0
        for rate in ("1e-6", "2e-4"):
            prefix = f"delta.{dtype}.lr{rate}"
            gap = figures[f"{prefix}.gap.size_pct"]
            assert gap.baseline == figures[f"{prefix}.xor.size_pct"].value
            assert (
                gap.value < figures[f"{prefix}.xor.size_pct"].value < figures[f"{prefix}.full.size_pct"].value
            )
            assert figures[f"{prefix}.gap.decode_gbps"].value > 0
    assert len(figures) == 42
    assert 0.5 < figures["delta.bf16.lr1e-6.changed_pct"].value < 5


def test_synthetic_steps_are_adams() -> None:
    old, new = adam_states(4, 1e-3, seed=1)
    steps = np.abs(new - old)
    assert 1e-4 < steps.mean() < 5e-4 < steps.max() < 1.1e-3
    assert (
        to_bf16(np.array([1.0, -2.0, 1.00390625, 1.01171875], np.float32)) == [0x3F80, 0xC000, 0x3F80, 0x3F82]
    ).all()
