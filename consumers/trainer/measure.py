"""Lag and routing of one step, from per-token arrays. Pure numpy.

Legend: S trained tokens, T tokens, L layers, K experts a token.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rollwire.schemas.records import LagCount


def lag_histogram(versions_S: NDArray[np.int64], base_version: int) -> tuple[LagCount, ...]:
    """Trained tokens by lag, ascending."""
    lags, counts = np.unique(base_version - versions_S, return_counts=True)
    return tuple(LagCount(lag=int(lag), tokens=int(count)) for lag, count in zip(lags, counts, strict=True))


def routes_differing(recorded_TLK: NDArray[np.int16], free_TLK: NDArray[np.int16]) -> tuple[int, int]:
    """(pairs whose *set* of experts differs, pairs compared) over (token, layer); rows of -1 were not recorded."""
    known_TL = (recorded_TLK >= 0).all(axis=2)
    differs_TL = (np.sort(recorded_TLK, axis=2) != np.sort(free_TLK, axis=2)).any(axis=2)
    return int((differs_TL & known_TL).sum()), int(known_TL.sum())
