"""The supervised phase before RL: the policy learns the form of an answer from demonstrations.

Next-token cross-entropy on the completions, plus the load-balancing loss of the Switch Transformer (Fedus et al. 2021)
as Hugging Face scales it, taken per layer. One thread and a seed fix every bit of the result.

Legend: N demonstrations, W the widest one, B batch, T tokens end to end, L layers, E experts, K experts a token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollwire.kernels.policy.config import PolicyConfig
from rollwire.kernels.policy.model import PackedOutput, Policy
from rollwire.kernels.policy.states import to_state
from rollwire.kernels.tensors import State
from rollwire.schemas.errors import ConfigError

WARM_UP_STEPS: Final = 20
FINAL_SHARE: Final = 0.1  # of the learning rate, at the last step
CLIP: Final = 1.0
BALANCE: Final = 0.01


class Demonstrations(Protocol):
    """What an environment hands over; only the first `lengths_N[n]` tokens of a row count."""

    @property
    def tokens_NW(self) -> NDArray[np.int64]: ...

    @property
    def loss_mask_NW(self) -> NDArray[np.bool_]: ...

    @property
    def lengths_N(self) -> NDArray[np.int64]: ...


def learning_rate_at(step: int, steps: int, peak: float) -> float:
    """Linear warm-up, then linear decay to `FINAL_SHARE` at the last of steps 0..steps-1."""
    if step < WARM_UP_STEPS:
        return peak * (step + 1) / WARM_UP_STEPS
    left = (steps - 1 - step) / max(1, steps - 1 - WARM_UP_STEPS)
    return peak * (FINAL_SHARE + (1 - FINAL_SHARE) * left)


def balance_loss(output: PackedOutput) -> Tensor:
    """E * sum over e of (assignments of e per token) * (mean probability of e), mean over layers; K when balanced."""
    experts = output.router_logits_TLE.shape[-1]
    probability_LE = output.router_logits_TLE.softmax(-1).mean(0)
    used = torch.nn.functional.one_hot(output.router_TLK, experts).sum(2)
    return experts * (used.to(torch.float32).mean(0) * probability_LE).sum(-1).mean()


def warm_start(
    config: PolicyConfig,
    demonstrations: Demonstrations,
    *,
    seed: int,
    steps: int = 300,
    batch_size: int = 128,
    learning_rate: float = 3e-3,
    progress: Callable[[int, float], None] | None = None,
) -> State:
    """F32 weights after `steps` AdamW steps; `progress(steps done, loss)` is called after each.

    Batches walk through seeded permutations of the demonstrations. Raises `ConfigError` when there are fewer
    demonstrations than one batch holds.
    """
    rows = len(demonstrations.lengths_N)
    if rows < batch_size:
        raise ConfigError(f"{rows} demonstrations do not fill one batch of {batch_size}")
    rng = np.random.default_rng(seed)
    policy = Policy(config, seed=seed)
    optimiser = torch.optim.AdamW(
        policy.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.01, fused=True
    )
    order = rng.permutation(rows)
    at = 0
    for step in range(steps):
        if at + batch_size > rows:
            order, at = rng.permutation(rows), 0
        chosen_B = order[at : at + batch_size]
        at += batch_size
        loss = _loss(policy, demonstrations, chosen_B)
        for group in optimiser.param_groups:
            group["lr"] = learning_rate_at(step, steps, learning_rate)
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(policy.parameters(), CLIP)
        optimiser.step()
        if progress is not None:
            progress(step + 1, float(loss.detach()))
    return to_state(policy, "F32")


def _loss(policy: Policy, demonstrations: Demonstrations, chosen_B: NDArray[np.int64]) -> Tensor:
    lengths_B = demonstrations.lengths_N[chosen_B]
    inside_BW = np.arange(demonstrations.tokens_NW.shape[1])[None, :] < lengths_B[:, None]
    tokens_T = torch.from_numpy(demonstrations.tokens_NW[chosen_B][inside_BW])
    target_S = torch.from_numpy(np.flatnonzero(demonstrations.loss_mask_NW[chosen_B][inside_BW]))
    output = policy.forward_packed(tokens_T, np.concatenate([[0], np.cumsum(lengths_B)]))
    prediction_SV = output.logits_TV.index_select(0, target_S - 1)
    return torch.nn.functional.cross_entropy(prediction_SV, tokens_T[target_S]) + BALANCE * balance_loss(
        output
    )
