"""Replay and its plausibility filter: what is replaced, by what, and that gradient still flows through the gates."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from rollwire.kernels.policy.config import PolicyConfig
from rollwire.kernels.policy.model import Policy
from rollwire.kernels.policy.routing import Replay, plausible

pytestmark = pytest.mark.torch

CONFIG = PolicyConfig(num_experts=16, num_experts_per_tok=4)
BOTH = Replay(plausible=0.5)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def policy(seed: int = 3) -> Policy:
    """Routers with opinions: fresh ones find every expert about equally good."""
    made = Policy(CONFIG, seed=seed)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if name.endswith("mlp.gate.weight"):
                parameter.mul_(10)
    return made


def tokens() -> tuple[Tensor, NDArray[np.int32]]:
    cu = np.array([0, 30, 37, 80], np.int32)
    return torch.from_numpy(np.random.default_rng(1).integers(0, CONFIG.vocab_size, 80)), cu


def rounded(source: Policy) -> Policy:
    made = Policy(CONFIG)
    with torch.no_grad():
        for ours, theirs in zip(made.parameters(), source.parameters(), strict=True):
            ours.copy_(theirs.to(torch.bfloat16))
    return made


@pytest.mark.parametrize("ratio", [0.01, 0.5, 1.0])
def test_with_equal_weights_nothing_is_replaced(ratio: float) -> None:
    model, (ids, cu) = policy(), tokens()
    own = model.forward_packed(ids, cu)
    assert own.implausible_L is None
    both = model.forward_packed(ids, cu, own.routes_TLK, Replay(plausible=ratio))
    assert both.implausible_L is not None
    assert both.implausible_L.tolist() == [0, 0, 0]
    assert torch.equal(both.logits_TV, own.logits_TV)


def test_rounded_weights_choose_differently_and_stay_plausible() -> None:
    model, (ids, cu) = policy(), tokens()
    recorded = rounded(model).forward_packed(ids, cu).routes_TLK
    both = model.forward_packed(ids, cu, recorded, BOTH)
    assert (both.router_TLK.sort(2).values != recorded.sort(2).values).any()
    assert torch.equal(both.routes_TLK, recorded)
    assert both.implausible_L is not None
    assert not both.implausible_L.any()


def test_a_planted_expert_is_replaced_by_the_routers_candidate_and_counted_by_layer() -> None:
    model, (ids, cu) = policy(), tokens()
    own = model.forward_packed(ids, cu)
    recorded = own.routes_TLK.clone()
    worst = own.router_logits_TLE.argmin(2)
    recorded[10, 1, 2] = worst[10, 1]
    recorded[50, 1, 0] = worst[50, 1]
    recorded[70, 2] = -1
    both = model.forward_packed(ids, cu, recorded, BOTH)
    assert both.implausible_L is not None
    assert both.implausible_L.tolist() == [0, 2, 0]
    # The candidate is the one of the router's own that the plant had displaced, at the plant's place.
    assert torch.equal(both.routes_TLK[:, :2], own.routes_TLK[:, :2])
    torch.testing.assert_close(both.logits_TV, own.logits_TV, rtol=0, atol=0)
    replay_only = model.forward_packed(ids, cu, recorded)
    assert torch.equal(replay_only.routes_TLK[10, 1], recorded[10, 1])
    assert not torch.equal(replay_only.logits_TV, own.logits_TV)


def test_without_replay_the_filter_only_counts() -> None:
    model, (ids, cu) = policy(), tokens()
    own = model.forward_packed(ids, cu)
    recorded = own.routes_TLK.clone()
    recorded[10, 1, 2] = own.router_logits_TLE[10, 1].argmin()
    counted = model.forward_packed(ids, cu, recorded, Replay(follow=False, plausible=0.5))
    assert counted.implausible_L is not None
    assert counted.implausible_L.tolist() == [0, 1, 0]
    assert torch.equal(counted.logits_TV, own.logits_TV)
    off = model.forward_packed(ids, cu, recorded, Replay(follow=False))
    assert off.implausible_L is None
    assert torch.equal(off.logits_TV, own.logits_TV)


def test_gradient_flows_through_the_gates_of_kept_and_of_replaced_experts() -> None:
    model, (ids, cu) = policy(), tokens()
    generator = torch.Generator().manual_seed(5)
    scattered = torch.stack([torch.randperm(16, generator=generator)[:4] for _ in range(240)]).view(80, 3, 4)
    output = model.forward_packed(ids, cu, scattered, BOTH)
    assert output.implausible_L is not None
    assert (output.implausible_L > 0).all()
    output.logits_TV.square().sum().backward()  # type: ignore[no-untyped-call]
    for name, parameter in model.named_parameters():
        if name.endswith("mlp.gate.weight"):
            assert parameter.grad is not None
            assert torch.isfinite(parameter.grad).all()
            used = sorted(set(output.routes_TLK[:, int(name.split(".")[2])].flatten().tolist()))
            assert (parameter.grad[used].abs().sum(1) > 0).all(), name


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 8), st.sampled_from([0.05, 0.5, 1.0]), st.booleans())
def test_whatever_was_recorded_a_row_ends_with_distinct_plausible_experts(
    seed: int, top_k: int, ratio: float, ties: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(12, 8, generator=generator) * 2
    if ties:
        logits = logits.round()
    own = logits.softmax(-1).topk(top_k, -1).indices
    recorded = torch.rand(12, 8, generator=generator).argsort(1)[:, :top_k]
    used, replaced = plausible(logits, own, recorded, ratio)
    threshold = logits.gather(1, own).amin(1, True) + math.log(ratio)
    assert torch.equal(replaced, logits.gather(1, recorded) < threshold)
    assert torch.equal(used[~replaced], recorded[~replaced])
    for row in range(12):
        assert len(set(used[row].tolist())) == top_k
        own_row = own[row].tolist()
        fresh = used[row][replaced[row]].tolist()
        free = [e for e in own_row if e not in recorded[row][~replaced[row]].tolist()]
        assert fresh == free[: len(fresh)]
