"""The loss of one microbatch: its formula, its switches, and that cutting a step changes nothing."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from rollwire.kernels.loss import LossBatch, LossConfig, batch_of, loss_batch, policy_gradient
from rollwire.kernels.mismatch import mismatch
from rollwire.kernels.policy.config import PolicyConfig
from rollwire.kernels.policy.model import Policy
from rollwire.schemas.errors import PlanViolation
from rollwire.schemas.records import Microbatch

pytestmark = pytest.mark.torch

CONFIG = PolicyConfig()


class Arrays(NamedTuple):
    tokens_T: NDArray[np.int64]
    cu_seqlens: NDArray[np.int32]
    loss_mask_T: NDArray[np.bool_]
    logp_mu_S: NDArray[np.float32]
    advantages_B: NDArray[np.float32]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def policy() -> Policy:
    policy = Policy(CONFIG, seed=4)
    with torch.no_grad():
        policy.lm_head.weight.mul_(4.0)
    return policy


def step_arrays(sequences: int = 12, seed: int = 0) -> Arrays:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(6, 30, sequences)
    cu = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    mask = rng.random(int(cu[-1])) < 0.5
    mask[cu[:-1]] = False
    return Arrays(
        rng.integers(0, CONFIG.vocab_size, int(cu[-1])),
        cu,
        mask,
        rng.normal(-3.0, 1.0, int(mask.sum())).astype(np.float32),
        rng.normal(0.0, 0.5, sequences).astype(np.float32),
    )


def whole(arrays: Arrays) -> LossBatch:
    return loss_batch(*arrays, total_sequences=len(arrays.advantages_B))


def gradient(policy: Policy, loss: torch.Tensor) -> torch.Tensor:
    policy.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    return torch.cat([p.grad.reshape(-1) for p in policy.parameters() if p.grad is not None])


def test_loss_is_the_formula(policy: Policy) -> None:
    arrays = step_arrays()
    settings = LossConfig(kl_coefficient=0.3, ratio_bound=1.5)
    result = policy_gradient(policy, whole(arrays), settings)
    logits = policy.forward_packed(torch.from_numpy(arrays.tokens_T), arrays.cu_seqlens).logits_TV
    logp_TV = logits.log_softmax(-1).detach().double().numpy()
    expected, s = 0.0, 0
    for b, (start, end) in enumerate(pairwise(arrays.cu_seqlens.tolist())):
        for t in range(start, end):
            if arrays.loss_mask_T[t]:
                pi, mu = logp_TV[t - 1, arrays.tokens_T[t]], float(arrays.logp_mu_S[s])
                assert result.logp_S[s].item() == pytest.approx(pi, abs=1e-6)
                entropy = -(np.exp(logp_TV[t - 1]) * logp_TV[t - 1]).sum()
                assert result.entropy_S[s].item() == pytest.approx(entropy, abs=1e-5)
                assert bool(result.truncated_S[s]) == (np.exp(pi - mu) > 1.5)
                weight = min(np.exp(pi - mu), 1.5)
                expected -= weight * (float(arrays.advantages_B[b]) - 0.3 * (pi - mu)) * pi
                s += 1
    assert 0 < int(result.truncated_S.sum()) < s
    assert result.loss.item() == pytest.approx(expected / len(arrays.advantages_B), rel=1e-5)


def test_ratio_and_penalty_carry_no_gradient(policy: Policy) -> None:
    """d loss / d logp of each token is -(weight) / B: the gradient equals that of a fixed weighting."""
    arrays = step_arrays()
    result = policy_gradient(policy, whole(arrays), LossConfig(kl_coefficient=0.2))
    got = gradient(policy, result.loss)
    pi, mu = result.logp_S.double(), torch.from_numpy(arrays.logp_mu_S).double()
    batch = whole(arrays)
    weight = (pi - mu).exp().clamp(max=2.0) * (batch.advantages_B[batch.sequence_S] - 0.2 * (pi - mu))
    logp = (
        policy.forward_packed(batch.tokens_T, arrays.cu_seqlens).logits_TV[batch.target_S - 1].log_softmax(-1)
    )
    chosen = logp.gather(1, batch.tokens_T[batch.target_S][:, None])[:, 0]
    expected = gradient(policy, -(weight.float() * chosen).sum() / len(arrays.advantages_B))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("pieces", [2, 5, 12])
def test_how_a_step_is_cut_changes_nothing(policy: Policy, pieces: int) -> None:
    arrays = step_arrays()
    settings = LossConfig(kl_coefficient=0.1)
    one = policy_gradient(policy, whole(arrays), settings)
    expected = gradient(policy, one.loss)
    rng = np.random.default_rng(pieces)
    parts = np.array_split(rng.permutation(len(arrays.advantages_B)), pieces)
    total = torch.zeros(())
    for part in parts:
        spans = [slice(int(arrays.cu_seqlens[b]), int(arrays.cu_seqlens[b + 1])) for b in part]
        trained = np.cumsum(arrays.loss_mask_T) - 1
        batch = loss_batch(
            np.concatenate([arrays.tokens_T[s] for s in spans]),
            np.concatenate([[0], np.cumsum([s.stop - s.start for s in spans])]).astype(np.int32),
            np.concatenate([arrays.loss_mask_T[s] for s in spans]),
            np.concatenate([arrays.logp_mu_S[trained[s][arrays.loss_mask_T[s]]] for s in spans]),
            arrays.advantages_B[part],
            total_sequences=len(arrays.advantages_B),
        )
        total = total + policy_gradient(policy, batch, settings).loss
    got = gradient(policy, total)
    assert float((got - expected).norm() / expected.norm()) < 1e-5
    assert total.item() == pytest.approx(one.loss.item(), rel=1e-5)


def test_switches(policy: Policy) -> None:
    arrays = step_arrays()
    plain = policy_gradient(policy, whole(arrays), LossConfig(use_ratio=False))
    assert not plain.truncated_S.any()
    batch = whole(arrays)
    weights = batch.advantages_B[batch.sequence_S]
    assert plain.loss.item() == pytest.approx(-(weights * plain.logp_S).sum().item() / 12, rel=1e-5)

    router = plain.router_TLK
    forced = router.roll(1, 0).to(torch.int16).numpy()
    forced[::3] = -1
    replayed = loss_batch(*arrays, total_sequences=12, routes_TLK=forced)
    on = policy_gradient(policy, replayed, LossConfig(use_ratio=False))
    off = policy_gradient(policy, replayed, LossConfig(use_ratio=False, replay_routes=False))
    assert torch.equal(off.logp_S, plain.logp_S)
    assert not torch.equal(on.logp_S, plain.logp_S)


def test_a_record_gives_the_same_batch(policy: Policy) -> None:
    arrays = step_arrays()
    record = Microbatch(
        rollout_ids=tuple(str(b) for b in range(12)),
        cu_seqlens=arrays.cu_seqlens.astype("<i4").tobytes(),
        token_ids=arrays.tokens_T.astype("<u4").tobytes(),
        loss_mask=arrays.loss_mask_T.astype("u1").tobytes(),
        logprobs=arrays.logp_mu_S.astype("<f4").tobytes(),
        versions=np.zeros(len(arrays.logp_mu_S), "<i8").tobytes(),
        advantages=arrays.advantages_B.astype("<f4").tobytes(),
        traces=(None,) * 12,
    )
    ours = policy_gradient(policy, batch_of(record, total_sequences=12), LossConfig())
    assert torch.equal(ours.loss, policy_gradient(policy, whole(arrays), LossConfig()).loss)


@pytest.mark.parametrize("fault", ["short", "long", "first", "nan", "advantages", "infinite"])
def test_c01_arrays_that_do_not_fit_are_refused(fault: str) -> None:
    """C01: a missing logprob is never invented, an extra one never cut."""
    arrays = step_arrays()
    if fault == "short":
        arrays = arrays._replace(logp_mu_S=arrays.logp_mu_S[:-1])
    elif fault == "long":
        arrays = arrays._replace(logp_mu_S=np.append(arrays.logp_mu_S, np.float32(0)))
    elif fault == "first":
        arrays.loss_mask_T[arrays.cu_seqlens[3]] = True
        arrays = arrays._replace(logp_mu_S=np.append(arrays.logp_mu_S, np.float32(-1)))
    elif fault == "nan":
        arrays.logp_mu_S[2] = np.nan
    elif fault == "infinite":
        arrays.advantages_B[2] = np.inf
    else:
        arrays = arrays._replace(advantages_B=arrays.advantages_B[1:])
    with pytest.raises(PlanViolation):
        whole(arrays)


def test_mismatch_by_hand() -> None:
    pi = np.log(np.array([0.5, 0.2, 0.9, 0.3], dtype=np.float32))
    mu = np.log(np.array([0.5, 0.4, 0.8, 0.1], dtype=np.float32))
    ratio = np.array([1.0, 0.5, 1.125, 3.0])
    found = mismatch(pi, mu)
    assert found.tokens == 4
    assert found.mean == pytest.approx(np.abs(np.log(ratio)).mean(), rel=1e-5)
    assert (found.p50, found.p99, found.max) == pytest.approx((np.log(1.125), np.log(3), np.log(3)), rel=1e-5)
    assert found.k1 == pytest.approx(-np.log(ratio).mean(), rel=1e-5)
    assert found.k3 == pytest.approx((ratio - 1 - np.log(ratio)).mean(), rel=1e-5)
    same = mismatch(mu, mu)
    assert (same.mean, same.max, same.k1, same.k3) == (0.0, 0.0, 0.0, 0.0)


@pytest.mark.parametrize("bad", [[], [np.nan], [-np.inf], [0.0, 0.0]])
def test_mismatch_of_nothing_or_of_no_number_is_refused(bad: list[float]) -> None:
    mu = np.zeros(min(1, len(bad)), dtype=np.float32)
    with pytest.raises(PlanViolation):
        mismatch(np.array(bad, dtype=np.float32), mu)
