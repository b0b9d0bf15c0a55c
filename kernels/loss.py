"""The policy-gradient loss of one microbatch.

REINFORCE with given advantages (Williams 1992), no length normalisation, one truncated importance ratio per token
(Ionides 2008; as "TIS" in recent RL systems) and a k1 penalty towards the rollout policy; tokens and sequences that
disagree too much can be left out (`rollwire.kernels.corrections`). Everything is a plain sum over sequences divided by
the step's total, so how a step is cut into microbatches and ranks does not change its gradient.

Legend: B sequences, T tokens end to end, S trained tokens in order, L layers, K experts a token, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from rollwire.kernels.corrections import CorrectionConfig
from rollwire.kernels.loss_corrections import Kept, all_kept, keep
from rollwire.kernels.policy.layout import packed_layout
from rollwire.kernels.policy.model import Policy
from rollwire.kernels.policy.routing import Replay
from rollwire.schemas.errors import PlanViolation
from rollwire.schemas.records import Microbatch


class LossConfig(CorrectionConfig):
    """Switches of the loss; the defaults are the demo's."""

    use_ratio: bool = Field(
        default=True, description="Weight each token by min(pi/mu, ratio_bound), without gradient."
    )
    ratio_bound: float = Field(default=2.0, gt=0, description="Upper bound of the ratio pi/mu.")
    kl_coefficient: float = Field(default=0.0, ge=0, description="Weight of the k1 penalty log pi - log mu.")
    replay_routes: bool = Field(
        default=True, description="Use the recorded experts instead of the router's choice."
    )
    filter_routes: bool = Field(
        default=False,
        description="Replace recorded experts that are implausible by the router's own; without replay, only count them.",
    )
    plausible_ratio: float = Field(
        default=0.5,
        gt=0,
        le=1,
        description="A recorded expert is plausible from this share of the router's k-th largest probability on.",
    )


class LossBatch(NamedTuple):
    """One microbatch, checked."""

    tokens_T: Tensor  # i64
    cu_seqlens: NDArray[np.int32]  # [B + 1]
    target_S: (
        Tensor  # i64: indices into T of the trained tokens, ascending; none is the first of its sequence
    )
    sequence_S: Tensor  # i64: the sequence of each trained token
    logp_mu_S: Tensor  # f32
    advantages_B: Tensor  # f32
    total_sequences: int  # of the whole step, over all ranks
    routes_TLK: Tensor | None  # integers; an id below 0 = not recorded


class LossResult(NamedTuple):
    loss: Tensor  # scalar with gradient; the step's loss is the sum over its microbatches
    logp_S: Tensor  # f32, detached: log pi of each trained token
    entropy_S: Tensor  # f32, detached, nats: of the distribution each trained token was drawn from
    truncated_S: Tensor  # bool: where the ratio hit its bound (all False without the ratio)
    router_TLK: Tensor  # i64: the experts that the router itself chose
    implausible_L: Tensor | None  # i64: recorded experts that the filter found implausible; None = filter off
    kept: Kept  # what the corrections left in


def loss_batch(
    tokens_T: NDArray[np.int64],
    cu_seqlens: NDArray[np.int32],
    loss_mask_T: NDArray[np.bool_],
    logp_mu_S: NDArray[np.float32],
    advantages_B: NDArray[np.float32],
    *,
    total_sequences: int,
    routes_TLK: NDArray[np.int16] | None = None,
) -> LossBatch:
    """Raises `PlanViolation` where lengths do not fit, a first token is trained on, or a number is not finite."""
    target_S = np.flatnonzero(loss_mask_T)
    sequence_S = np.searchsorted(cu_seqlens, target_S, side="right") - 1
    if len(loss_mask_T) != len(tokens_T) or len(logp_mu_S) != len(target_S):
        raise PlanViolation(
            f"{len(tokens_T)} tokens, mask of {len(loss_mask_T)} with {len(target_S)} set, {len(logp_mu_S)} logprobs"
        )
    if len(advantages_B) != len(cu_seqlens) - 1 or total_sequences < 1:
        raise PlanViolation(
            f"{len(advantages_B)} advantages for {len(cu_seqlens) - 1} of {total_sequences} sequences"
        )
    if np.isin(target_S, cu_seqlens).any():
        raise PlanViolation("the first token of a sequence has no prediction and cannot be trained on")
    if not (np.isfinite(logp_mu_S).all() and np.isfinite(advantages_B).all()):
        raise PlanViolation("a logprob or an advantage is not finite")
    return LossBatch(
        torch.tensor(tokens_T, dtype=torch.int64),
        cu_seqlens,
        torch.from_numpy(target_S),
        torch.from_numpy(sequence_S),
        torch.tensor(logp_mu_S, dtype=torch.float32),
        torch.tensor(advantages_B, dtype=torch.float32),
        total_sequences,
        None if routes_TLK is None else torch.tensor(routes_TLK, dtype=torch.int64),
    )


def batch_of(
    microbatch: Microbatch, *, total_sequences: int, routes_TLK: NDArray[np.int16] | None = None
) -> LossBatch:
    """The arrays of a microbatch record. Raises `PlanViolation` as `loss_batch`."""
    return loss_batch(
        np.frombuffer(microbatch.token_ids, dtype="<u4").astype(np.int64),
        np.frombuffer(microbatch.cu_seqlens, dtype="<i4"),
        np.frombuffer(microbatch.loss_mask, dtype=np.uint8) != 0,
        np.frombuffer(microbatch.logprobs, dtype="<f4"),
        np.frombuffer(microbatch.advantages, dtype="<f4"),
        total_sequences=total_sequences,
        routes_TLK=routes_TLK,
    )


def policy_gradient(policy: Policy, batch: LossBatch, settings: LossConfig) -> LossResult:
    """loss = -(1 / total_sequences) * sum over s of w_s * (A_b(s) - c (log pi_s - log mu_s)) * log pi_s

    with w_s = min(pi_s / mu_s, bound), or 1 without the ratio, and 0 where a correction leaves s out; w and the penalty
    carry no gradient. (The k1 estimator differentiated as a loss has a gradient of mean zero, so the penalty belongs
    beside the reward.)
    """
    layout = packed_layout(batch.cu_seqlens, batch.tokens_T.device)
    output = policy.forward_packed(
        batch.tokens_T,
        layout,
        batch.routes_TLK if settings.replay_routes or settings.filter_routes else None,
        Replay(settings.replay_routes, settings.plausible_ratio if settings.filter_routes else None),
    )
    # A token's distribution stands at the token before it.
    logp_SV = output.logits_TV.index_select(0, batch.target_S - 1).log_softmax(-1)
    logp_S = logp_SV.gather(1, batch.tokens_T[batch.target_S].unsqueeze(1)).squeeze(1)
    with torch.no_grad():
        log_ratio_S = logp_S - batch.logp_mu_S
        sequences = len(batch.advantages_B)
        kept = (
            keep(log_ratio_S, batch.sequence_S, sequences, settings)
            if settings.corrects
            else all_kept(log_ratio_S, sequences)
        )
        weight_S = batch.advantages_B[batch.sequence_S]
        if settings.kl_coefficient:
            weight_S = weight_S - settings.kl_coefficient * log_ratio_S
        truncated_S = torch.zeros_like(log_ratio_S, dtype=torch.bool)
        if settings.use_ratio:
            ratio_S = log_ratio_S.exp()
            truncated_S = ratio_S > settings.ratio_bound
            weight_S = weight_S * ratio_S.clamp(max=settings.ratio_bound)
        entropy_S = -(logp_SV.exp() * logp_SV).sum(-1)
    counted_S = logp_S
    if settings.corrects:
        # Not a factor 0, which an infinite ratio or logprob would turn into NaN: a left-out token is not there.
        weight_S = weight_S.where(kept.kept_S, 0.0)
        counted_S = logp_S.where(kept.kept_S, 0.0)
        truncated_S = truncated_S & kept.kept_S
    loss = -(weight_S * counted_S).sum() / batch.total_sequences
    return LossResult(
        loss, logp_S.detach(), entropy_S, truncated_S, output.router_TLK, output.implausible_L, kept
    )
