"""Searches the layout of a step: which packings are tried, how bins become slots and ranks, which layout is best.

K, the microbatches of a rank, is the smallest that some packing into R * K bins reaches, from a lower bound on. The
packings:

- the longest sequences first into the cheapest bin with room, which evens costs out;
- the same after some slots were *peeled* (`lockstep`): a slot costs at least as much as its longest sequence, so it is
  filled up to that cost, longest sequences first, and only the rest is evened out. How many slots is searched;
- best fit decreasing, which wastes the fewest tokens;
- the longest sequences first into the cheapest *rank*, and best fit decreasing inside of each.

Bins sorted by falling cost form the slots, and the heaviest bin of a slot goes to the rank with the least so far. Swaps of
single sequences then even out what is left, between ranks or inside of slots (`packing_swaps`).

Legend: B sequences, longest first; R ranks, K slots, N = R * K bins.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollwire.kernels.packing_bins import best_fit, longest_first
from rollwire.kernels.packing_swaps import balance

Objective = Literal["sum", "lockstep"]

# Relative to the mean: what no step's time would show.
_TOLERANCE: Final = 1e-5
# Peeled slots are searched one by one until so many in a row were no better.
_PATIENCE: Final = 12
# The same where none has worked at all.
_HOPE: Final = 4
# Pairs of groups that swaps are looked for in, for each rank of a pool.
_TRIES: Final = 64


class Instance(NamedTuple):
    """What is to be laid out; `cap` >= every length."""

    lengths_B: NDArray[np.int64]  # descending
    costs_B: NDArray[np.float64]
    ranks: int
    cap: int
    objective: Objective


class Layout(NamedTuple):
    """A whole layout; `cost` is what its objective counts."""

    bin_B: NDArray[np.int64]
    rank_N: NDArray[np.int64]
    slot_N: NDArray[np.int64]
    cost: float


class _Packing(NamedTuple):
    """A partial or whole packing: `bin_B` is -1 where a sequence is not placed."""

    bin_B: NDArray[np.int64]
    tokens_N: NDArray[np.int64]
    cost_N: NDArray[np.float64]

    def copy(self) -> _Packing:
        return _Packing(self.bin_B.copy(), self.tokens_N.copy(), self.cost_N.copy())


def best_layout(instance: Instance) -> Layout:
    """The best layout found. Equal instances, equal layouts: of equally good ones the first."""
    return min(_layouts(instance), key=lambda layout: layout.cost)


def _layouts(instance: Instance) -> Iterator[Layout]:
    """One layout a packing, until one is as good as any can be."""
    ranks = instance.ranks
    floor = float(max(instance.costs_B.sum() / ranks, instance.costs_B.max()))
    for packing, by_rank in _packings(instance):
        if by_rank and instance.objective == "sum":
            slots = packing.cost_N.size // ranks
            rank_N, slot_N = np.repeat(np.arange(ranks), slots), np.tile(np.arange(slots), ranks)
        else:
            rank_N, slot_N = _arranged(packing.cost_N, ranks)
        layout = _evened(instance, packing, rank_N, slot_N)
        yield layout
        if layout.cost <= floor * (1 + 2 * _TOLERANCE):
            return


def _packings(instance: Instance) -> Iterator[tuple[_Packing, bool]]:
    """Whole packings, all into as many bins, the most promising first; and whether ranks were chosen already."""
    slots = -(-fewest_bins(instance.lengths_B, instance.cap) // instance.ranks)
    found = _evening(instance, slots)
    if found is None:
        # Best fit reaches these slots. Whether the others need fewer is bisected: each probe is a packing.
        below, slots = slots, -(-_bins_of_best_fit(instance) // instance.ranks)
        while below + 1 < slots:
            middle = (below + slots) // 2
            packing = _evening(instance, middle)
            below, slots, found = (middle, slots, found) if packing is None else (below, middle, packing)
        found = found or _evening(instance, slots)
    if found is not None:
        yield found
    fitted = _empty(instance.lengths_B.size, instance.ranks * slots)
    best_fit(*instance[:2], instance.cap, np.inf, 0, fitted.cost_N.size, *fitted)
    if (fitted.bin_B >= 0).all():
        yield fitted, False
    if found is None or not found[1]:
        ranked = _ranked(instance, slots)
        if ranked is not None:
            yield ranked, True


def fewest_bins(lengths_B: NDArray[np.int64], cap: int) -> int:
    """A lower bound on the bins for lengths in descending order: L2 of Martello and Toth (1990).

    For each a <= cap / 2: lengths above cap - a stand alone, those above cap / 2 apart from each other, and what of those
    from a to cap / 2 does not fit beside the latter needs more bins. a = 0 counts tokens.
    """
    rising = lengths_B[::-1]
    sums = np.concatenate([np.zeros(1, np.int64), np.cumsum(rising)])
    half = int(np.searchsorted(rising, cap // 2, side="right"))
    a_A = np.unique(np.concatenate([np.zeros(1, np.int64), rising[:half]]))
    alone = np.searchsorted(rising, cap - a_A, side="right")
    low = np.searchsorted(rising, a_A, side="left")
    apart = alone - half
    left = sums[half] - sums[low] - (apart * cap - (sums[alone] - sums[half]))
    bins_A = rising.size - alone + apart + np.maximum(0, -(-left // cap))
    return int(bins_A.max())


def _evening(instance: Instance, slots: int) -> tuple[_Packing, bool] | None:
    peeled = _peeled(instance, slots)
    if peeled is not None:
        return peeled, False
    ranked = _ranked(instance, slots)
    return None if ranked is None else (ranked, True)


def _bins_of_best_fit(instance: Instance) -> int:
    size = instance.lengths_B.size
    return int(best_fit(*instance[:2], instance.cap, np.inf, 0, size, *_empty(size, size)))


def _peeled(instance: Instance, slots: int) -> _Packing | None:
    """The packing with the best number of peeled slots; for `sum` the first that works. None where none does."""
    lengths_B, costs_B, ranks, cap, objective = instance
    bins = ranks * slots
    best, best_cost, worse = None, np.inf, 0
    peeled = _empty(lengths_B.size, bins)
    for first in range(0, bins, ranks):
        whole = peeled.copy()
        if longest_first(lengths_B, costs_B, cap, first, bins - first, *whole):
            if objective == "sum":
                return whole
            cost = float(np.sort(whole.cost_N)[::-1][::ranks].sum())
            if cost < best_cost * (1 - 1e-9):
                best, best_cost, worse = whole, cost, -1
        worse += 1
        free_B = peeled.bin_B < 0
        if worse >= (_HOPE if best is None else _PATIENCE) or not free_B.any():
            break
        best_fit(lengths_B, costs_B, cap, float(costs_B[free_B].max()), first, ranks, *peeled)
    return best


def _ranked(instance: Instance, slots: int) -> _Packing | None:
    """Sequences to ranks first, bins inside of each. None where a rank needs more than `slots` bins."""
    lengths_B, costs_B, ranks, cap, _ = instance
    ranks_only = _empty(lengths_B.size, ranks)
    if not longest_first(lengths_B, costs_B, cap * slots, 0, ranks, *ranks_only):
        return None
    packing = _empty(lengths_B.size, ranks * slots)
    by_rank = np.argsort(ranks_only.bin_B, kind="stable")
    ends = np.cumsum(np.bincount(ranks_only.bin_B, minlength=ranks))
    for rank, mine_B in enumerate(np.split(by_rank, ends[:-1])):
        bin_B = np.full(mine_B.size, -1, np.int64)
        best_fit(
            lengths_B[mine_B],
            costs_B[mine_B],
            cap,
            np.inf,
            rank * slots,
            slots,
            bin_B,
            packing.tokens_N,
            packing.cost_N,
        )
        if (bin_B < 0).any():
            return None
        packing.bin_B[mine_B] = bin_B
    return packing


def _empty(size: int, bins: int) -> _Packing:
    return _Packing(np.full(size, -1, np.int64), np.zeros(bins, np.int64), np.zeros(bins))


def _arranged(cost_N: NDArray[np.float64], ranks: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rank and slot of every bin."""
    by_cost = np.argsort(-cost_N, kind="stable")
    rank_N, slot_N = np.empty(cost_N.size, np.int64), np.empty(cost_N.size, np.int64)
    load_R = np.zeros(ranks)
    for slot in range(cost_N.size // ranks):
        bins_R = by_cost[slot * ranks : (slot + 1) * ranks]
        ranks_R = np.argsort(load_R, kind="stable")
        rank_N[bins_R], slot_N[bins_R] = ranks_R, slot
        load_R[ranks_R] += cost_N[bins_R]
    return rank_N, slot_N


def _evened(
    instance: Instance, packing: _Packing, rank_N: NDArray[np.int64], slot_N: NDArray[np.int64]
) -> Layout:
    """The layout after swaps."""
    lengths_B, costs_B, ranks, cap, objective = instance
    size, bins = lengths_B.size, rank_N.size
    # One empty item a bin: a swap with it is a move.
    length_M = np.concatenate([lengths_B, np.zeros(bins, np.int64)])
    cost_M = np.concatenate([costs_B, np.zeros(bins)])
    bin_M = np.concatenate([packing.bin_B, np.arange(bins)])
    rising_M = np.argsort(cost_M, kind="stable")
    placed_M = bin_M[rising_M]
    group_N = rank_N if objective == "sum" else slot_N * ranks + rank_N
    balance(
        length_M[rising_M], cost_M[rising_M], placed_M, packing.tokens_N, group_N, ranks, cap, _TOLERANCE, _TRIES * ranks
    )  # fmt: skip
    bin_M[rising_M] = placed_M
    bin_B = bin_M[:size]
    load_G = np.bincount(group_N[bin_B], weights=costs_B, minlength=ranks)
    pools = -(-load_G.size // ranks)
    load_PR = np.concatenate([load_G, np.zeros(pools * ranks - load_G.size)]).reshape(pools, ranks)
    return Layout(bin_B, rank_N, slot_N, float(load_PR.max(axis=1).sum()))
