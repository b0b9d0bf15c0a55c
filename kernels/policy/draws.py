"""Draws that depend on a request's seed and its token's index alone. Needs no torch.

The generator is counter-based: SplitMix64 (Steele, Lea, Flood 2014) started at the mixed seed and jumped to the index.
A request gets the same uniforms in any batch, after any restart, next to any neighbour.

Legend: B rows, V vocabulary.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

_STEP: Final = np.uint64(0x9E3779B97F4A7C15)


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def uniforms(seeds_B: NDArray[np.uint64], index_B: NDArray[np.int64]) -> NDArray[np.float64]:
    """f64 in [0, 1), 53 bits each: draw number `index` of every seed."""
    state_B = _mix(seeds_B + _STEP) + (index_B.astype(np.uint64) + np.uint64(1)) * _STEP
    return (_mix(state_B) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def draw(
    logp_BV: NDArray[np.float32], uniforms_B: NDArray[np.float64], temperature_B: NDArray[np.float64]
) -> NDArray[np.int64]:
    """One token a row by inverse CDF, from softmax(logp / temperature); temperature 0 takes the likeliest."""
    cold_B = temperature_B == 0
    scaled_BV = logp_BV.astype(np.float64) / np.where(cold_B, 1.0, temperature_B)[:, None]
    weights_BV = np.exp(scaled_BV - scaled_BV.max(1, keepdims=True))
    cdf_BV = weights_BV.cumsum(1)
    # The product is below the last entry except by rounding; then the count would point behind the vocabulary.
    below_B = (cdf_BV <= (uniforms_B * cdf_BV[:, -1])[:, None]).sum(1)
    last_B = weights_BV.shape[1] - 1 - (weights_BV[:, ::-1] > 0).argmax(1)
    tokens_B: NDArray[np.int64] = np.where(cold_B, logp_BV.argmax(1), np.minimum(below_B, last_B))
    return tokens_B
