"""Evens out groups of bins by swapping single sequences between them under the token cap, compiled.

A *group* is what must cost the same as its peers, a *pool* the peers: for objective `sum` a rank among all ranks, for
`lockstep` a bin among the bins of its slot. A move is a swap with an item of no length and no cost: every bin has one.
Legend: M items (sequences, then one empty item a bin), N bins, G groups; pool p holds the groups p * R to p * R + R - 1.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rollwire.kernels.packing_bins import compiled

# Neighbours of the ideal partner that are looked at, on each side, where the cap forbids the nearer ones.
_REACH = 6


@compiled
def _best_swap(
    item_M: NDArray[np.int64],
    heavy_start: int,
    heavy_end: int,
    light_start: int,
    light_end: int,
    gap: float,
    close: float,
    length_M: NDArray[np.int64],
    cost_M: NDArray[np.float64],
    bin_M: NDArray[np.int64],
    tokens_N: NDArray[np.int64],
    cap: int,
) -> tuple[int, int]:
    """Positions in `item_M` of the pair whose swap brings the two groups nearest to each other, or (-1, -1).

    Items of a group ascend by cost. `gap`: cost of the heavy group less that of the light one; the ideal swap moves half
    of it, and one within `close` of that is taken at once.
    """
    half = gap / 2
    best, best_i, best_j = half, -1, -1
    at = light_start
    for i in range(heavy_start, heavy_end):
        give = item_M[i]
        want = cost_M[give] - half
        while at < light_end and cost_M[item_M[at]] < want:
            at += 1
        for side in range(2):
            for step in range(_REACH):
                j = at + step if side == 0 else at - 1 - step
                if j < light_start or j >= light_end:
                    break
                take = item_M[j]
                miss = abs(cost_M[take] - want)
                if miss >= best:
                    break
                more = length_M[give] - length_M[take]
                if tokens_N[bin_M[take]] + more <= cap and tokens_N[bin_M[give]] - more <= cap:
                    best, best_i, best_j = miss, i, j
                    break
        if best <= close:
            break
    return best_i, best_j


@compiled
def _replace(
    item_M: NDArray[np.int64], start: int, end: int, at: int, new: int, cost_M: NDArray[np.float64]
) -> None:
    """Puts `new` in the place of the item at `at`, and the group's items in order again."""
    while at + 1 < end and cost_M[item_M[at + 1]] < cost_M[new]:
        item_M[at] = item_M[at + 1]
        at += 1
    while at > start and cost_M[item_M[at - 1]] > cost_M[new]:
        item_M[at] = item_M[at - 1]
        at -= 1
    item_M[at] = new


@compiled
def balance(
    length_M: NDArray[np.int64],
    cost_M: NDArray[np.float64],
    bin_M: NDArray[np.int64],
    tokens_N: NDArray[np.int64],
    group_N: NDArray[np.int64],
    ranks: int,
    cap: int,
    tolerance: float,
    tries: int,
) -> int:
    """Lowers the most expensive group of every pool, in place; returns the number of swaps. At most `tries` pairs of
    groups are looked at in a pool.

    A pool is done when its most expensive group is within `tolerance` (relative) of what cannot be beaten, the mean or the
    most expensive single item, or when no partner has a swap that helps. Items must ascend by cost in M's order.
    """
    groups = 0
    for group in group_N:
        groups = max(groups, group + 1)
    pools = (groups + ranks - 1) // ranks
    start_G = np.zeros(pools * ranks + 1, np.int64)
    for m in range(bin_M.size):
        start_G[group_N[bin_M[m]] + 1] += 1
    for g in range(pools * ranks):
        start_G[g + 1] += start_G[g]
    fill_G = start_G[:-1].copy()
    item_M = np.empty(bin_M.size, np.int64)
    load_G = np.zeros(pools * ranks)
    for m in range(bin_M.size):
        group = group_N[bin_M[m]]
        item_M[fill_G[group]] = m
        fill_G[group] += 1
        load_G[group] += cost_M[m]
    tried_R = np.zeros(ranks, np.int64)
    done, stamp = 0, 0
    for pool in range(pools):
        base = pool * ranks
        floor = 0.0
        for g in range(base, base + ranks):
            floor += load_G[g] / ranks
        for g in range(base, base + ranks):
            if start_G[g + 1] > start_G[g]:
                floor = max(floor, cost_M[item_M[start_G[g + 1] - 1]])
        left = tries
        while left > 0:
            heavy = base
            for g in range(base, base + ranks):
                if load_G[g] > load_G[heavy]:
                    heavy = g
            if load_G[heavy] <= floor * (1 + tolerance):
                break
            stamp += 1
            tried_R[heavy - base] = stamp
            found = False
            while not found and left > 0:
                left -= 1
                light = -1
                for g in range(base, base + ranks):
                    if tried_R[g - base] != stamp and (light < 0 or load_G[g] < load_G[light]):
                        light = g
                if light < 0 or load_G[light] >= load_G[heavy]:
                    break
                tried_R[light - base] = stamp
                gap = load_G[heavy] - load_G[light]
                i, j = _best_swap(
                    item_M, start_G[heavy], start_G[heavy + 1], start_G[light], start_G[light + 1], gap,
                    floor * tolerance / 4, length_M, cost_M, bin_M, tokens_N, cap,
                )  # fmt: skip
                # A swap that moves next to nothing would go on for ever.
                if i >= 0:
                    give, take = item_M[i], item_M[j]
                    moved = cost_M[give] - cost_M[take]
                    if min(moved, gap - moved) > floor * 1e-9:
                        found = True
                        more = length_M[give] - length_M[take]
                        tokens_N[bin_M[give]] -= more
                        tokens_N[bin_M[take]] += more
                        bin_M[give], bin_M[take] = bin_M[take], bin_M[give]
                        load_G[heavy] -= moved
                        load_G[light] += moved
                        _replace(item_M, start_G[heavy], start_G[heavy + 1], i, take, cost_M)
                        _replace(item_M, start_G[light], start_G[light + 1], j, give, cost_M)
            if not found:
                break
            done += 1
    return done
