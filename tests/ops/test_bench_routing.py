"""The routing benchmark measures what it says, at a size that takes seconds."""

from __future__ import annotations

import numpy as np
import pytest

from rollwire.kernels.policy.config import PolicyConfig
from rollwire.ops.bench import routing
from rollwire.ops.settings import RunSettings


def test_the_skewed_router_draws_distinct_experts_by_their_rank() -> None:
    ids = routing.zipf_routes(4000, 2, 64, 4, seed=1)
    assert (np.diff(np.sort(ids, axis=2), axis=2) > 0).all()
    assert (ids == routing.zipf_routes(4000, 2, 64, 4, seed=1)).all()
    counts = np.sort(np.bincount(ids[:, 0, 0], minlength=64))[::-1] / 4000
    wanted = 1 / np.arange(1, 65) / (1 / np.arange(1, 65)).sum()
    assert counts[:4] == pytest.approx(wanted[:4], abs=0.03)
    # Layers do not share their favourites.
    assert np.bincount(ids[:, 0, 0]).argmax() != np.bincount(ids[:, 1, 0]).argmax()


def test_sizes_and_speeds(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("TRACES", 2), ("DRAWN", 1), ("TOKENS", 256), ("LAYERS", 8)):
        monkeypatch.setattr(routing, name, value)
    figures = {figure.name: figure for figure in routing.bench_codec(repeats=1)}
    assert figures["routing.bytes_ratio"].value == pytest.approx(32 / 9, rel=1e-3)
    assert figures["routing.bytes_ratio.zstd"].value >= figures["routing.bytes_ratio"].value
    assert figures["routing.bits_per_id"].value == pytest.approx(9, rel=1e-3)
    for name in ("encode", "decode"):
        speed = figures[f"routing.{name}_speed"]
        assert speed.ratio == pytest.approx(figures[f"routing.{name}_ratio"].value)
        assert speed.value > 0


@pytest.mark.torch
def test_replay_lowers_the_mismatch_of_rounded_weights_and_the_filter_undoes_damage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from rollwire.kernels.policy.model import Policy
    from rollwire.kernels.policy.states import to_state
    from rollwire.ops.bench import routing_mismatch

    monkeypatch.setattr(routing_mismatch, "STEPS", 4)
    monkeypatch.setattr(routing_mismatch, "GROUPS", 2)
    policy = PolicyConfig(initializer_range=0.2)
    settings = RunSettings.model_validate({"policy": policy, "seed": 3})
    initial = to_state(Policy(policy, seed=3), "F32")
    figures = {f.name: f for f in routing_mismatch.mismatch_figures(settings, initial, 96)}
    assert figures["routing.bytes_ratio.demo"].value == pytest.approx(8, rel=0.01)
    assert figures["routing.routes_differing"].value > 0.005
    assert figures["routing.p999_ratio"].value < 1
    assert figures["routing.mismatch.lag0.filter.p99"].ratio == 1.0
    assert figures["routing.implausible.lag0"].value == 0.0
    assert figures["routing.damaged_replaced"].value > 0.3
    replay, both = (figures[f"routing.mismatch.damaged.{name}.p999"].value for name in ("replay", "both"))
    assert both < replay
    assert {f"routing.mismatch.lag{lag}.both.p50" for lag in (0, 1, 4)} < set(figures)
