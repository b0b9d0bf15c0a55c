"""The trainer's weights: fp32 masters, AdamW's moments, and the policy that computes with the published values.

All parameters lie end to end in flat vectors, in the order of `policy.named_parameters()`: the policy's parameters and
gradients are views, so that a gradient is one vector for the all-reduce, the norm, the optimiser and the checkpoint.
Legend: N parameters end to end.
"""

from __future__ import annotations

from typing import NamedTuple

import structlog
import torch
from torch import Tensor

from rollwire.consumers.trainer.config import TrainerConfig
from rollwire.kernels.policy.config import PolicyConfig
from rollwire.kernels.policy.model import Policy
from rollwire.kernels.policy.states import flat_state, state_flat
from rollwire.kernels.tensors import State
from rollwire.schemas.errors import StateMismatch

logger = structlog.get_logger()


class Snapshot(NamedTuple):
    """Everything that the next step depends on beside its plan, copied."""

    masters_N: Tensor  # f32
    exp_avg_N: Tensor  # f32
    exp_avg_sq_N: Tensor  # f32
    updates: int  # optimiser steps taken; AdamW's bias correction depends on it
    rng: Tensor  # u8: torch's generator


class TrainedWeights:
    """Masters and optimiser of one rank; every rank holds the same."""

    def __init__(self, policy_config: PolicyConfig, config: TrainerConfig) -> None:
        self._config = config
        self.policy = Policy(policy_config)
        self._count = sum(p.numel() for p in self.policy.parameters())
        self.masters_N = torch.zeros(self._count)
        self.gradient_N = torch.zeros(self._count)
        self._forward_N = torch.zeros(self._count)
        self._updates = 0
        self._optimizer = self._make_optimizer()
        start = 0
        for parameter in self.policy.parameters():
            end = start + parameter.numel()
            parameter.data = self._forward_N[start:end].view(parameter.shape)
            parameter.grad = self.gradient_N[start:end].view(parameter.shape)
            start = end

    def load(self, initial: State) -> None:
        """Masters from a state with Hugging Face's on-disk names, moments zero. Raises `StateMismatch`."""
        self.masters_N.copy_(state_flat(self.policy.config, initial))
        self._updates = 0
        self._optimizer = self._make_optimizer()
        torch.manual_seed(self._config.seed)
        self.clear()
        self._refresh()

    def published(self) -> State:
        """The bf16 state that samplers get: the masters, rounded to nearest even. It owns its memory."""
        return flat_state(self.policy.config, self.masters_N, "BF16")

    def update(self, step: int) -> float:
        """Clips the gradient that `gradient_N` holds, applies AdamW, clears it; returns the norm before clipping.

        A gradient that is not finite skips the step: weights and moments stay, and the version it publishes is an empty
        delta. A replay of the same plan meets the same gradient, so to halt here would be to halt for good; the norm
        in `train-steps` tells.
        """
        norm = torch.linalg.vector_norm(self.gradient_N)
        if not bool(torch.isfinite(norm)):
            logger.warning("trainer.skipped", step=step, grad_norm=float(norm))
            self.clear()
            return float(norm)
        # The factor of torch.nn.utils.clip_grad_norm_, without its epsilon: below the bound the bits stay.
        if float(norm) > self._config.clip_norm:
            self.gradient_N.mul_(self._config.clip_norm / norm)
        for group in self._optimizer.param_groups:
            group["lr"] = self._config.rate(step)
        self.masters_N.grad = self.gradient_N
        self._optimizer.step()
        self.masters_N.grad = None
        self._updates += 1
        self.clear()
        self._refresh()
        return float(norm)

    def clear(self) -> None:
        self.gradient_N.zero_()

    def snapshot(self) -> Snapshot:
        state = self._optimizer.state.get(self.masters_N, {})
        zeros = torch.zeros(self._count)
        return Snapshot(
            self.masters_N.clone(),
            state.get("exp_avg", zeros).clone(),
            state.get("exp_avg_sq", zeros).clone(),
            self._updates,
            torch.get_rng_state(),
        )

    def restore(self, snapshot: Snapshot) -> None:
        """Raises `StateMismatch` where the snapshot is of another policy."""
        for vector in snapshot[:3]:
            if vector.shape != (self._count,):
                raise StateMismatch(
                    f"a checkpoint of {vector.numel()} parameters for a policy of {self._count}"
                )
        self.masters_N.copy_(snapshot.masters_N)
        self._optimizer = self._make_optimizer()
        self._updates = snapshot.updates
        if snapshot.updates:
            self._optimizer.state[self.masters_N] = {
                "step": torch.tensor(float(snapshot.updates)),
                "exp_avg": snapshot.exp_avg_N.clone(),
                "exp_avg_sq": snapshot.exp_avg_sq_N.clone(),
            }
        torch.set_rng_state(snapshot.rng)
        self.clear()
        self._refresh()

    def _make_optimizer(self) -> torch.optim.AdamW:
        config = self._config
        return torch.optim.AdamW(
            [self.masters_N],
            lr=config.learning_rate,
            betas=(config.beta1, config.beta2),
            eps=config.epsilon,
            weight_decay=config.weight_decay,
            foreach=False,
            fused=False,
        )

    def _refresh(self) -> None:
        """The policy computes with what is published, or with the masters."""
        with torch.no_grad():
            if self._config.forward == "published":
                # Straight-through: the gradient at the rounded weights is applied to the masters.
                self._forward_N.copy_(self.masters_N.to(torch.bfloat16))
            else:
                self._forward_N.copy_(self.masters_N)
