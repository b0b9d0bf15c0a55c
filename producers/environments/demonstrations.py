"""Demonstrations for the supervised warm start, laid out as arrays.

N sequences, W the widest one
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Demonstrations(NamedTuple):
    """`tokens_NW` is padded; `loss_mask_NW` is True exactly on what the policy itself would sample."""

    tokens_NW: NDArray[np.int64]
    loss_mask_NW: NDArray[np.bool_]
    lengths_N: NDArray[np.int64]


class Part(NamedTuple):
    """A run of tokens of one demonstration."""

    token_ids: NDArray[np.int64]
    sampled: bool  # by the policy; else prompt or tool result


def lay_out(rows: Sequence[Sequence[Part]], pad_id: int) -> Demonstrations:
    """Each row is the parts of one demonstration, in order."""
    lengths_N = np.array([sum(part.token_ids.size for part in row) for row in rows], dtype=np.int64)
    shape = (len(rows), int(lengths_N.max(initial=0)))
    tokens_NW = np.full(shape, pad_id, dtype=np.int64)
    loss_mask_NW = np.zeros(shape, dtype=np.bool_)
    for n, row in enumerate(rows):
        at = 0
        for ids, sampled in row:
            tokens_NW[n, at : at + ids.size] = ids
            loss_mask_NW[n, at : at + ids.size] = sampled
            at += ids.size
    return Demonstrations(tokens_NW, loss_mask_NW, lengths_N)
