"""`rollwire bench pack`: layouts of steps against the plain method, in one run, on one core.

The workload is recorded in `pack_lengths.npz`: 1,024, 10,240 and 102,400 lengths in groups of 16,
ln L = 9.0 + 0.9 N(group) + 0.5 N(sample), clipped to [256, 131072] and rounded down, as `draw_lengths` drew them. A sequence
costs 51,230 L + L^2 (a mixture of experts of 32 B active parameters, 61 layers and 64 heads of 192 and 128); a microbatch has at most 131,072
tokens. The baseline is longest processing time first over the ranks, best fit decreasing inside of each, in plain Python.

Figures, for each case <objective>_<sequences>_<ranks>:

    pack.<case>            sum: the largest summed cost of a rank / mean; lockstep: the sum over slots of the most expensive
                           microbatch / mean cost of a rank. 1 is perfect, and not always possible
    pack.<case>.s          CPU time of the process for one layout, lists in and lists out: the median of the runs
    pack.<case>.bound      no layout is better (`lower_bound`); perhaps none is as good
    pack.over_budget       microbatches over the budget, all cases
    pack.above_bound       microbatches above R * ceil(tokens / (R * budget)), all cases
"""

from __future__ import annotations

import time
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from heapq import heapreplace
from pathlib import Path
from statistics import median
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollwire.kernels.cost import CostModel
from rollwire.kernels.packing import plan_microbatches
from rollwire.kernels.packing_search import Objective
from rollwire.ops.figures import Figure

BUDGET: Final = 131_072
COST: Final = CostModel(linear=51_230.0, quadratic=1.0)
LENGTHS: Final = Path(__file__).with_name("pack_lengths.npz")
SIZES: Final = {"1k": 1024, "10k": 10_240, "100k": 102_400}

Plan = list[list[list[int]]]  # [rank][microbatch] -> indices


class Case(NamedTuple):
    objective: Objective
    size: str
    ranks: int

    @property
    def name(self) -> str:
        return f"{self.objective}_{self.size}_{self.ranks}"


CASES: Final = (
    Case("sum", "10k", 64),
    Case("lockstep", "10k", 64),
    Case("sum", "1k", 64),
    Case("lockstep", "100k", 64),
    Case("lockstep", "100k", 512),
    Case("sum", "100k", 64),
    Case("lockstep", "1k", 64),
    Case("sum", "10k", 512),
    Case("lockstep", "10k", 512),
)


class Measured(NamedTuple):
    """One layout, and what it took."""

    value: float
    seconds: float
    over_budget: int
    above_bound: int


def draw_lengths(count: int) -> NDArray[np.int32]:
    """How the recorded lengths were drawn: from one PCG64 of seed 0, first a standard normal for each group, then one for
    each sequence. numpy promises no bits over its versions, and `exp` differs by machine: hence the record."""
    generator = np.random.Generator(np.random.PCG64(0))
    groups = np.repeat(generator.standard_normal(count // 16), 16)
    log_length = 9.0 + 0.9 * groups + 0.5 * generator.standard_normal(count)
    return np.clip(np.exp(log_length), 256, BUDGET).astype(np.int32)


def recorded_lengths(size: str) -> NDArray[np.int64]:
    with np.load(LENGTHS) as file:
        return np.asarray(file[size], np.int64)


def lower_bound(case: Case) -> float:
    """What no layout is below. sum: the mean, and the most expensive sequence. lockstep: the slot of that sequence costs as
    much as it, and its ranks compute at most the longest R * budget tokens of the step in that time; all others cost
    the mean of the rest at least."""
    longest_first = np.sort(recorded_lengths(case.size))[::-1]
    costs = COST.costs(longest_first)
    mean = float(costs.sum()) / case.ranks
    rest = 0.0
    if case.objective == "lockstep":
        tokens = np.cumsum(longest_first)
        share = np.clip((case.ranks * BUDGET - (tokens - longest_first)) / longest_first, 0.0, 1.0)
        rest = float((costs * (1.0 - share)).sum()) / case.ranks
    return max(mean, float(costs[0]) + rest) / mean


def plain_layout(lengths: Sequence[int], costs: Sequence[float], ranks: int, budget: int) -> Plan:
    """Longest processing time first over the ranks, then best fit decreasing inside of each. A rank's microbatches fall by
    cost, the order that suits `lockstep` best."""
    loads = [(0.0, rank) for rank in range(ranks)]
    of_rank: list[list[int]] = [[] for _ in range(ranks)]
    for index in sorted(range(len(lengths)), key=lambda index: (-costs[index], index)):
        load, rank = loads[0]
        of_rank[rank].append(index)
        heapreplace(loads, (load + costs[index], rank))
    return [
        sorted(_best_fit(indices, lengths, budget), key=lambda m: -sum(costs[i] for i in m))
        for indices in of_rank
    ]


def bench_pack(*, repeats: int = 5, cases: Sequence[Case] = CASES) -> list[Figure]:
    """All figures: the median of `repeats` runs each, ours and the baseline's in turn, after one of each that does not
    count. Raises `ValueError` where a layout loses a sequence or two runs differ."""
    figures: list[Figure] = []
    ours_all: list[Measured] = []
    plain_all: list[Measured] = []
    for case in cases:
        ours, plain = _measure(case, repeats)
        ours_all.append(ours)
        plain_all.append(plain)
        figures.append(Figure(name=f"pack.{case.name}", value=ours.value, unit="ratio", baseline=plain.value))
        figures.append(
            Figure(name=f"pack.{case.name}.s", value=ours.seconds, unit="s", baseline=plain.seconds)
        )
        figures.append(Figure(name=f"pack.{case.name}.bound", value=lower_bound(case), unit="ratio"))
    for name in ("over_budget", "above_bound"):
        counts = [float(sum(getattr(one, name) for one in all_)) for all_ in (ours_all, plain_all)]
        figures.append(Figure(name=f"pack.{name}", value=counts[0], unit="microbatches", baseline=counts[1]))
    return figures


def _measure(case: Case, repeats: int) -> tuple[Measured, Measured]:
    lengths = recorded_lengths(case.size)
    costs = COST.costs(lengths)
    length_list, cost_list = lengths.tolist(), costs.tolist()

    def ours() -> Plan:
        return plan_microbatches(length_list, cost_list, case.ranks, BUDGET, objective=case.objective)

    def plain() -> Plan:
        return plain_layout(length_list, cost_list, case.ranks, BUDGET)

    first = [method() for method in (ours, plain)]  # compiles, or reads what was compiled
    seconds: list[list[float]] = [[], []]
    for _ in range(repeats):
        for at, method in enumerate((ours, plain)):
            plan, took = _timed(method)
            if plan != first[at]:
                raise ValueError(f"two runs of {case.name} gave different layouts")
            seconds[at].append(took)
    ours_, plain_ = (
        _judge(plan, lengths, costs, case, median(took)) for plan, took in zip(first, seconds, strict=True)
    )
    return ours_, plain_


def _timed(method: Callable[[], Plan]) -> tuple[Plan, float]:
    began = time.process_time()
    plan = method()
    return plan, time.process_time() - began


def _judge(
    plan: Plan, lengths: NDArray[np.int64], costs: NDArray[np.float64], case: Case, seconds: float
) -> Measured:
    placed = np.sort(np.fromiter(_indices(plan), np.int64))
    if not np.array_equal(placed, np.arange(lengths.size)):
        raise ValueError(f"a layout of {case.name} loses or repeats a sequence")
    slots = max(map(len, plan))
    grid = np.zeros((case.ranks, slots))
    for rank, microbatches in enumerate(plan):
        grid[rank, : len(microbatches)] = [costs[m].sum() for m in microbatches]
    counted = grid.sum(axis=1).max() if case.objective == "sum" else grid.max(axis=0).sum()
    bound = case.ranks * -(-int(lengths.sum()) // (case.ranks * BUDGET))
    return Measured(
        value=float(counted / (costs.sum() / case.ranks)),
        seconds=seconds,
        over_budget=sum(int(lengths[m].sum()) > BUDGET for rank in plan for m in rank),
        above_bound=max(0, sum(map(len, plan)) - bound),
    )


def _indices(plan: Plan) -> Iterator[int]:
    return (index for rank in plan for microbatch in rank for index in microbatch)


def _best_fit(indices: Sequence[int], lengths: Sequence[int], budget: int) -> list[list[int]]:
    microbatches: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (tokens left, microbatch), ascending
    for index in sorted(indices, key=lambda index: (-lengths[index], index)):
        place = bisect_left(rooms, (lengths[index], -1))
        if place < len(rooms):
            room, microbatch = rooms.pop(place)
        else:
            room, microbatch = budget, len(microbatches)
            microbatches.append([])
        microbatches[microbatch].append(index)
        insort(rooms, (room - lengths[index], microbatch))
    return microbatches
