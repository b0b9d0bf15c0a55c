"""What one rank measured while it computed a step, and the `train-steps` event of all of them. Needs no torch.

Legend: S trained tokens, in the order of ranks and microbatches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from rollwire.consumers.packed_batches import Plan
from rollwire.consumers.trainer.measure import lag_histogram
from rollwire.kernels.mismatch import mismatch, mismatch_by
from rollwire.schemas.errors import PlanViolation
from rollwire.schemas.records import Mismatch, OffsetRange, PackedBatch, TrainStep

NOT_MEASURED: Final = Mismatch(
    tokens=0, mean=math.nan, p50=math.nan, p99=math.nan, max=math.nan, k1=math.nan, k3=math.nan
)


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Of one rank and step. Arrays are little-endian bytes, since they cross a pipe."""

    loss: float  # this rank's sum over sequences, divided by the plan's total
    pi: bytes  # [S] f4 log pi as trained
    mu: bytes  # [S] f4 log mu as sampled
    free_pi: bytes | None  # [S] f4 log pi with a free router; None = not measured
    versions: bytes  # [S] i8
    sources: tuple[tuple[str, str], ...]  # environment and fleet, one a sequence
    source_of: bytes  # [S] i8: which of `sources` each token is from
    entropy_sum: float  # nats
    truncated: int  # tokens whose ratio hit its bound
    routes_differing: int = 0  # (token, layer) pairs whose set of experts differs from the recorded one
    routes_compared: int = 0  # 0 = not measured
    masked_low: int = 0  # tokens that the corrections left out
    masked_high: int = 0
    rejected_sequences: int = 0
    rejected_tokens: int = 0
    production_sequences: int = 0  # of live traffic, as the plan has them
    erased_sequences: int = 0  # of them, those that open no more
    implausible: tuple[
        int, ...
    ] = ()  # [L] recorded experts that the filter found implausible; empty = filter off


def figures_of(
    plan: Plan,
    logp_S: NDArray[np.float32],
    *,
    loss: float = 0.0,
    entropy_sum: float = 0.0,
    truncated: int = 0,
) -> Figures:
    """What one rank measured, of its plan and log pi of its trained tokens in the plan's order."""
    sources = [arrays.sources_B for arrays in plan.arrays]
    first = np.cumsum([0, *map(len, sources)])
    counted = [arrays.sequence_S + at for arrays, at in zip(plan.arrays, first[:-1], strict=True)]
    return Figures(
        loss=loss,
        pi=np.asarray(logp_S, "<f4").tobytes(),
        mu=b"".join(arrays.logp_S.tobytes() for arrays in plan.arrays),
        free_pi=None,
        versions=b"".join(arrays.versions_S.tobytes() for arrays in plan.arrays),
        sources=tuple(source for some in sources for source in some),
        source_of=np.concatenate([np.zeros(0, "<i8"), *counted]).astype("<i8").tobytes(),
        entropy_sum=entropy_sum,
        truncated=truncated,
        production_sequences=plan.sealed,
        erased_sequences=plan.left_out,
    )


def train_step(
    plan: PackedBatch,
    figures: Sequence[Figures],
    consumed: tuple[OffsetRange, ...],
    *,
    grad_norm: float,
    learning_rate: float,
    duration_s: float,
    settings: dict[str, str],
) -> TrainStep:
    """The event of a step; `state_digest` and `finished_us` are filled in when its version stands in the store.

    Raises `PlanViolation` for a plan that trains on no token at all, unless that is because all of it was erased: that
    step measured nothing.
    """
    pi_S = _joined([one.pi for one in figures], "<f4")
    mu_S = _joined([one.mu for one in figures], "<f4")
    versions_S = _joined([one.versions for one in figures], "<i8")
    erased = sum(one.erased_sequences for one in figures)
    if pi_S.size == 0 and not erased:
        raise PlanViolation(f"the plan of step {plan.step} trains on no token")
    trained = max(1, pi_S.size)  # of shares of none
    # Every rank numbers its sources from 0.
    first = np.cumsum([0, *(len(one.sources) for one in figures)])
    source_S = np.concatenate(
        [np.frombuffer(one.source_of, "<i8") + at for one, at in zip(figures, first[:-1], strict=True)]
    )
    sources = [source for one in figures for source in one.sources]
    same_S = versions_S == plan.base_version
    free = [one.free_pi for one in figures if one.free_pi is not None]
    compared = sum(one.routes_compared for one in figures)
    return TrainStep(
        model=plan.model,
        lineage=plan.lineage,
        step=plan.step,
        base_version=plan.base_version,
        version=plan.base_version + 1,
        loss=sum(one.loss for one in figures),
        grad_norm=grad_norm,
        entropy=sum(one.entropy_sum for one in figures) / pi_S.size if pi_S.size else math.nan,
        learning_rate=learning_rate,
        reward_mean=plan.reward_mean,
        sequences=plan.total_sequences,
        tokens=plan.total_tokens,
        trained_tokens=int(pi_S.size),
        groups=len(plan.group_ids),
        max_lag=plan.base_version - plan.oldest_version,
        lag_histogram=lag_histogram(versions_S, plan.base_version),
        mismatch=mismatch(pi_S, mu_S) if pi_S.size else NOT_MEASURED,
        mismatch_same_version=mismatch(pi_S[same_S], mu_S[same_S]) if same_S.any() else None,
        mismatch_no_replay=mismatch(_joined(free, "<f4"), mu_S) if free and pi_S.size else None,
        routes_differing=sum(one.routes_differing for one in figures) / compared if compared else None,
        ratio_truncated=sum(one.truncated for one in figures) / trained,
        tokens_per_s=plan.total_tokens / duration_s,
        duration_ms=duration_s * 1e3,
        consumed=consumed,
        plan_digest=plan.plan_digest,
        state_digest="",
        settings=settings,
        finished_us=0,
        mismatch_by=mismatch_by(pi_S, mu_S, versions_S, source_S, sources) if pi_S.size else (),
        masked_low=sum(one.masked_low for one in figures),
        masked_high=sum(one.masked_high for one in figures),
        rejected_sequences=sum(one.rejected_sequences for one in figures),
        rejected_tokens=sum(one.rejected_tokens for one in figures),
        routes_implausible=tuple(map(sum, zip(*(one.implausible for one in figures), strict=True))),
        coverage=plan.coverage,
        production_sequences=sum(one.production_sequences for one in figures),
        erased_sequences=erased,
    )


def _joined(parts: Sequence[bytes], dtype: str) -> NDArray[Any]:
    return np.frombuffer(b"".join(parts), dtype)
