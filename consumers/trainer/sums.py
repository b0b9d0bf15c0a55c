"""Weights that prove what was trained: integers that depend on every rollout, on how often and in which order. Pure.

With h(x) the 64-bit hash of one trained rollout (its id, tokens, mask, logprobs, versions and advantage, as bits), b = h
modulo BUCKETS, all arithmetic modulo 2^64 and odd constants, so that every step is a bijection:

    folded[b]  = folded[b] * FOLD + h(x)            which rollouts, in which order within a bucket
    counted[b] = counted[b] + 1                     how many, repeats included
    order[k]   = (order[k] + h(x)) * ORDER[k]       all of them, in order over all steps
    steps      = steps + 1                          once a step, rollouts or not

So the digest of a published state is equal to that of `fold` over the same rollouts in the same order, each exactly once,
and to no other that one comes across.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Final, NamedTuple

import numpy as np

from rollwire.kernels.tensors import State, tensor
from rollwire.schemas.records import Microbatch, PackedBatch

BUCKETS: Final = 64
FOLD: Final = 0x9E3779B97F4A7C15
ORDER: Final = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53)
_MASK: Final = (1 << 64) - 1


class Sums(NamedTuple):
    steps: int
    folded: tuple[int, ...]  # [BUCKETS] below 2^64
    counted: tuple[int, ...]  # [BUCKETS]
    order: tuple[int, ...]  # [4] below 2^64

    @property
    def trained(self) -> int:
        """Rollouts trained in all, repeats included."""
        return sum(self.counted)


NOTHING: Final = Sums(0, (0,) * BUCKETS, (0,) * BUCKETS, (0,) * len(ORDER))


def hashes(micro: Microbatch) -> list[int]:
    """h(x) of each sequence, in order."""
    ends = np.frombuffer(micro.cu_seqlens, "<i4").tolist()
    tokens_T = np.frombuffer(micro.token_ids, "<u4")
    mask_T = np.frombuffer(micro.loss_mask, "u1")
    logp_S = np.frombuffer(micro.logprobs, "<f4")
    versions_S = np.frombuffer(micro.versions, "<i8")
    advantages_B = np.frombuffer(micro.advantages, "<f4")
    made: list[int] = []
    first = 0  # of the trained tokens
    for index, name in enumerate(micro.rollout_ids):
        start, end = ends[index], ends[index + 1]
        last = first + int(mask_T[start:end].sum())
        parts = (
            name.encode(),
            tokens_T[start:end].tobytes(),
            mask_T[start:end].tobytes(),
            logp_S[first:last].tobytes(),
            versions_S[first:last].tobytes(),
            advantages_B[index].tobytes(),
        )
        hasher = hashlib.blake2b(digest_size=8)
        for part in parts:
            hasher.update(len(part).to_bytes(8, "little"))
            hasher.update(part)
        made.append(int.from_bytes(hasher.digest(), "little"))
        first = last
    return made


def fold(sums: Sums, slices: Iterable[PackedBatch]) -> Sums:
    """The weights after one step: its slices by rank, their microbatches and sequences in order."""
    folded, counted, order = list(sums.folded), list(sums.counted), list(sums.order)
    for batch in slices:
        for micro in batch.microbatches:
            for value in hashes(micro):
                bucket = value % BUCKETS
                folded[bucket] = (folded[bucket] * FOLD + value) & _MASK
                counted[bucket] += 1
                for k, factor in enumerate(ORDER):
                    order[k] = (order[k] + value) * factor & _MASK
    return Sums(sums.steps + 1, tuple(folded), tuple(counted), tuple(order))


def state_of(sums: Sums) -> State:
    """As a published state; it owns its memory."""
    return {
        "steps": tensor("I64", (), np.array([sums.steps], "<i8")),
        "folded": tensor("U64", (BUCKETS,), np.array(sums.folded, "<u8")),
        "counted": tensor("U32", (BUCKETS,), np.array(sums.counted, "<u4")),
        "order": tensor("U64", (len(ORDER),), np.array(sums.order, "<u8")),
    }


def sums_of(state: State) -> Sums:
    """The inverse of `state_of`."""
    return Sums(
        int(state["steps"].bits.view("<i8")[0]),
        tuple(state["folded"].bits.tolist()),
        tuple(state["counted"].bits.tolist()),
        tuple(state["order"].bits.tolist()),
    )
