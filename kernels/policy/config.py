"""The policy's shape, in the words of Hugging Face's Qwen3-MoE. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Self

from pydantic import BaseModel, Field, ValidationError, model_validator

from rollwire.schemas.errors import ConfigError

ARCHITECTURE: Final = "Qwen3MoeForCausalLM"


class PolicyConfig(BaseModel, frozen=True, extra="forbid"):  # as arguments: type checkers then see a hash
    """Shape of a Qwen3-MoE whose layers are all sparse; the defaults are the demo's 336,416 parameters."""

    vocab_size: int = Field(default=20, ge=2, description="Number of token ids.")
    hidden_size: int = Field(default=64, ge=1, description="Width of the residual stream.")
    num_hidden_layers: int = Field(
        default=3, ge=1, description="Decoder layers, each with a sparse MoE block."
    )
    num_attention_heads: int = Field(default=4, ge=1, description="Query heads.")
    num_key_value_heads: int = Field(
        default=2, ge=1, description="Key and value heads; divides the query heads."
    )
    head_dim: int = Field(
        default=16, ge=2, multiple_of=2, description="Width of one head; even, for the rotation."
    )
    num_experts: int = Field(
        default=8, ge=1, le=256, description="Experts a layer; the sampler records ids as one byte."
    )
    num_experts_per_tok: int = Field(default=2, ge=1, description="Experts chosen for each token and layer.")
    moe_intermediate_size: int = Field(default=64, ge=1, description="Hidden width of one expert.")
    norm_topk_prob: bool = Field(
        default=True, description="Whether the chosen experts' gates are scaled to sum to 1."
    )
    rms_norm_eps: float = Field(default=1e-6, gt=0, description="Added to the mean square in every RMSNorm.")
    rope_theta: float = Field(default=10_000.0, gt=0, description="Base of the rotary position embedding.")
    max_position_embeddings: int = Field(default=4096, ge=1, description="Longest sequence, in tokens.")
    initializer_range: float = Field(default=0.05, gt=0, description="Standard deviation of fresh weights.")
    pad_token_id: int = Field(default=0, ge=0, description="Never an input; named in config.json.")
    eos_token_id: int = Field(default=1, ge=0, description="Sampling ends with this token.")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError("num_key_value_heads must divide num_attention_heads")
        if self.num_experts_per_tok > self.num_experts:
            raise ValueError("num_experts_per_tok must not exceed num_experts")
        if max(self.pad_token_id, self.eos_token_id) >= self.vocab_size:
            raise ValueError("pad_token_id and eos_token_id must be below vocab_size")
        return self


def hf_config(config: PolicyConfig, *, dtype: str = "bfloat16") -> dict[str, Any]:
    """`config.json` of the Qwen3MoeForCausalLM with the same logits; it opens in transformers 4.5x and 5.x."""
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3_moe",
        "dtype": dtype,
        "torch_dtype": dtype,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.moe_intermediate_size,  # of dense layers, of which there are none
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "num_experts": config.num_experts,
        "num_experts_per_tok": config.num_experts_per_tok,
        "moe_intermediate_size": config.moe_intermediate_size,
        "norm_topk_prob": config.norm_topk_prob,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "max_position_embeddings": config.max_position_embeddings,
        "initializer_range": config.initializer_range,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "sliding_window": None,
        "pad_token_id": config.pad_token_id,
        "eos_token_id": config.eos_token_id,
    }


def policy_of(config: Mapping[str, Any]) -> PolicyConfig:
    """The shape that a `config.json` says: what `hf_config` wrote. Raises `ConfigError` for a model that is no policy."""
    if config.get("architectures") != [ARCHITECTURE] or config.get("mlp_only_layers"):
        raise ConfigError(
            f"a policy is a {ARCHITECTURE} of sparse layers alone; config.json says {config.get('architectures')}"
        )
    try:
        return PolicyConfig(**{name: config[name] for name in PolicyConfig.model_fields if name in config})
    except ValidationError as error:
        raise ConfigError(f"config.json: {error}") from None
