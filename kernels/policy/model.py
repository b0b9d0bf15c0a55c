"""A small Qwen3-MoE over packed sequences: parameter names and shapes of Hugging Face's module in memory, float32.

Legend: T tokens end to end, H hidden, A query heads, G key/value heads, D head width, W rectangle width, L layers,
E experts, K experts a token, V vocabulary. Source of the architecture: transformers, models/qwen3_moe (the oracle of
the tests).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rollwire.kernels.policy import ops
from rollwire.kernels.policy.config import PolicyConfig
from rollwire.kernels.policy.layout import PackedLayout, packed_layout
from rollwire.kernels.policy.routing import Replay, check_routes, route
from rollwire.schemas.errors import PlanViolation


class LayerWeights(NamedTuple):
    """One decoder layer as plain tensors; what training and sampling both compute with."""

    input_norm_H: Tensor
    qkv: Tensor  # [(A + 2G) D, H]
    qk_norm: Tensor  # [A + G, D]: q_norm for the query heads, k_norm for the key heads
    o: Tensor  # [H, A D]
    post_norm_H: Tensor
    router_EH: Tensor
    gate_up: Tensor  # [E, 2I, H]
    down: Tensor  # [E, H, I]


class PackedOutput(NamedTuple):
    logits_TV: Tensor  # f32
    routes_TLK: Tensor  # i64: the experts used, in order of preference
    router_TLK: Tensor  # i64: the experts the router itself chose
    router_logits_TLE: Tensor  # f32, with gradient: for a balance loss
    implausible_L: Tensor | None  # i64: recorded experts that the filter replaced; None = it did not look


class _Weight(nn.Module):
    """A parameter named `weight`."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(*shape))


class _Attention(nn.Module):
    def __init__(self, config: PolicyConfig) -> None:
        super().__init__()
        hidden, dim = config.hidden_size, config.head_dim
        self.q_proj = _Weight(config.num_attention_heads * dim, hidden)
        self.k_proj = _Weight(config.num_key_value_heads * dim, hidden)
        self.v_proj = _Weight(config.num_key_value_heads * dim, hidden)
        self.o_proj = _Weight(hidden, config.num_attention_heads * dim)
        self.q_norm = _Weight(dim)
        self.k_norm = _Weight(dim)


class _Experts(nn.Module):
    def __init__(self, config: PolicyConfig) -> None:
        super().__init__()
        count, hidden, width = config.num_experts, config.hidden_size, config.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(count, 2 * width, hidden))
        self.down_proj = nn.Parameter(torch.empty(count, hidden, width))


class _Mlp(nn.Module):
    def __init__(self, config: PolicyConfig) -> None:
        super().__init__()
        self.experts = _Experts(config)
        self.gate = _Weight(config.num_experts, config.hidden_size)


class _Layer(nn.Module):
    def __init__(self, config: PolicyConfig) -> None:
        super().__init__()
        self.self_attn = _Attention(config)
        self.mlp = _Mlp(config)
        self.input_layernorm = _Weight(config.hidden_size)
        self.post_attention_layernorm = _Weight(config.hidden_size)
        self._query_heads = config.num_attention_heads
        self._key_heads = config.num_key_value_heads

    def weights(self) -> LayerWeights:
        attn, mlp = self.self_attn, self.mlp
        return LayerWeights(
            self.input_layernorm.weight,
            torch.cat([attn.q_proj.weight, attn.k_proj.weight, attn.v_proj.weight]),
            torch.cat(
                [
                    attn.q_norm.weight.expand(self._query_heads, -1),
                    attn.k_norm.weight.expand(self._key_heads, -1),
                ]
            ),
            attn.o_proj.weight,
            self.post_attention_layernorm.weight,
            mlp.gate.weight,
            mlp.experts.gate_up_proj,
            mlp.experts.down_proj,
        )


class _Body(nn.Module):
    def __init__(self, config: PolicyConfig) -> None:
        super().__init__()
        self.embed_tokens = _Weight(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = _Weight(config.hidden_size)


class Policy(nn.Module):
    """Fresh weights are normal with `initializer_range`, norms 1; they depend on `seed` alone."""

    def __init__(self, config: PolicyConfig, *, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.model = _Body(config)
        self.lm_head = _Weight(config.vocab_size, config.hidden_size)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.dim() == 1:
                    parameter.fill_(1.0)
                else:
                    parameter.normal_(0.0, config.initializer_range, generator=generator)
        self._rope = rope_tables(config)

    @staticmethod
    def shapes(config: PolicyConfig) -> list[tuple[str, tuple[int, ...]]]:
        """Names and shapes of the parameters in their order, without making any."""
        with torch.device("meta"):
            body, head = _Body(config), _Weight(config.vocab_size, config.hidden_size)
        named = [(f"model.{name}", p) for name, p in body.named_parameters()]
        named += [(f"lm_head.{name}", p) for name, p in head.named_parameters()]
        return [(name, tuple(p.shape)) for name, p in named]

    def layer_weights(self) -> list[LayerWeights]:
        return [layer.weights() for layer in self.model.layers if isinstance(layer, _Layer)]

    def forward_packed(
        self,
        tokens_T: Tensor,
        cu_seqlens: NDArray[np.int32] | NDArray[np.int64] | PackedLayout,
        routes_TLK: Tensor | None = None,
        replay: Replay | None = None,
    ) -> PackedOutput:
        """Logits of every token of sequences laid end to end; no token sees another sequence.

        `tokens_T` i64. `cu_seqlens` [B + 1] on the host, or its ready layout. `routes_TLK` (any integer type) replays
        recorded experts as `replay` says (None = all of them): a (token, layer) with an id below 0 was not recorded and
        uses the router; the gates are always the router's softmax at the experts used, so they get gradient. Raises `PlanViolation` for shapes that
        do not fit, positions beyond `max_position_embeddings` and expert ids out of range.
        """
        config = self.config
        layout = (
            cu_seqlens if isinstance(cu_seqlens, PackedLayout) else packed_layout(cu_seqlens, tokens_T.device)
        )
        tokens = tokens_T.shape[0]
        if layout.positions_T.shape[0] != tokens:
            raise PlanViolation(f"cu_seqlens end at {layout.positions_T.shape[0]}, there are {tokens} tokens")
        if layout.rectangles[-1].width > config.max_position_embeddings:
            longest = int(layout.positions_T.max()) + 1
            if longest > config.max_position_embeddings:
                raise PlanViolation(
                    f"a sequence of {longest} tokens; the policy has {config.max_position_embeddings}"
                )
        recorded = check_routes(routes_TLK, tokens, config)
        cos_T1d, sin_T1d = rope_at(self._rope, layout.positions_T)
        x_TH = nn.functional.embedding(tokens_T, self.model.embed_tokens.weight)
        used: list[Tensor] = []
        own: list[Tensor] = []
        logits: list[Tensor] = []
        implausible: list[Tensor] = []
        for index, weights in enumerate(self.layer_weights()):
            q_TAD, k_TGD, v_TGD = project(x_TH, weights, cos_T1d, sin_T1d, config)
            mixed = attend_packed(q_TAD, k_TGD, v_TGD, layout, config)
            x_TH = x_TH + nn.functional.linear(mixed, weights.o)
            normed = ops.rms_norm(x_TH, weights.post_norm_H, config.rms_norm_eps)
            routing = route(
                normed, weights.router_EH, config, None if recorded is None else recorded[:, index], replay
            )
            x_TH = x_TH + ops.experts(
                normed, routing.gates_TK, weights.gate_up, weights.down, routing.used_TK
            )
            used.append(routing.used_TK)
            own.append(routing.own_TK)
            logits.append(routing.logits_TE)
            if routing.implausible is not None:
                implausible.append(routing.implausible)
        final = ops.rms_norm(x_TH, self.model.norm.weight, config.rms_norm_eps)
        return PackedOutput(
            nn.functional.linear(final, self.lm_head.weight),
            torch.stack(used, 1),
            torch.stack(own, 1),
            torch.stack(logits, 1),
            torch.stack(implausible) if implausible else None,
        )


def rope_tables(config: PolicyConfig) -> tuple[Tensor, Tensor]:
    """cos and sin [max_position_embeddings, D/2] of the rotary embedding (Su et al. 2021), half-split layout."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    angles = torch.outer(
        torch.arange(config.max_position_embeddings, dtype=torch.float32),
        1.0 / (config.rope_theta**exponents),
    )
    return angles.cos(), angles.sin()


def rope_at(tables: tuple[Tensor, Tensor], positions_T: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin [T, 1, D/2] at the given positions."""
    cos, sin = (table.to(positions_T.device) for table in tables)
    return cos.index_select(0, positions_T).unsqueeze(1), sin.index_select(0, positions_T).unsqueeze(1)


def project(
    x_TH: Tensor, weights: LayerWeights, cos_T1d: Tensor, sin_T1d: Tensor, config: PolicyConfig
) -> tuple[Tensor, Tensor, Tensor]:
    """Normed, rotated queries [T, A, D] and keys [T, G, D], and values [T, G, D]."""
    queries, keys, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    normed = ops.rms_norm(x_TH, weights.input_norm_H, config.rms_norm_eps)
    qkv = nn.functional.linear(normed, weights.qkv).view(-1, queries + 2 * keys, dim)
    qk = ops.rms_norm(qkv[:, : queries + keys], weights.qk_norm, config.rms_norm_eps)
    first, second = qk[..., : dim // 2], qk[..., dim // 2 :]
    turned = torch.cat([first * cos_T1d - second * sin_T1d, second * cos_T1d + first * sin_T1d], -1)
    return turned[:, :queries], turned[:, queries:], qkv[:, queries + keys :]


def attend_packed(
    q_TAD: Tensor, k_TGD: Tensor, v_TGD: Tensor, layout: PackedLayout, config: PolicyConfig
) -> Tensor:
    """Causal attention inside each sequence: [T, A D]."""
    queries, keys, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    rows = ops.gather(torch.cat([q_TAD, k_TGD, v_TGD], 1), layout.token_R, layout.row_T)
    outputs: list[Tensor] = []
    for start, count, width in layout.rectangles:
        part = rows[start : start + count * width].view(count, width, queries + 2 * keys, dim).transpose(1, 2)
        mixed = nn.functional.scaled_dot_product_attention(
            part[:, :queries],
            part[:, queries : queries + keys],
            part[:, queries + keys :],
            is_causal=True,
            enable_gqa=queries != keys,
        )
        outputs.append(mixed.transpose(1, 2).reshape(count * width, queries * dim))
    return ops.gather_back(torch.cat(outputs), layout.row_T, layout.token_R, layout.padding)
