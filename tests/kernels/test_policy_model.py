"""The policy against transformers, and its promises: boundaries, replay, gradients."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

from rollwire.kernels.policy import ops
from rollwire.kernels.policy.config import PolicyConfig, hf_config
from rollwire.kernels.policy.layout import packed_layout
from rollwire.kernels.policy.model import Policy
from rollwire.kernels.policy.states import disk_layout, load_state, to_state
from rollwire.kernels.tensors import State, Tensor
from rollwire.schemas.errors import PlanViolation, StateMismatch

pytestmark = pytest.mark.torch

CONFIG = PolicyConfig()
LENGTHS = (17, 3, 24, 9, 1, 40, 24, 70)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def packed(lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> tuple[torch.Tensor, NDArray[np.int32]]:
    rng = np.random.default_rng(seed)
    cu = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return torch.from_numpy(rng.integers(0, CONFIG.vocab_size, int(cu[-1]))), cu


def lively(seed: int = 3) -> Policy:
    """Norms away from 1 and larger weights, so that a dropped factor would show."""
    policy = Policy(CONFIG, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise, alpha=0.2 if parameter.dim() == 1 else 0.1)
    return policy


def as_torch(tensor: Tensor) -> torch.Tensor:
    kinds = {"BF16": torch.bfloat16, "F32": torch.float32}
    return torch.from_numpy(tensor.bits.copy()).view(kinds[tensor.dtype]).reshape(tensor.shape)


def saved(folder: Path, state: State, dtype: str) -> None:
    save_file(
        {name: as_torch(t) for name, t in state.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    (folder / "config.json").write_text(json.dumps(hf_config(CONFIG, dtype=dtype)))


@pytest.mark.parametrize(("tag", "dtype"), [("F32", "float32"), ("BF16", "bfloat16")])
def test_state_on_disk_opens_in_transformers_with_the_same_logits(
    tmp_path: Path, tag: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from transformers import AutoModelForCausalLM

    policy = lively()
    state = to_state(policy, "F32" if tag == "F32" else "BF16")
    saved(tmp_path, state, dtype)
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    oracle, info = loaded
    assert type(oracle).__name__ == "Qwen3MoeForCausalLM"
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    load_state(policy, state)
    tokens, cu = packed()
    with torch.no_grad():
        ours = policy.forward_packed(tokens, cu).logits_TV
        theirs = torch.cat([oracle(tokens[a:b][None]).logits[0] for a, b in pairwise(cu)])
    assert float(theirs.std()) > 0.3
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5)
    names = {name: tuple(p.shape) for name, p in oracle.named_parameters()}
    assert names == {name: tuple(p.shape) for name, p in policy.named_parameters()}


def test_transformers_writes_the_names_that_we_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from safetensors.numpy import load_file
    from transformers import AutoModelForCausalLM

    state = to_state(lively(), "F32")
    saved(tmp_path, state, "float32")
    AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).save_pretrained(tmp_path / "again")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert set(again) == set(state)
    for name, array in again.items():
        assert np.array_equal(array.view(np.uint32).reshape(-1), state[name].bits), name


def test_no_token_sees_another_sequence() -> None:
    policy = lively()
    tokens, cu = packed()
    with torch.no_grad():
        before = policy.forward_packed(tokens, cu)
        for victim in range(len(LENGTHS)):
            other = tokens.clone()
            rows = slice(int(cu[victim]), int(cu[victim + 1]))
            other[rows] = (other[rows] + 7) % CONFIG.vocab_size
            after = policy.forward_packed(other, cu)
            kept = torch.ones(len(tokens), dtype=torch.bool)
            kept[rows] = False
            assert not torch.equal(after.logits_TV[rows], before.logits_TV[rows])
            torch.testing.assert_close(after.logits_TV[kept], before.logits_TV[kept], rtol=0, atol=1e-6)
            assert torch.equal(after.router_TLK[kept], before.router_TLK[kept])


def test_gradient_of_one_sequence_reaches_no_other() -> None:
    policy = lively()
    tokens, cu = packed()
    rows = slice(int(cu[2]), int(cu[3]))

    def gradient(sequence: torch.Tensor, bounds: NDArray[np.int32], rows: slice) -> torch.Tensor:
        policy.zero_grad()
        policy.forward_packed(sequence, bounds).logits_TV[rows].square().sum().backward()  # type: ignore[no-untyped-call]
        return torch.cat([p.grad.reshape(-1) for p in policy.parameters() if p.grad is not None])

    alone = gradient(tokens[rows], np.array([0, LENGTHS[2]], dtype=np.int32), slice(None))
    among = gradient(tokens, cu, rows)
    torch.testing.assert_close(among, alone, rtol=1e-4, atol=1e-4 * float(alone.abs().max()))


def test_packed_equals_one_by_one() -> None:
    policy = lively()
    tokens, cu = packed()
    with torch.no_grad():
        together = policy.forward_packed(tokens, cu)
        for a, b in pairwise(cu):
            alone = policy.forward_packed(tokens[a:b], np.array([0, b - a], dtype=np.int32))
            torch.testing.assert_close(together.logits_TV[a:b], alone.logits_TV, rtol=0, atol=2e-6)
            assert torch.equal(together.routes_TLK[a:b], alone.routes_TLK)


def test_replay_overrides_the_router_and_gates_get_gradient() -> None:
    policy = lively()
    tokens, cu = packed()
    own = policy.forward_packed(tokens, cu)
    replayed = policy.forward_packed(tokens, cu, own.router_TLK)
    assert torch.equal(replayed.logits_TV, own.logits_TV)

    generator = torch.Generator().manual_seed(5)
    forced = torch.stack(
        [torch.randperm(CONFIG.num_experts, generator=generator)[:2] for _ in range(len(tokens) * 3)]
    ).view(len(tokens), 3, 2)
    forced[::4] = -1
    policy.zero_grad()
    output = policy.forward_packed(tokens, cu, forced)
    assert torch.equal(output.routes_TLK[1::4], forced[1::4])
    assert torch.equal(output.routes_TLK[::4], output.router_TLK[::4])
    assert not torch.equal(output.logits_TV, own.logits_TV)
    output.logits_TV.square().sum().backward()  # type: ignore[no-untyped-call]
    for name, parameter in policy.named_parameters():
        if name.endswith("mlp.gate.weight"):
            assert parameter.grad is not None
            assert (parameter.grad.abs().sum(1) > 0).all(), name


@pytest.mark.parametrize("bad", [8, 255])
def test_an_expert_that_does_not_exist_is_refused(bad: int) -> None:
    tokens, cu = packed()
    routes = torch.zeros(len(tokens), 3, 2, dtype=torch.int64)
    routes[5, 1, 1] = bad
    with pytest.raises(PlanViolation, match=str(bad)):
        Policy(CONFIG).forward_packed(tokens, cu, routes)


@pytest.mark.parametrize("cu", [[0, 5, 5, 9], [1, 9], [0], [0, 9, 4]])
def test_broken_boundaries_are_refused(cu: list[int]) -> None:
    with pytest.raises(PlanViolation):
        packed_layout(np.array(cu, dtype=np.int32))


def test_experts_match_a_dense_reference_in_both_directions() -> None:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True)

    x, gates, gate_up, down = random(11, 6), random(11, 2), random(5, 8, 6), random(5, 6, 4)
    ids = torch.stack(
        [torch.randperm(4, generator=generator)[:2] for _ in range(11)]
    )  # expert 4 stays unused
    assert torch.autograd.gradcheck(
        lambda a, b, c, d: ops.experts(a, b, c, d, ids), (x, gates, gate_up, down)
    )
    gate, up = torch.einsum("th,eih->tei", x, gate_up).chunk(2, -1)
    dense = torch.einsum("tei,ehi->teh", torch.nn.functional.silu(gate) * up, down)
    expected = (dense.gather(1, ids[..., None].expand(-1, -1, 6)) * gates[..., None]).sum(1)
    torch.testing.assert_close(ops.experts(x, gates, gate_up, down, ids), expected)


@pytest.mark.parametrize("heads", [None, 3])
def test_rms_norm_gradient(heads: int | None) -> None:
    generator = torch.Generator().manual_seed(1)
    shape = (7, 4) if heads is None else (7, heads, 4)
    x = torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(*shape[1:], generator=generator, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a, b: ops.rms_norm(a, b, 1e-6), (x, weight))


def test_states_round_trip_and_round_to_nearest_even() -> None:
    policy = lively()
    exact = to_state(policy, "F32")
    fresh = Policy(CONFIG, seed=9)
    load_state(fresh, exact)
    assert all(torch.equal(a, b) for a, b in zip(policy.parameters(), fresh.parameters(), strict=True))

    rounded = to_state(policy)
    assert len(rounded) == len(disk_layout(CONFIG)) == 102
    assert sum(t.bits.size for t in rounded.values()) == 336_416
    for name, tensor in rounded.items():
        bits = exact[name].bits.astype(np.uint64)
        nearest_even = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        assert np.array_equal(tensor.bits, nearest_even.astype(np.uint16)), name
        assert tensor.bits.flags.c_contiguous
    load_state(fresh, rounded)
    again = to_state(fresh)
    assert all(np.array_equal(again[name].bits, t.bits) for name, t in rounded.items())


def test_a_state_shares_no_memory_with_the_policy() -> None:
    policy = lively()
    for tag in ("F32", "BF16"):
        state = to_state(policy, "F32" if tag == "F32" else "BF16")
        before = {name: t.bits.copy() for name, t in state.items()}
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.mul_(2.0)
        assert all(np.array_equal(state[name].bits, bits) for name, bits in before.items())


@pytest.mark.parametrize("fault", ["missing", "renamed", "shape", "dtype"])
def test_a_state_that_does_not_fit_changes_nothing(fault: str) -> None:
    policy = lively()
    before = to_state(policy, "F32")
    state = dict(to_state(Policy(CONFIG, seed=8)))
    name = "model.layers.2.mlp.experts.7.down_proj.weight"
    tensor = state.pop(name)
    if fault == "renamed":
        state["model.layers.2.mlp.experts.7.w2"] = tensor
    elif fault == "shape":
        state[name] = tensor._replace(shape=(32, 128))
    elif fault == "dtype":
        state[name] = tensor._replace(dtype="I16")
    with pytest.raises(StateMismatch):
        load_state(policy, state)
    after = to_state(policy, "F32")
    assert all(np.array_equal(after[n].bits, t.bits) for n, t in before.items())


def test_config_refuses_what_cannot_be() -> None:
    for bad in ({"num_key_value_heads": 3}, {"num_experts_per_tok": 9}, {"vocab_size": 2, "eos_token_id": 2}):
        with pytest.raises(ValueError, match=r"num_|vocab"):
            PolicyConfig.model_validate(bad)
