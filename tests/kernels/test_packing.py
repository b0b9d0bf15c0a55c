"""Cases C12 and C13 and the properties of step layouts."""

from __future__ import annotations

import time
from typing import get_args

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from rollwire.kernels.cost import CostModel
from rollwire.kernels.packing import MAX_BUDGET, context_slices, padded, plan_microbatches
from rollwire.kernels.packing_bins import best_fit, longest_first
from rollwire.kernels.packing_search import Objective, fewest_bins
from rollwire.schemas.errors import ConfigError, Refused

MODEL = CostModel(linear=51_230.0, quadratic=1.0)
OBJECTIVES: tuple[Objective, ...] = get_args(Objective)


def plan_of(
    lengths: list[int], ranks: int, budget: int, objective: Objective = "sum", context_parallel: int = 1
) -> list[list[list[int]]]:
    return plan_microbatches(
        lengths, MODEL.costs(lengths), ranks, budget, objective=objective, context_parallel=context_parallel
    )


def cells(plan: list[list[list[int]]], costs_B: NDArray[np.float64]) -> NDArray[np.float64]:
    """Cost of every microbatch, [rank, slot]; 0 where a rank has fewer."""
    grid = np.zeros((len(plan), max(map(len, plan), default=0)))
    for rank, microbatches in enumerate(plan):
        for slot, indices in enumerate(microbatches):
            grid[rank, slot] = costs_B[indices].sum()
    return grid


def check(
    plan: list[list[list[int]]], lengths: list[int], ranks: int, budget: int, objective: Objective
) -> None:
    assert len(plan) == ranks
    placed = [i for rank in plan for microbatch in rank for i in microbatch]
    assert sorted(placed) == list(range(len(lengths)))
    for rank in plan:
        assert all(sum(lengths[i] for i in microbatch) <= budget for microbatch in rank)
        assert all(microbatch == sorted(microbatch) for microbatch in rank)
    if objective == "lockstep":
        assert len({len(rank) for rank in plan}) == 1
    else:
        assert all(microbatch for rank in plan for microbatch in rank)


def best_fit_bins(lengths: list[int], budget: int) -> int:
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fits = [room for room in rooms if room >= length]
        if fits:
            rooms.remove(min(fits))
        rooms.append((min(fits) if fits else budget) - length)
    return len(rooms)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_c12_the_lower_bound_is_not_a_packing(objective: Objective) -> None:
    plan = plan_of([7] * 8, 1, 8, objective)
    assert sorted(plan[0]) == [[i] for i in range(8)]


@settings(max_examples=1000, deadline=None)
@given(
    st.integers(1, 200).flatmap(
        lambda budget: st.tuples(st.just(budget), st.lists(st.integers(1, budget), max_size=80))
    ),
    st.integers(1, 9),
    st.sampled_from(OBJECTIVES),
)
@example((200, [200]), 9, "lockstep")  # more ranks than sequences
@example((200, [100] * 80), 7, "sum")  # all equal
@example((200, [200, *[1] * 79]), 4, "lockstep")  # one huge
@example((200, [101] * 9), 2, "lockstep")  # no two fit together
@example((200, [67, 67, 66] * 20), 3, "sum")  # only exact triples reach the bound
def test_c12_none_over_budget_lost_or_doubled(
    case: tuple[int, list[int]], ranks: int, objective: Objective
) -> None:
    budget, lengths = case
    plan = plan_of(lengths, ranks, budget, objective)
    check(plan, lengths, ranks, budget, objective)
    assert plan == plan_of(lengths, ranks, budget, objective)
    if not lengths:
        return
    # Never more slots than best fit decreasing needs, and its bound of 11/9 of the fewest bins (Johnson 1973) with it.
    assert max(map(len, plan)) <= -(-best_fit_bins(lengths, budget) // ranks)
    assert max(map(len, plan)) >= -(-sum(lengths) // (ranks * budget))
    # What the objective counts is at least the mean, and at most everything on one rank, slot by slot.
    costs = MODEL.costs(lengths)
    grid = cells(plan, costs)
    counted = grid.sum(axis=1).max() if objective == "sum" else grid.max(axis=0).sum()
    assert costs.sum() / ranks * (1 - 1e-12) <= counted <= costs.sum() * (1 + 1e-12)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=60), st.integers(1, 8))
def test_without_a_tight_budget_a_step_is_as_even_as_list_scheduling(lengths: list[int], ranks: int) -> None:
    costs = MODEL.costs(lengths)
    counted = cells(plan_of(lengths, ranks, sum(lengths)), costs).sum(axis=1).max()
    # Graham's bound for list scheduling: mean + largest job * (1 - 1/R).
    assert counted <= (costs.sum() / ranks + costs.max() * (1 - 1 / ranks)) * (1 + 1e-12)


@given(st.lists(st.integers(1, 50), max_size=60), st.sampled_from(OBJECTIVES))
def test_two_ranks_hold_the_set_that_one_holds(lengths: list[int], objective: Objective) -> None:
    one, two = plan_of(lengths, 1, 64, objective), plan_of(lengths, 2, 64, objective)
    assert sorted(i for m in one[0] for i in m) == sorted(i for rank in two for m in rank for i in m)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 64), st.floats(0, 1e6)), max_size=40),
    st.integers(1, 5),
    st.sampled_from(OBJECTIVES),
)
def test_any_costs_give_a_plan(case: list[tuple[int, float]], ranks: int, objective: Objective) -> None:
    lengths = [length for length, _ in case]
    plan = plan_microbatches(lengths, [cost for _, cost in case], ranks, 64, objective=objective)
    check(plan, lengths, ranks, 64, objective)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_c13_a_sequence_over_the_budget_and_an_empty_one_are_refused(objective: Objective) -> None:
    assert sorted(plan_of([20, 1], 1, 20, objective)[0]) == [[0], [1]]
    for length, reason in ((21, "over_budget"), (0, "sequence_empty"), (-1, "sequence_empty")):
        with pytest.raises(Refused) as refused:
            plan_of([20, length, 1], 1, 20, objective)
        assert refused.value.reason == reason


@pytest.mark.parametrize(
    ("ranks", "budget", "costs", "context_parallel"),
    [
        (0, 8, [1.0], 1),
        (1, 0, [1.0], 1),
        (1, 8, [], 1),
        (1, 8, [1.0], 0),
        (1, MAX_BUDGET + 1, [1.0], 1),
        (1, MAX_BUDGET, [1.0], 2),
        (1, 8, [float("nan")], 1),
        (1, 8, [-1.0], 1),
    ],
)
def test_wrong_settings_are_refused(
    ranks: int, budget: int, costs: list[float], context_parallel: int
) -> None:
    with pytest.raises(ConfigError):
        plan_microbatches([1], costs, ranks, budget, context_parallel=context_parallel)


def test_objectives_are_what_they_say() -> None:
    # One long sequence and a budget that forbids company for it: the slot it is in costs as much as it.
    lengths = [64, 60, 4, *[8] * 16]
    costs = MODEL.costs(lengths)
    step, slots = (cells(plan_of(lengths, 2, 64, objective), costs) for objective in OBJECTIVES)
    assert slots.shape == (2, 2)
    assert slots.max(axis=0).sum() <= step.max(axis=0).sum()
    assert step.sum(axis=1).max() <= slots.sum(axis=1).max()


def test_peeling_puts_long_sequences_into_slots_of_their_own() -> None:
    # Costs by the square: evened out, every slot would hold one of the four long sequences and cost as much as it.
    lengths = [100] * 4 + [10] * 120
    costs = CostModel(1.0, 1.0).costs(lengths)
    plan = plan_microbatches(lengths, costs, 4, 100, objective="lockstep")
    grid = cells(plan, costs)
    assert grid.max(axis=0).sum() == grid.mean(axis=0).sum()
    assert {len(microbatch) for rank in plan for microbatch in rank} == {1, 10}


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 130), min_size=1, max_size=80), st.integers(130, 5000))
def test_best_fit_is_the_slow_one(lengths: list[int], budget: int) -> None:
    ordered = np.sort(np.array(lengths, np.int64))[::-1].copy()
    size = ordered.size
    bin_B, tokens_N, cost_N = np.full(size, -1, np.int64), np.zeros(size, np.int64), np.zeros(size)
    used = best_fit(ordered, MODEL.costs(ordered), budget, np.inf, 0, size, bin_B, tokens_N, cost_N)
    assert used == best_fit_bins(lengths, budget)
    assert np.array_equal(np.bincount(bin_B, weights=ordered, minlength=size), tokens_N)
    assert tokens_N.max() <= budget


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(1, 130), min_size=1, max_size=60),
    st.integers(130, 300),
    st.integers(1, 20),
    st.sampled_from([1, 9973]),  # with the second, rooms are told apart coarsely
)
def test_longest_first_is_the_slow_one(lengths: list[int], budget: int, bins: int, scale: int) -> None:
    ordered = np.sort(np.array(lengths, np.int64))[::-1] * scale
    budget *= scale
    costs = MODEL.costs(ordered)
    bin_B, tokens_N, cost_N = np.full(ordered.size, -1, np.int64), np.zeros(bins, np.int64), np.zeros(bins)
    placed = longest_first(ordered, costs, budget, 0, bins, bin_B, tokens_N, cost_N)
    loads, sums = np.zeros(bins), np.zeros(bins, np.int64)
    for i, (length, cost) in enumerate(zip(ordered.tolist(), costs.tolist(), strict=True)):
        open_N = np.flatnonzero(sums + length <= budget)
        if not open_N.size:
            assert not placed
            return
        target = open_N[np.argmin(loads[open_N])]
        assert bin_B[i] == target
        loads[target] += cost
        sums[target] += length
    assert placed


def fewest_by_trying(lengths: list[int], budget: int) -> int:
    """The optimum: every sequence in every bin opened so far, or in one more."""
    best = len(lengths)

    def place(at: int, rooms: list[int]) -> None:
        nonlocal best
        if len(rooms) >= best:
            return
        if at == len(lengths):
            best = len(rooms)
            return
        for bin_, room in enumerate(rooms):
            if room >= lengths[at]:
                place(at + 1, [*rooms[:bin_], room - lengths[at], *rooms[bin_ + 1 :]])
        place(at + 1, [*rooms, budget - lengths[at]])

    place(0, [])
    return best


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=7))
@example([7] * 7)
@example([11, 11, 9, 9])
def test_the_lower_bound_is_one_and_counts_what_stands_alone(lengths: list[int]) -> None:
    ordered = np.sort(np.array(lengths, np.int64))[::-1]
    bound = fewest_bins(ordered, 20)
    assert max(-(-sum(lengths) // 20), sum(length > 10 for length in lengths)) <= bound
    assert bound <= fewest_by_trying(lengths, 20)


def test_layouts_that_look_too_small_take_no_long_search() -> None:
    # By tokens half of the microbatches would do, and no packing has fewer than one a sequence.
    began = time.process_time()
    plan = plan_of([66_000] * 5_000, 1, 131_072)
    assert len(plan[0]) == 5_000
    assert time.process_time() - began < 10


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=40), st.integers(2, 4), st.integers(1, 3))
def test_context_parallelism_shares_a_microbatch_among_devices(
    lengths: list[int], devices: int, ranks: int
) -> None:
    budget = 32  # of a device: sequences of 60 tokens need two
    plan = plan_of(lengths, ranks, budget, context_parallel=devices)
    check(plan, lengths, ranks, budget * devices, "sum")
    for rank in plan:
        for microbatch in rank:
            tokens_D = np.zeros(devices, np.int64)
            for i in microbatch:
                parts = context_slices(lengths[i], devices)
                cover = sorted(part for pair in parts for part in pair)
                assert [start for start, _ in cover] == [0, *(end for _, end in cover[:-1])]
                assert cover[-1][1] == padded(np.array([lengths[i]]), devices)[0] >= lengths[i]
                tokens_D += [sum(end - start for start, end in pair) for pair in parts]
                # Causal pairs: a token at position p looks at p + 1. All devices have equally many.
                pairs = [sum(p + 1 for start, end in pair for p in range(start, end)) for pair in parts]
                assert len(set(pairs)) == 1
            assert (tokens_D <= budget).all()


def test_a_sequence_over_one_budget_needs_declared_context_parallelism() -> None:
    with pytest.raises(Refused, match="over_budget"):
        plan_of([40], 1, 32)
    assert plan_of([40], 1, 32, context_parallel=2) == [[[0]]]
    with pytest.raises(Refused, match="over_budget"):
        plan_of([65], 1, 32, context_parallel=2)
    with pytest.raises(ConfigError, match="nothing is cut"):
        context_slices(8, 1)
