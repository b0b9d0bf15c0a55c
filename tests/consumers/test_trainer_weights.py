"""The trainer's weights: what an update does, and what it leaves alone."""

from __future__ import annotations

import math

import pytest
import torch

from rollwire.consumers.trainer.config import TrainerConfig
from rollwire.consumers.trainer.weights import TrainedWeights
from rollwire.kernels.policy.config import PolicyConfig
from rollwire.kernels.policy.model import Policy
from rollwire.kernels.policy.states import to_state

pytestmark = pytest.mark.torch


def test_a_gradient_that_is_not_finite_skips_the_step_and_leaves_every_bit() -> None:
    weights = TrainedWeights(PolicyConfig(), TrainerConfig())
    weights.load(to_state(Policy(PolicyConfig(), seed=1), "F32"))
    weights.gradient_N.fill_(0.01)
    assert weights.update(1) > 0
    before = weights.snapshot()
    weights.gradient_N[7] = float("nan")
    assert math.isnan(weights.update(2))
    after = weights.snapshot()
    assert after.updates == before.updates == 1
    for left, right in zip(before[:3], after[:3], strict=True):
        assert torch.equal(left, right)
    assert not weights.gradient_N.any()
