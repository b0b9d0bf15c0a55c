"""Lays the sequences of one optimiser step out over data-parallel ranks and microbatches.

Two objectives, chosen by how ranks meet (they conflict):

- `sum`: ranks meet once a step, so what counts is the largest summed cost of a rank. Ranks may run different numbers of
  microbatches.
- `lockstep`: ranks meet at every microbatch (expert parallelism across data-parallel ranks), so what counts is the sum
  over slots of the most expensive microbatch of each slot. Slot k holds the k-th microbatch of every rank.

How: `packing_search`. Legend: B sequences, R ranks, K slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from rollwire.kernels.packing_search import Instance, Objective, best_layout
from rollwire.schemas.errors import ConfigError, Refused

# A microbatch of more tokens than this is no microbatch; sets of rooms are as large as the budget.
MAX_BUDGET: Final = 1 << 24


def check_length(length: int, token_budget: int) -> None:
    """Raises `Refused`: `sequence_empty` for a length below 1, `over_budget` above the budget (C13)."""
    if length < 1:
        raise Refused("sequence_empty", f"a sequence of {length} tokens")
    if length > token_budget:
        raise Refused("over_budget", f"a sequence of {length} tokens, the budget is {token_budget}")


def plan_microbatches(
    lengths_B: Sequence[int] | NDArray[np.int64],
    costs_B: Sequence[float] | NDArray[np.float64],
    ranks: int,
    token_budget: int,
    *,
    objective: Objective = "sum",
    context_parallel: int = 1,
) -> list[list[list[int]]]:
    """`[rank][microbatch]` -> indices into `lengths_B`, ascending within a microbatch.

    Every index is placed exactly once and no microbatch exceeds its budget. Equal inputs give equal plans. Costs should
    not fall where lengths rise: plans are valid even so, but worse.

    `sum`: no microbatch is empty; a rank may have none. `lockstep`: every rank has K microbatches; where a slot has
    nothing for a rank, its microbatch is empty.

    `context_parallel`: devices that compute one microbatch together, each its part of every sequence
    (`context_slices`). A rank is then such a group, its microbatches and sequences may have `context_parallel` times
    `token_budget` tokens, and a sequence counts as many as it is padded to.

    Raises `Refused` (see `check_length`) and `ConfigError` for impossible settings and for lists that do not match.
    """
    if min(ranks, token_budget, context_parallel) < 1 or token_budget * context_parallel > MAX_BUDGET:
        raise ConfigError(
            f"ranks, token_budget and context_parallel must be positive and a microbatch at most {MAX_BUDGET} tokens, "
            f"got {ranks}, {token_budget} and {context_parallel}"
        )
    if len(lengths_B) != len(costs_B):
        raise ConfigError(f"{len(lengths_B)} lengths but {len(costs_B)} costs")
    if not len(lengths_B):
        return [[] for _ in range(ranks)]
    lengths = np.asarray(lengths_B, dtype=np.int64)
    costs = np.asarray(costs_B, dtype=np.float64)
    counted = padded(lengths, context_parallel)
    for worst in (lengths.min(), counted.max()):
        check_length(int(worst), token_budget * context_parallel)
    if not (np.isfinite(costs) & (costs >= 0)).all():
        raise ConfigError("a cost must be a finite number and not below 0")
    order_B = np.lexsort((-costs, -counted))  # stable: ties keep the order of their indices
    cap = min(token_budget * context_parallel, int(counted.sum()))
    layout = best_layout(Instance(counted[order_B], costs[order_B], ranks, cap, objective))
    slots = layout.rank_N.size // ranks
    cell_B = (layout.rank_N * slots + layout.slot_N)[layout.bin_B]
    indices = order_B[np.lexsort((order_B, cell_B))].tolist()
    ends = np.cumsum(np.bincount(cell_B, minlength=ranks * slots)).tolist()
    cells = [indices[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    plan = [cells[rank * slots : (rank + 1) * slots] for rank in range(ranks)]
    return plan if objective == "lockstep" else [[cell for cell in rank if cell] for rank in plan]


def padded(lengths_B: NDArray[np.int64], context_parallel: int) -> NDArray[np.int64]:
    """Lengths as context parallelism counts them: multiples of 2 * `context_parallel` where that is above 1."""
    chunk = 1 if context_parallel == 1 else 2 * context_parallel
    return -(-lengths_B // chunk) * chunk


def context_slices(length: int, context_parallel: int) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """The two parts [start, end) of a sequence that each of `context_parallel` >= 2 devices computes, in padded positions.

    Device d of c has the chunks d and 2c - 1 - d of 2c equal ones: under a causal mask all devices then have equally
    many pairs of tokens. It is the cut of Megatron-LM's context parallelism, and of zigzag ring attention.
    """
    if context_parallel < 2:
        raise ConfigError(f"context_parallel is {context_parallel}: nothing is cut below 2 devices")
    chunk = int(padded(np.array([length]), context_parallel)[0]) // (2 * context_parallel)
    last = 2 * context_parallel - 1
    return [
        ((d * chunk, (d + 1) * chunk), ((last - d) * chunk, (last - d + 1) * chunk))
        for d in range(context_parallel)
    ]
