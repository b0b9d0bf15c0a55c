"""Masked importance sampling and sequence rejection: bounds, exact zeros, counts, and that cutting a step changes nothing."""

from __future__ import annotations

import math
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from numpy.typing import NDArray
from pydantic import ValidationError

from rollwire.kernels.corrections import CorrectionConfig, SequenceStatistic
from rollwire.kernels.loss import LossBatch, LossConfig, LossResult, loss_batch, policy_gradient
from rollwire.kernels.loss_corrections import keep, sequence_statistics
from rollwire.kernels.policy.config import PolicyConfig
from rollwire.kernels.policy.model import PackedOutput, Policy

pytestmark = pytest.mark.torch

CONFIG = PolicyConfig(
    hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=8, num_experts=4,
    moe_intermediate_size=16,
)  # fmt: skip
EVERYTHING: dict[str, Any] = {
    "token_mask": True,
    "token_mask_low": 0.6,
    "token_mask_high": 1.4,
    "sequence_reject": "geometric",
    "sequence_low": 0.8,
    "sequence_high": 1.25,
}
log_ratios = st.lists(st.lists(st.floats(-6, 6, width=32), max_size=8), min_size=1, max_size=6)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def policy() -> Policy:
    policy = Policy(CONFIG, seed=5)
    with torch.no_grad():
        policy.lm_head.weight.mul_(4.0)
    return policy


def laid_out(log_ratios_BS: list[list[float]]) -> tuple[torch.Tensor, torch.Tensor]:
    values = [value for sequence in log_ratios_BS for value in sequence]
    indices = [b for b, sequence in enumerate(log_ratios_BS) for _ in sequence]
    return torch.tensor(values, dtype=torch.float32), torch.tensor(indices, dtype=torch.int64)


def statistic(log_r: list[float], kind: SequenceStatistic) -> float:
    """By the definition, one sequence at a time."""
    if kind == "geometric":
        return math.prod(math.exp(x) for x in log_r) ** (1 / len(log_r))
    if kind == "k1":
        return -math.fsum(log_r) / len(log_r)
    return math.fsum(math.exp(x) - 1 - x for x in log_r) / len(log_r)


@settings(deadline=None)
@given(log_ratios=log_ratios, low=st.floats(0, 1), high=st.floats(1, 50))
def test_the_mask_keeps_what_lies_in_its_bounds(
    log_ratios: list[list[float]], low: float, high: float
) -> None:
    log_r_S, sequence_S = laid_out(log_ratios)
    kept = keep(
        log_r_S,
        sequence_S,
        len(log_ratios),
        CorrectionConfig(token_mask=True, token_mask_low=low, token_mask_high=high),
    )
    ratio_S = log_r_S.double().exp()
    assert torch.equal(kept.kept_S, (ratio_S >= low) & (ratio_S <= high))
    assert torch.equal(kept.low_S, ratio_S < low)
    assert torch.equal(kept.high_S, ratio_S > high)
    assert not kept.rejected_B.any()


@pytest.mark.parametrize("kind", ["geometric", "k1", "k3"])
@settings(deadline=None)
@given(log_ratios=log_ratios, width=st.floats(0.0, 3.0))
def test_rejection_follows_the_definition(
    kind: SequenceStatistic, log_ratios: list[list[float]], width: float
) -> None:
    equal = 1.0 if kind == "geometric" else 0.0
    low, high = equal - min(width, 0.99), equal + width
    log_r_S, sequence_S = laid_out(log_ratios)
    config = CorrectionConfig(sequence_reject=kind, sequence_low=low, sequence_high=high)
    kept = keep(log_r_S, sequence_S, len(log_ratios), config)
    found_B, trained_B = sequence_statistics(log_r_S.double(), sequence_S, len(log_ratios), kind)
    for b, sequence in enumerate(log_ratios):
        tokens = kept.kept_S[sequence_S == b]
        assert int(trained_B[b]) == len(sequence) == len(tokens)
        if not sequence:
            assert not kept.rejected_B[b]
            continue
        wanted = statistic(log_r_S[sequence_S == b].tolist(), kind)
        assert float(found_B[b]) == pytest.approx(wanted, rel=1e-9, abs=1e-12)
        if min(abs(wanted - low), abs(wanted - high)) > 1e-9:
            assert bool(kept.rejected_B[b]) == (not low <= wanted <= high)
        assert bool(tokens.all()) == (not kept.rejected_B[b])
        assert bool(tokens.any()) == (not kept.rejected_B[b])


def test_bounds_are_inclusive_and_no_number_lies_in_none() -> None:
    values = [math.log(0.5), 0.0, math.log(2.0), math.nan, math.inf, -math.inf]
    log_r_S, sequence_S = torch.tensor(values, dtype=torch.float64), torch.arange(6)
    kept = keep(
        log_r_S, sequence_S, 6, CorrectionConfig(token_mask=True, token_mask_low=0.5, token_mask_high=2.0)
    )
    assert kept.kept_S.tolist() == [True, True, True, False, False, False]
    assert (kept.low_S | kept.high_S).tolist() == [False, False, False, True, True, True]
    rejected = keep(log_r_S, sequence_S, 6, CorrectionConfig(sequence_reject="geometric")).rejected_B
    assert rejected.tolist() == [True, False, True, True, True, True]


@settings(deadline=None)
@given(log_ratios=log_ratios)
def test_every_token_that_is_left_out_has_one_reason(log_ratios: list[list[float]]) -> None:
    log_r_S, sequence_S = laid_out(log_ratios)
    kept = keep(log_r_S, sequence_S, len(log_ratios), CorrectionConfig(**EVERYTHING))
    reasons_S = kept.low_S.int() + kept.high_S.int() + kept.rejected_B[sequence_S].int()
    assert torch.equal(reasons_S, (~kept.kept_S).int())


@pytest.mark.parametrize(
    "wrong",
    [
        {"token_mask": True, "token_mask_low": 1.5},
        {"token_mask": True, "token_mask_high": 0.9},
        {"sequence_reject": "k1"},
        {"sequence_reject": "k3"},
        {"sequence_reject": "geometric", "sequence_low": 1.1, "sequence_high": 2.0},
        {"token_mask_low": -1.0},
    ],
)
def test_bounds_that_leave_out_equal_policies_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        CorrectionConfig(**wrong)


class Step:
    """Random sequences whose mu is what the policy says plus a mismatch."""

    def __init__(self, policy: Policy, seed: int, sequences: int = 8) -> None:
        rng = np.random.default_rng(seed)
        self.lengths = rng.integers(5, 12, sequences)
        self.tokens = [rng.integers(0, CONFIG.vocab_size, n) for n in self.lengths]
        self.masks: list[NDArray[np.bool_]] = [np.arange(n) >= 2 for n in self.lengths]
        self.advantages = rng.normal(0.0, 0.5, sequences).astype(np.float32)
        self.mus = [np.zeros(int(mask.sum()), np.float32) for mask in self.masks]
        pi = policy_gradient(policy, self.batch(range(sequences)), LossConfig()).logp_S.numpy()
        ends = np.cumsum([mask.sum() for mask in self.masks])[:-1]
        spread = rng.choice([0.02, 0.4], sequences)
        self.mus = [
            (part + rng.normal(0.0, sigma, part.size)).astype(np.float32)
            for part, sigma in zip(np.split(pi, ends), spread, strict=True)
        ]

    def batch(self, indices: range | list[int]) -> LossBatch:
        return loss_batch(
            np.concatenate([self.tokens[i] for i in indices]),
            np.cumsum([0, *(self.lengths[i] for i in indices)]).astype(np.int32),
            np.concatenate([self.masks[i] for i in indices]),
            np.concatenate([self.mus[i] for i in indices]),
            self.advantages[list(indices)],
            total_sequences=len(self.lengths),
        )


def gradient(policy: Policy, result: LossResult) -> torch.Tensor:
    policy.zero_grad()
    result.loss.backward()  # type: ignore[no-untyped-call]
    return torch.cat([p.grad.reshape(-1) for p in policy.parameters() if p.grad is not None])


def test_off_is_as_before(policy: Policy) -> None:
    batch = Step(policy, 1).batch(range(8))
    wide = LossConfig(token_mask=True, token_mask_low=0.0, token_mask_high=1e30)
    off, on = policy_gradient(policy, batch, LossConfig()), policy_gradient(policy, batch, wide)
    assert torch.equal(gradient(policy, off), gradient(policy, on))
    assert torch.equal(off.loss, on.loss)
    assert off.kept.kept_S.all()


@pytest.mark.parametrize("seed", range(4))
def test_what_is_left_out_has_a_gradient_of_exactly_zero(
    policy: Policy, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradient at the logits of each trained token, and that of a loss which never saw the left-out ones."""
    step = Step(policy, seed)
    batch = step.batch(range(8))
    config = LossConfig(**EVERYTHING)
    seen: list[torch.Tensor] = []

    forward = policy.forward_packed

    def watched(*inputs: Any) -> PackedOutput:
        output = forward(*inputs)
        output.logits_TV.register_hook(seen.append)  # type: ignore[no-untyped-call]
        return output

    with monkeypatch.context() as patch:
        patch.setattr(policy, "forward_packed", watched)
        result = policy_gradient(policy, batch, config)
    got = gradient(policy, result)
    kept_S = result.kept.kept_S
    assert 0 < int(kept_S.sum()) < len(kept_S)
    at_S = seen[0].reshape(-1, CONFIG.vocab_size)[batch.target_S - 1]
    assert not at_S[~kept_S].any()
    assert at_S[kept_S].any(dim=1).all()
    mask_T = np.zeros(len(batch.tokens_T), np.bool_)
    mask_T[batch.target_S[kept_S].numpy()] = True
    without = loss_batch(
        batch.tokens_T.numpy(),
        batch.cu_seqlens,
        mask_T,
        batch.logp_mu_S[kept_S].numpy(),
        step.advantages,
        total_sequences=8,
    )
    expected = policy_gradient(policy, without, LossConfig())
    torch.testing.assert_close(got, gradient(policy, expected), rtol=1e-5, atol=1e-7)
    assert float(result.loss.detach()) == pytest.approx(float(expected.loss.detach()), rel=1e-5, abs=1e-7)


def test_a_ratio_beyond_all_numbers_is_left_out_without_a_nan(policy: Policy) -> None:
    step = Step(policy, 2)
    step.mus[3][1] = -3e38
    batch = step.batch(range(8))
    result = policy_gradient(policy, batch, LossConfig(use_ratio=False, kl_coefficient=0.1, token_mask=True))
    assert int(result.kept.high_S.sum()) >= 1
    assert torch.isfinite(gradient(policy, result)).all()


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1_000), order=st.permutations(range(8)), pieces=st.integers(1, 8))
def test_how_a_step_is_cut_changes_neither_gradient_nor_counts(
    policy: Policy, seed: int, order: list[int], pieces: int
) -> None:
    step = Step(policy, seed)
    config = LossConfig(**EVERYTHING)
    whole = policy_gradient(policy, step.batch(range(8)), config)
    log_r_S = (whole.logp_S - torch.from_numpy(np.concatenate(step.mus))).double().numpy()
    if (np.abs(np.exp(log_r_S)[:, None] - [0.6, 1.4]) < 1e-5).any():
        return  # on a bound, where the last bit of another batch's matrix product decides
    expected = gradient(policy, whole)
    total = torch.zeros_like(expected)
    counts = np.zeros(4, np.int64)
    for part in np.array_split(np.array(order), pieces):
        result = policy_gradient(policy, step.batch([int(i) for i in part]), config)
        total += gradient(policy, result)
        counts += count(result)
    torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-6)
    assert counts.tolist() == count(whole).tolist()


def count(result: LossResult) -> NDArray[np.int64]:
    kept = result.kept
    return np.array([int(x.sum()) for x in (kept.kept_S, kept.low_S, kept.high_S, kept.rejected_B)])
