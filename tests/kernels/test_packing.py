"""Cases C12 and C13 and the properties of step layouts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollwire.kernels.packing import CostModel, cost_model, plan_microbatches
from rollwire.schemas.errors import ConfigError, Refused

MODEL = CostModel(linear=51_230.0, quadratic=1.0)


def loads(plan: list[list[list[int]]], costs_B: np.ndarray[tuple[int], np.dtype[np.float64]]) -> list[float]:
    return [float(sum(costs_B[i] for microbatch in rank for i in microbatch)) for rank in plan]


def test_c12_the_lower_bound_is_not_a_packing() -> None:
    plan = plan_microbatches([7] * 8, MODEL.costs([7] * 8), ranks=1, token_budget=8)
    assert sorted(plan[0]) == [[i] for i in range(8)]


@settings(max_examples=1000, deadline=None)
@given(
    st.integers(1, 200).flatmap(
        lambda budget: st.tuples(st.just(budget), st.lists(st.integers(1, budget), max_size=80))
    ),
    st.integers(1, 9),
)
def test_c12_none_over_budget_lost_or_doubled(case: tuple[int, list[int]], ranks: int) -> None:
    budget, lengths = case
    costs = MODEL.costs(lengths)
    plan = plan_microbatches(lengths, costs, ranks, budget)
    assert len(plan) == ranks
    placed = [i for rank in plan for microbatch in rank for i in microbatch]
    assert sorted(placed) == list(range(len(lengths)))
    for rank in plan:
        tokens = [sum(lengths[i] for i in microbatch) for microbatch in rank]
        assert all(0 < total <= budget for total in tokens)
        # Best fit never leaves two microbatches that would fit into one.
        assert sum(2 * total <= budget for total in tokens) <= 1
    assert plan == plan_microbatches(lengths, costs, ranks, budget)
    if lengths:
        # Graham's bound for list scheduling: mean + largest job * (1 - 1/R).
        bound = costs.sum() / ranks + costs.max() * (1 - 1 / ranks)
        assert max(loads(plan, costs)) <= bound * (1 + 1e-12)


@given(st.lists(st.integers(1, 50), max_size=60))
def test_two_ranks_hold_the_set_that_one_holds(lengths: list[int]) -> None:
    one = plan_microbatches(lengths, MODEL.costs(lengths), 1, 64)
    two = plan_microbatches(lengths, MODEL.costs(lengths), 2, 64)
    assert sorted(i for m in one[0] for i in m) == sorted(i for rank in two for m in rank for i in m)


def test_c13_a_sequence_over_the_budget_and_an_empty_one_are_refused() -> None:
    assert plan_microbatches([20, 1], [20.0, 1.0], 1, 20) == [[[0], [1]]]
    for length, reason in ((21, "over_budget"), (0, "sequence_empty"), (-1, "sequence_empty")):
        with pytest.raises(Refused) as refused:
            plan_microbatches([20, length, 1], [1.0, 1.0, 1.0], 1, 20)
        assert refused.value.reason == reason


@pytest.mark.parametrize(("ranks", "budget", "costs"), [(0, 8, [1.0]), (1, 0, [1.0]), (1, 8, [])])
def test_wrong_settings_are_refused(ranks: int, budget: int, costs: list[float]) -> None:
    with pytest.raises(ConfigError):
        plan_microbatches([1], costs, ranks, budget)


def test_the_cost_of_a_long_context_model() -> None:
    # 61 layers, 64 heads of 160, 32 B active: linear and quadratic cost are equal at 51,230 tokens.
    model = cost_model(hidden=7168, layers=61, heads=64, head_dim=160, active_params=32_000_000_000)
    assert model.linear / model.quadratic == pytest.approx(51_230, rel=1e-3)
    assert cost_model(64, 3, 4, 16).linear == 2 * 12 * 3 * 64 * 64
    with pytest.raises(ConfigError):
        cost_model(64, 0, 4, 16)


def test_lognormal_workload_is_balanced_to_a_tenth_of_a_percent() -> None:
    rng = np.random.default_rng(0)
    group = np.repeat(rng.normal(9.0, 0.9, 64), 16)
    lengths = np.clip(np.exp(group + rng.normal(0, 0.5, 1024)), 256, 131_072).astype(np.int64).tolist()
    costs = MODEL.costs(lengths)
    plan = plan_microbatches(lengths, costs, 8, 131_072)
    assert max(loads(plan, costs)) <= 1.001 * costs.sum() / 8
