"""Which experts a token uses: the router's own, those recorded when it was sampled, or these where they are plausible.

Trainer and sampler round differently, so near a tie their routers choose differently, and one other expert changes a
token's probability far more than rounding does. Replay uses the recorded experts. But after a few updates, or for a row
damaged on its way, a recorded expert can be one that the trainer's router would never use; its gate is then tiny
and its gradient noise. The plausibility filter (Cursor, Composer 2 report: router replay with a plausibility filter) replaces
such an expert by the router's own candidate:

    expert e of a recorded row stays  <=>  p_e >= ratio * p_(k)      p = softmax(router logits) in the trainer,
                                                                      p_(k) = the k-th largest: the last of its own top-k

The report does not publish its threshold; a share of p_(k) is scale-free and needs only differences of logits. At
equal weights every recorded expert is one of the top-k, so nothing is replaced.

Legend: T tokens, H hidden, L layers, E experts, K experts a token.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from rollwire.kernels.policy.config import PolicyConfig
from rollwire.schemas.errors import PlanViolation


class Replay(NamedTuple):
    """What is done with recorded experts."""

    follow: bool = True  # use them; False = the router is free, and the filter only counts
    plausible: float | None = None  # the ratio below which an expert is replaced; None = all are followed


class Routing(NamedTuple):
    used_TK: Tensor  # i64
    own_TK: Tensor  # i64
    gates_TK: Tensor  # f32
    logits_TE: Tensor  # f32
    implausible: Tensor | None  # i64 scalar: recorded experts below the threshold; None = not looked at


def check_routes(routes_TLK: Tensor | None, tokens: int, config: PolicyConfig) -> Tensor | None:
    """The recorded routes as i64, or None. Raises `PlanViolation`: an id that is no expert is never clamped (C22)."""
    if routes_TLK is None:
        return None
    shape = (tokens, config.num_hidden_layers, config.num_experts_per_tok)
    if tuple(routes_TLK.shape) != shape:
        raise PlanViolation(f"routes have shape {tuple(routes_TLK.shape)}, expected {shape}")
    if int(routes_TLK.max()) >= config.num_experts:
        raise PlanViolation(f"expert id {int(routes_TLK.max())} of {config.num_experts} experts")
    return routes_TLK.to(torch.int64)


def route(
    normed_TH: Tensor,
    router_EH: Tensor,
    config: PolicyConfig,
    recorded_TK: Tensor | None,
    replay: Replay | None = None,
) -> Routing:
    """Top-k of the router's softmax, overridden where experts were recorded (every id of the row >= 0), as `replay`
    says; None = follow them all. Gates are the router's softmax at the experts used, so gradient flows through them."""
    logits_TE = nn.functional.linear(normed_TH, router_EH)
    probs_TE = logits_TE.softmax(-1)
    own_TK = probs_TE.detach().topk(config.num_experts_per_tok, -1).indices
    used_TK, implausible = own_TK, None
    if recorded_TK is not None:
        known_T1 = recorded_TK.amin(1, True) >= 0
        wanted_TK = recorded_TK
        if replay is not None and replay.plausible is not None:
            with torch.no_grad():
                wanted_TK, replaced_TK = plausible(
                    logits_TE.detach(), own_TK, recorded_TK.clamp(min=0), replay.plausible
                )
                implausible = (replaced_TK & known_T1).sum()
        if replay is None or replay.follow:
            used_TK = torch.where(known_T1, wanted_TK, own_TK)
    gates_TK = probs_TE.gather(1, used_TK)
    if config.norm_topk_prob:
        gates_TK = gates_TK / gates_TK.sum(-1, keepdim=True)
    return Routing(used_TK, own_TK, gates_TK, logits_TE, implausible)


def plausible(logits_TE: Tensor, own_TK: Tensor, recorded_TK: Tensor, ratio: float) -> tuple[Tensor, Tensor]:
    """(experts [T, K], replaced [T, K]): each recorded expert, or where it is implausible the best of the router's own
    that the row does not use yet. Order is kept; a row never holds an expert twice.

    There are always enough: K of its own, of which at most as many as are kept stand in the row already.
    """
    kth_T1 = logits_TE.gather(1, own_TK).amin(1, True)
    stays_TK = logits_TE.gather(1, recorded_TK) >= kth_T1 + math.log(ratio)
    taken_TK = ((own_TK.unsqueeze(2) == recorded_TK.unsqueeze(1)) & stays_TK.unsqueeze(1)).any(2)
    # The router's candidates that are free, in its order of preference, then those that are taken.
    candidates_TK = own_TK.gather(1, taken_TK.to(torch.int8).argsort(dim=1, stable=True))
    turn_TK = ((~stays_TK).cumsum(1) - 1).clamp(min=0)
    return torch.where(stays_TK, recorded_TK, candidates_TK.gather(1, turn_TK)), ~stays_TK
