"""The supervised phase: it learns, its schedule, and the same seed gives the same bits in another process."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pytest
import torch
from blake3 import blake3
from numpy.typing import NDArray

from rollwire.kernels.policy.config import PolicyConfig
from rollwire.kernels.policy.model import Policy
from rollwire.kernels.policy.warm_start import balance_loss, learning_rate_at, warm_start
from rollwire.kernels.tensors import State
from rollwire.schemas.errors import ConfigError

pytestmark = pytest.mark.torch

CONFIG = PolicyConfig()


class Copying(NamedTuple):
    """Demonstrations of a task that is quickly learnt: say the prompt's token again, then stop."""

    tokens_NW: NDArray[np.int64]
    loss_mask_NW: NDArray[np.bool_]
    lengths_N: NDArray[np.int64]


def copying(rows: int = 300) -> Copying:
    rng = np.random.default_rng(0)
    lengths = rng.integers(3, 6, rows)
    tokens = np.zeros((rows, 6), np.int64)
    mask = np.zeros((rows, 6), np.bool_)
    for row, length in enumerate(lengths.tolist()):
        token = int(rng.integers(2, 20))
        tokens[row, : length - 1] = token
        tokens[row, length - 1] = CONFIG.eos_token_id
        mask[row, 1:2] = True
    return Copying(tokens, mask, lengths)


def digest(state: State) -> str:
    hasher = blake3()
    for name, tensor in state.items():
        hasher.update(name.encode() + tensor.bits.tobytes())
    return hasher.hexdigest()


def short_run(seed: int) -> tuple[State, list[float]]:
    torch.set_num_threads(1)
    losses: list[float] = []
    state = warm_start(
        CONFIG, copying(), seed=seed, steps=30, batch_size=32, progress=lambda _, loss: losses.append(loss)
    )
    return state, losses


def test_it_learns_and_the_seed_decides_every_bit() -> None:
    state, losses = short_run(1)
    assert len(losses) == 30
    assert losses[0] > 2.5
    assert losses[-1] < 0.4 * losses[0]
    assert all(tensor.dtype == "F32" for tensor in state.values())
    assert digest(short_run(2)[0]) != digest(state)
    code = "import importlib.util, sys; spec = importlib.util.spec_from_file_location('t', sys.argv[1]); "
    code += "t = importlib.util.module_from_spec(spec); sys.modules['t'] = t; spec.loader.exec_module(t); "
    code += "sys.stdout.write(t.digest(t.short_run(1)[0]))"
    other = subprocess.run(
        [sys.executable, "-P", "-c", code, __file__], capture_output=True, text=True, check=True, timeout=120
    )
    assert other.stdout == digest(state)


def test_schedule() -> None:
    rates = [learning_rate_at(step, 300, 1.0) for step in range(300)]
    assert rates[0] == pytest.approx(1 / 20)
    assert rates[19] == rates[20] == max(rates) == 1.0
    assert rates[299] == pytest.approx(0.1)
    assert all(a >= b for a, b in pairwise(rates[20:]))


def test_balance_loss_is_k_when_balanced_and_more_when_not() -> None:
    policy = Policy(CONFIG)
    tokens = torch.arange(2, 20)
    cu = np.array([0, 18], np.int32)
    with torch.no_grad():
        even = policy.forward_packed(tokens, cu)
        ones = torch.zeros_like(even.router_logits_TLE)
        ids = (torch.arange(18 * 3 * 2).view(18, 3, 2) % 8)[:16]
        balanced = even._replace(router_logits_TLE=ones[:16], router_TLK=ids)
        assert balance_loss(balanced).item() == pytest.approx(CONFIG.num_experts_per_tok)
        lopsided = ones.clone()
        lopsided[..., :2] = 5.0
        collapsed = even._replace(
            router_logits_TLE=lopsided, router_TLK=torch.tensor([0, 1]).expand(18, 3, 2)
        )
        assert balance_loss(collapsed).item() > 3.5 * CONFIG.num_experts_per_tok


def test_only_real_tokens_of_a_row_count() -> None:
    torch.set_num_threads(1)
    clean = copying(64)
    dirty = clean._replace(tokens_NW=clean.tokens_NW.copy())
    outside = np.arange(6)[None, :] >= clean.lengths_N[:, None]
    dirty.tokens_NW[outside] = 7
    runs = [warm_start(CONFIG, d, seed=0, steps=2, batch_size=32) for d in (clean, dirty)]
    assert digest(runs[0]) == digest(runs[1])


def test_too_few_demonstrations_are_refused() -> None:
    with pytest.raises(ConfigError, match="31"):
        warm_start(CONFIG, copying(31), seed=0, steps=1, batch_size=32)
