"""Lays the sequences of one optimiser step out over data-parallel ranks and microbatches.

Objective `sum`: ranks meet once a step, so what counts is the largest summed cost of a rank. Ranks may run different
numbers of microbatches. Legend: B sequences, R ranks.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollwire.schemas.errors import ConfigError, Refused


class CostModel(NamedTuple):
    """FLOP of the forward pass over one sequence of length L: linear * L + quadratic * L^2.

    The backward pass is twice the forward in both terms, so the ratio, which alone decides a layout, is the same.
    """

    linear: float
    quadratic: float

    def costs(self, lengths_B: Sequence[int] | NDArray[np.int64]) -> NDArray[np.float64]:
        lengths = np.asarray(lengths_B, dtype=np.float64)
        return lengths * (self.linear + self.quadratic * lengths)


def cost_model(
    hidden: int, layers: int, heads: int, head_dim: int, active_params: int | None = None
) -> CostModel:
    """The cost of a decoder-only transformer from its config numbers.

    Linear: 2 FLOP a token and active parameter (Kaplan et al. 2020, appendix B); `active_params` of a
    mixture-of-experts counts the top-k experts only; None = 12 * layers * hidden^2, a dense block's estimate.
    Quadratic: per layer and head, QK^T and AV are 2 * head_dim FLOP each for every pair, half of which the causal mask
    leaves: 2 * layers * heads * head_dim a token^2.
    """
    if min(hidden, layers, heads, head_dim) < 1 or (active_params is not None and active_params < 1):
        raise ConfigError("a cost model needs positive hidden, layers, heads, head_dim and active_params")
    active = 12 * layers * hidden * hidden if active_params is None else active_params
    return CostModel(linear=2.0 * active, quadratic=2.0 * layers * heads * head_dim)


def check_length(length: int, token_budget: int) -> None:
    """Raises `Refused`: `sequence_empty` for a length below 1, `over_budget` above the budget (C13)."""
    if length < 1:
        raise Refused("sequence_empty", f"a sequence of {length} tokens")
    if length > token_budget:
        raise Refused("over_budget", f"a sequence of {length} tokens, the budget is {token_budget}")


def plan_microbatches(
    lengths_B: Sequence[int], costs_B: Sequence[float] | NDArray[np.float64], ranks: int, token_budget: int
) -> list[list[list[int]]]:
    """`[rank][microbatch]` -> indices into `lengths_B`, ascending within a microbatch.

    Sequences go to ranks by longest processing time first (Graham 1969: at most 4/3 - 1/(3R) of the optimum), then to
    microbatches of their rank by best fit decreasing. Every index is placed exactly once and no microbatch exceeds
    `token_budget` tokens. Equal inputs give equal plans; ties go to the lower index and the lower rank. With fewer
    sequences than ranks the ranks left over get no microbatch.

    Raises `Refused` (see `check_length`) and `ConfigError` for ranks or budget below 1 and for lists that do not match.
    """
    if ranks < 1 or token_budget < 1:
        raise ConfigError(f"ranks and token_budget must be positive, got {ranks} and {token_budget}")
    if len(lengths_B) != len(costs_B):
        raise ConfigError(f"{len(lengths_B)} lengths but {len(costs_B)} costs")
    for length in lengths_B:
        check_length(length, token_budget)
    by_cost = sorted(range(len(lengths_B)), key=lambda index: (-float(costs_B[index]), index))
    loads: list[tuple[float, int]] = [(0.0, rank) for rank in range(ranks)]
    of_rank: list[list[int]] = [[] for _ in range(ranks)]
    for index in by_cost:
        load, rank = loads[0]
        of_rank[rank].append(index)
        heapq.heapreplace(loads, (load + float(costs_B[index]), rank))
    return [_best_fit(indices, lengths_B, token_budget) for indices in of_rank]


def _best_fit(indices: Sequence[int], lengths_B: Sequence[int], token_budget: int) -> list[list[int]]:
    """Best fit decreasing: the fullest microbatch that still has room, else a new one."""
    microbatches: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (tokens left, microbatch), ascending
    for index in sorted(indices, key=lambda index: (-lengths_B[index], index)):
        length = lengths_B[index]
        place = bisect_left(rooms, (length, -1))
        if place < len(rooms):
            room, microbatch = rooms.pop(place)
        else:
            room, microbatch = token_budget, len(microbatches)
            microbatches.append([])
        microbatches[microbatch].append(index)
        if room > length:
            insort(rooms, (room - length, microbatch))
    return [sorted(microbatch) for microbatch in microbatches]
