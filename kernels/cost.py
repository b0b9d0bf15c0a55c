"""What a sequence costs to train on, from its model's config.

FLOP of the forward pass over one sequence of L tokens: linear * L + quadratic * L^2. The backward pass is twice the
forward in both terms, so the ratio, which alone decides a layout, is the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollwire.schemas.errors import ConfigError


class CostModel(NamedTuple):
    """Forward FLOP a token, and a token squared."""

    linear: float
    quadratic: float

    def costs(self, lengths_B: Sequence[int] | NDArray[np.int64]) -> NDArray[np.float64]:
        lengths = np.asarray(lengths_B, dtype=np.float64)
        return lengths * (self.linear + self.quadratic * lengths)

    @property
    def equal_at(self) -> float:
        """The length at which both terms cost the same; infinite without a quadratic one."""
        return self.linear / self.quadratic if self.quadratic else float("inf")


def cost_model(config: Mapping[str, object]) -> CostModel:
    """The cost of a decoder from its `config.json`, in the names of Hugging Face's Llama, Qwen, Mixtral and DeepSeek.

    Linear: 2 FLOP for every weight that a token is multiplied with (Kaplan et al. 2020, section 2.1), which are

    - attention with h hidden, n query heads of d, g key-value heads: h*n*d (q), 2*h*g*d (k, v), n*d*h (o);
    - multi-head latent attention (DeepSeek-V2, section 2.1; `kv_lora_rank` c is set), heads of d_n + d_r for q and k, d_v for v:
      q h*n*(d_n+d_r), or h*q + q*n*(d_n+d_r) through `q_lora_rank` q; h*(c+d_r) down; c*n*(d_n+d_v) up; n*d_v*h (o);
    - a gated MLP of width i: 3*h*i. Dense layers have `intermediate_size`; the others the experts of a token and the
      shared ones, 3*h*i each, and the router h*E;
    - the output head: h * `vocab_size`. An embedding is looked up.

    Quadratic: QK^T and AV are 2*d_qk and 2*d_v FLOP a pair and head, and the causal mask leaves L^2/2 pairs:
    n*(d_qk + d_v) a token^2 and layer. A layer of `sliding_attention` has at most `sliding_window` pairs a token and
    counts as linear. Norms, rotations and softmax are left out: they are below a percent.

    Raises `ConfigError` for a number that is missing or out of range and for a kind of layer that is not known.
    """
    shape = _Shape(config)
    hidden, layers = shape.count("hidden_size"), shape.count("num_hidden_layers")
    attention, pair = _attention(shape, hidden)
    linear = 2.0 * hidden * shape.count("vocab_size")
    quadratic = 0.0
    for layer in range(layers):
        linear += 2.0 * (attention + _mlp(shape, hidden, layer))
        window = _window(shape, layer)
        if window is None:
            quadratic += pair
        else:
            linear += 2.0 * pair * window
    return CostModel(linear=linear, quadratic=quadratic)


class _Shape:
    """A config's numbers, checked when they are asked for."""

    def __init__(self, config: Mapping[str, object]) -> None:
        self._config = config

    def value(self, *names: str) -> object:
        """The first of `names` that is set; None where none is."""
        return next((self._config[name] for name in names if self._config.get(name) is not None), None)

    def count(self, *names: str, default: int | None = None) -> int:
        value = self.value(*names)
        if value is None:
            if default is None:
                raise ConfigError(f"the model's config has no {' or '.join(names)}")
            return default
        # A bool is an int to Python and a mistake in a config.
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ConfigError(f"{names[0]} of the model's config is {value!r}, not a count")
        return value

    def entries(self, name: str) -> Sequence[object]:
        value = self._config.get(name)
        if value is None:
            return ()
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise ConfigError(f"{name} of the model's config is {value!r}, not a list")
        return value


def _attention(shape: _Shape, hidden: int) -> tuple[int, int]:
    """Weights of a layer's attention, and FLOP a token^2 of it: heads * (d_qk + d_v)."""
    heads = shape.count("num_attention_heads")
    if heads < 1:
        raise ConfigError("num_attention_heads of the model's config is 0")
    latent = shape.count("kv_lora_rank", default=0)
    if latent:
        rope, nope = shape.count("qk_rope_head_dim"), shape.count("qk_nope_head_dim")
        value, query_rank = shape.count("v_head_dim"), shape.count("q_lora_rank", default=0)
        key = nope + rope
        query = hidden * query_rank + query_rank * heads * key if query_rank else hidden * heads * key
        down, up = hidden * (latent + rope), latent * heads * (nope + value)
        return query + down + up + heads * value * hidden, heads * (key + value)
    width = shape.count("head_dim", default=hidden // heads)
    groups = shape.count("num_key_value_heads", default=heads)
    return 2 * hidden * heads * width + 2 * hidden * groups * width, 2 * heads * width


def _mlp(shape: _Shape, hidden: int, layer: int) -> int:
    """Weights that a token meets in the MLP of a layer."""
    experts = shape.count("num_experts", "n_routed_experts", "num_local_experts", default=0)
    if not experts or not _is_sparse(shape, layer):
        return 3 * hidden * shape.count("intermediate_size")
    # Mixtral's experts have the width that others give to their dense layers.
    width = shape.count("moe_intermediate_size", "intermediate_size")
    chosen = shape.count("num_experts_per_tok", "num_experts_per_token", "moe_topk")
    shared = shape.count("n_shared_experts", "num_shared_experts", default=0) * width
    shared += shape.count("shared_expert_intermediate_size", default=0)
    return 3 * hidden * (chosen * width + shared) + hidden * experts


def _is_sparse(shape: _Shape, layer: int) -> bool:
    if layer < shape.count("first_k_dense_replace", default=0) or layer in shape.entries("mlp_only_layers"):
        return False
    if shape.value("decoder_sparse_step") is not None:  # Qwen counts from 1
        step = shape.count("decoder_sparse_step")
        return step > 0 and (layer + 1) % step == 0
    every = shape.count("moe_layer_freq", default=1)  # DeepSeek counts from 0
    return every > 0 and layer % every == 0


def _window(shape: _Shape, layer: int) -> int | None:
    """Tokens that a token of this layer looks back at; None = all."""
    kinds = shape.entries("layer_types")
    if not kinds:
        # Mistral's has no switch; Qwen's windows begin at max_window_layers.
        switched = shape.value("use_sliding_window")
        if switched is False or shape.value("sliding_window") is None:
            return None
        return shape.count("sliding_window") if layer >= shape.count("max_window_layers", default=0) else None
    kind = kinds[layer] if layer < len(kinds) else None
    if kind == "full_attention":
        return None
    if kind == "sliding_attention":
        return shape.count("sliding_window")
    raise ConfigError(
        f"layer {layer} of the model's config is {kind!r}: the cost of such a layer is not known"
    )
