"""Where packed sequences lie: positions, and the padded rows that attention runs on.

T tokens laid end to end, B sequences, R padded rows. Everything but attention runs on the T tokens as they lie; for
attention, sequences of like length share a rectangle. A rectangle's width depends on a sequence's own length alone, so
neighbours never change the shape a sequence is computed in. Padding stands to the right, where a causal mask hides it
from every real token.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollwire.schemas.errors import PlanViolation


class Rectangle(NamedTuple):
    """`rows` consecutive padded rows, as `sequences` x `width`."""

    start: int
    sequences: int
    width: int


class PackedLayout(NamedTuple):
    positions_T: Tensor  # i64, 0 at the start of every sequence
    rectangles: tuple[Rectangle, ...]
    token_R: Tensor  # i64: the token in each padded row; padding repeats the sequence's last token
    row_T: Tensor  # i64: the padded row of each token
    padding: Tensor  # i64: the padded rows without a token of their own


def _width(length: int) -> int:
    """Multiples of 8 up to 64, then powers of two: at most half of a long rectangle is padding."""
    if length <= 64:
        return -(-length // 8) * 8
    return 1 << (length - 1).bit_length()


def packed_layout(
    cu_seqlens: NDArray[np.int32] | NDArray[np.int64], device: torch.device | str = "cpu"
) -> PackedLayout:
    """Layout of sequences [cu[b], cu[b+1]). Raises `PlanViolation` unless cu rises strictly from 0."""
    cu = np.asarray(cu_seqlens, dtype=np.int64)
    lengths_B = np.diff(cu)
    if cu.ndim != 1 or cu.size < 2 or cu[0] != 0 or (lengths_B <= 0).any():
        raise PlanViolation(f"cu_seqlens must rise strictly from 0, got {cu[:8].tolist()}...")
    tokens = int(cu[-1])
    positions_T = np.arange(tokens) - np.repeat(cu[:-1], lengths_B)
    widths_B = np.array([_width(int(n)) for n in range(int(lengths_B.max()) + 1)])[lengths_B]
    rectangles: list[Rectangle] = []
    token_parts: list[NDArray[np.int64]] = []
    row_T = np.empty(tokens, dtype=np.int64)
    start = 0
    for width in np.unique(widths_B):
        members = np.flatnonzero(widths_B == width)
        grid = np.minimum(np.arange(width)[None, :], lengths_B[members, None] - 1) + cu[members, None]
        rectangles.append(Rectangle(start, len(members), int(width)))
        token_parts.append(grid.reshape(-1))
        start += grid.size
    token_R = np.concatenate(token_parts)
    # The first row that holds a token is its own; later ones are padding (padding stands right of its token).
    order = np.arange(start)[::-1]
    row_T[token_R[::-1]] = order
    padding = np.setdiff1d(np.arange(start), row_T, assume_unique=True)
    return PackedLayout(
        torch.from_numpy(positions_T).to(device),
        tuple(rectangles),
        torch.from_numpy(token_R).to(device),
        torch.from_numpy(row_T).to(device),
        torch.from_numpy(padding).to(device),
    )
