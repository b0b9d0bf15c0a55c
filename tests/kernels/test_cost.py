"""The cost of known models against numbers worked out by hand, and configs that are wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rollwire.kernels.cost import CostModel, cost_model
from rollwire.kernels.policy.config import PolicyConfig, hf_config
from rollwire.schemas.errors import ConfigError

DENSE = {  # as Llama 3.1 8B
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128_256,
}
MOE = {  # as Qwen3-30B-A3B
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "use_sliding_window": False,
    "sliding_window": None,
    "vocab_size": 151_936,
}
LATENT = {  # as Kimi K2
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "intermediate_size": 18_432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 384,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "vocab_size": 163_840,
}


def test_a_dense_model_with_grouped_heads() -> None:
    attention = 4096 * 4096 * 2 + 4096 * 1024 * 2  # q, o; k, v
    active = 32 * (attention + 3 * 4096 * 14336) + 4096 * 128_256
    assert active == 7_504_658_432  # the model's 8.03 B less the embedding of 0.525 B and the norms
    assert cost_model(DENSE) == CostModel(2.0 * active, 32 * 32 * (128 + 128))


def test_a_mixture_of_experts_counts_what_a_token_meets() -> None:
    attention = 2048 * 4096 * 2 + 2048 * 512 * 2
    active = 48 * (attention + 8 * 3 * 2048 * 768 + 2048 * 128) + 2048 * 151_936
    assert active == 3_041_656_832  # "A3B"
    assert cost_model(MOE) == CostModel(2.0 * active, 48 * 32 * 256)


def test_latent_attention_and_shared_experts() -> None:
    attention = 7168 * 1536 + 1536 * 64 * 192 + 7168 * 576 + 512 * 64 * 256 + 64 * 128 * 7168
    sparse = 9 * 3 * 7168 * 2048 + 7168 * 384
    active = 61 * attention + 3 * 7168 * 18_432 + 60 * sparse + 7168 * 163_840
    assert active == 31_686_066_176  # "32 B activated"
    model = cost_model(LATENT)
    assert model == CostModel(2.0 * active, 61 * 64 * 320)
    # With 32 B taken for a fact, linear and quadratic cost are equal at 51,230 tokens.
    assert 2 * 32e9 / model.quadratic == pytest.approx(51_230, abs=1)
    assert model.equal_at == pytest.approx(51_230, rel=0.01)
    # Without compressed queries the projection is whole.
    whole = cost_model({**LATENT, "q_lora_rank": None})
    assert whole.linear - model.linear == 2 * 61 * (7168 * 64 * 192 - 7168 * 1536 - 1536 * 64 * 192)


def test_the_built_in_policy_counts_its_weights() -> None:
    policy = PolicyConfig()
    matrices = 3 * (64 * 64 * 2 + 64 * 32 * 2 + 2 * 3 * 64 * 64 + 64 * 8) + 64 * 20
    assert cost_model(hf_config(policy)) == CostModel(2.0 * matrices, 3 * 4 * 32)


@pytest.mark.parametrize(
    ("changes", "sparse"),
    [
        ({}, 48),
        ({"decoder_sparse_step": 2}, 24),
        ({"decoder_sparse_step": 0}, 0),
        ({"mlp_only_layers": [0, 1, 2]}, 45),
        ({"decoder_sparse_step": None, "moe_layer_freq": 3}, 16),
        ({"decoder_sparse_step": None, "first_k_dense_replace": 4}, 44),
    ],
)
def test_which_layers_are_dense(changes: dict[str, Any], sparse: int) -> None:
    dense_mlp, sparse_mlp = 3 * 2048 * 6144, 8 * 3 * 2048 * 768 + 2048 * 128
    rest = cost_model(MOE).linear - 2 * 48 * sparse_mlp
    want = rest + 2 * (sparse * sparse_mlp + (48 - sparse) * dense_mlp)
    assert cost_model({**MOE, **changes}).linear == want


def test_experts_under_other_names() -> None:
    mixtral = {**DENSE, "num_local_experts": 8, "num_experts_per_tok": 2}
    more = 3 * 4096 * 14336 + 4096 * 8  # one expert more than the dense model, and the router
    assert cost_model(mixtral).linear - cost_model(DENSE).linear == 2.0 * 32 * more
    shared = {**MOE, "shared_expert_intermediate_size": 768}
    assert cost_model(shared).linear - cost_model(MOE).linear == 2.0 * 48 * 3 * 2048 * 768


def test_layers_with_a_window_are_linear() -> None:
    full = cost_model(DENSE)
    pair = 32 * 256
    mixed = ["sliding_attention", "full_attention"] * 16
    model = cost_model({**DENSE, "layer_types": mixed, "sliding_window": 1024})
    assert model.quadratic == full.quadratic / 2
    assert model.linear == full.linear + 16 * 2.0 * pair * 1024
    mistral = cost_model({**DENSE, "sliding_window": 4096})
    assert mistral.quadratic == 0
    assert mistral.equal_at == float("inf")
    late = cost_model({**DENSE, "use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 28})
    assert late.quadratic == full.quadratic * 28 / 32


def test_costs_of_lengths() -> None:
    assert np.array_equal(CostModel(10.0, 2.0).costs([1, 3]), [12.0, 48.0])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": None}, "no hidden_size"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"vocab_size": -1}, "not a count"),
        ({"vocab_size": True}, "not a count"),
        ({"intermediate_size": "wide"}, "not a count"),
        ({"layer_types": ["linear_attention"] * 32}, "linear_attention"),
        ({"layer_types": ["full_attention"]}, "layer 1"),
        ({"layer_types": "full"}, "not a list"),
        ({"layer_types": ["sliding_attention"] * 32}, "no sliding_window"),
        ({"num_experts": 8}, "num_experts_per_tok"),
    ],
)
def test_a_config_that_says_too_little_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        cost_model({**DENSE, **changes})
