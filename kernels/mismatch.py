"""How far the trainer's log-probabilities are from the sampler's. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rollwire.schemas.errors import PlanViolation
from rollwire.schemas.records import Mismatch, MismatchBy


def mismatch(logp_pi_S: NDArray[np.float32], logp_mu_S: NDArray[np.float32]) -> Mismatch:
    """|log pi - log mu| over S tokens, and two estimators of KL(mu || pi) from tokens drawn from mu.

    k1 = mean(log mu - log pi), k3 = mean((r - 1) - log r) with r = pi / mu (Schulman 2020, "Approximating KL
    divergence"). Percentiles are the smallest value that at least that share of tokens does not exceed (no
    interpolation: a reported value was observed). Computed in float64. Raises `PlanViolation` for no tokens, unequal
    lengths or values that are not finite.
    """
    log_r_S = _log_ratios(logp_pi_S, logp_mu_S)
    apart_S = np.abs(log_r_S)
    p50, p99, largest = _percentiles(apart_S)
    return Mismatch(
        tokens=int(log_r_S.size),
        mean=float(apart_S.mean()),
        p50=p50,
        p99=p99,
        max=largest,
        k1=float(-log_r_S.mean()),
        k3=float((np.expm1(log_r_S) - log_r_S).mean()),
    )


def mismatch_by(
    logp_pi_S: NDArray[np.float32],
    logp_mu_S: NDArray[np.float32],
    versions_S: NDArray[np.int64],
    source_S: NDArray[np.int64],
    sources: Sequence[tuple[str, str]],
) -> tuple[MismatchBy, ...]:
    """|log pi - log mu| by environment, fleet and version; `source_S` says for each token which (environment, fleet) of
    `sources` it is from.

    In the order of environment and fleet: first all versions together, then version by version. Rows of one kind cover
    every token once. Percentiles and errors as `mismatch`.
    """
    apart_S = np.abs(_log_ratios(logp_pi_S, logp_mu_S))
    if not len(versions_S) == len(source_S) == len(apart_S):
        raise PlanViolation(f"{len(versions_S)} versions, {len(source_S)} sources, {len(apart_S)} logprobs")
    rows: list[MismatchBy] = []
    for name in sorted(set(sources)):
        # Ranks and microbatches number their sources on their own, so one name may have many numbers.
        mine_S = np.isin(source_S, [index for index, one in enumerate(sources) if one == name])
        if not mine_S.any():
            continue
        rows.append(_row(None, name, apart_S[mine_S]))
        rows.extend(
            _row(int(version), name, apart_S[mine_S & (versions_S == version)])
            for version in np.unique(versions_S[mine_S])
        )
    return tuple(rows)


def _row(version: int | None, source: tuple[str, str], apart_S: NDArray[np.float64]) -> MismatchBy:
    p50, p99, largest = _percentiles(apart_S)
    return MismatchBy(
        version=version,
        environment=source[0],
        fleet=source[1],
        tokens=int(apart_S.size),
        p50=p50,
        p99=p99,
        max=largest,
    )


def _log_ratios(logp_pi_S: NDArray[np.float32], logp_mu_S: NDArray[np.float32]) -> NDArray[np.float64]:
    if logp_pi_S.shape != logp_mu_S.shape or logp_pi_S.ndim != 1 or logp_pi_S.size == 0:
        raise PlanViolation(f"mismatch of arrays of shape {logp_pi_S.shape} and {logp_mu_S.shape}")
    log_r_S = logp_pi_S.astype(np.float64) - logp_mu_S.astype(np.float64)
    if not np.isfinite(log_r_S).all():
        raise PlanViolation("a log-probability is not finite")
    return log_r_S


def _percentiles(apart_S: NDArray[np.float64]) -> tuple[float, float, float]:
    """p50, p99 and the largest."""
    p50, p99 = np.quantile(apart_S, [0.5, 0.99], method="inverted_cdf")
    return float(p50), float(p99), float(apart_S.max())
