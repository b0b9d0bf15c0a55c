"""How far the trainer's log-probabilities are from the sampler's. Needs no torch."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rollwire.schemas.errors import PlanViolation
from rollwire.schemas.records import Mismatch


def mismatch(logp_pi_S: NDArray[np.float32], logp_mu_S: NDArray[np.float32]) -> Mismatch:
    """|log pi - log mu| over S tokens, and two estimators of KL(mu || pi) from tokens drawn from mu.

    k1 = mean(log mu - log pi), k3 = mean((r - 1) - log r) with r = pi / mu (Schulman 2020, "Approximating KL
    divergence"). Percentiles are the smallest value that at least that share of tokens does not exceed (no
    interpolation: a reported value was observed). Computed in float64. Raises `PlanViolation` for no tokens, unequal
    lengths or values that are not finite.
    """
    if logp_pi_S.shape != logp_mu_S.shape or logp_pi_S.ndim != 1 or logp_pi_S.size == 0:
        raise PlanViolation(f"mismatch of arrays of shape {logp_pi_S.shape} and {logp_mu_S.shape}")
    log_r_S = logp_pi_S.astype(np.float64) - logp_mu_S.astype(np.float64)
    if not np.isfinite(log_r_S).all():
        raise PlanViolation("a log-probability is not finite")
    sorted_S = np.sort(np.abs(log_r_S))
    p50, p99 = np.quantile(sorted_S, [0.5, 0.99], method="inverted_cdf")
    return Mismatch(
        tokens=int(log_r_S.size),
        mean=float(sorted_S.mean()),
        p50=float(p50),
        p99=float(p99),
        max=float(sorted_S[-1]),
        k1=float(-log_r_S.mean()),
        k3=float((np.expm1(log_r_S) - log_r_S).mean()),
    )
