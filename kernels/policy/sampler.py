"""The batched sampler: one token for every running row a step, with a KV cache.

Rows join and leave between any two steps. A step is one flat pass: the last token of every old row and the whole
prompt of every new one, laid end to end; only attention tells them apart. Weights may be replaced between two steps:
the cache stays, so a row's later tokens attend to keys and values of older weights.

Legend: M rows, T tokens of this pass, L layers, A query heads, G key/value heads, D head width, K experts a token,
V vocabulary, C cached tokens attended to.
"""

from __future__ import annotations

from typing import Generic

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rollwire.kernels.policy import ops
from rollwire.kernels.policy.config import PolicyConfig
from rollwire.kernels.policy.draws import draw, uniforms
from rollwire.kernels.policy.layout import packed_layout
from rollwire.kernels.policy.model import (
    LayerWeights,
    Policy,
    attend_packed,
    project,
    rope_at,
    rope_tables,
)
from rollwire.kernels.policy.routing import route
from rollwire.kernels.policy.rows import NewRow, Rows, Sample, Tag
from rollwire.kernels.policy.states import load_state
from rollwire.kernels.tensors import State


class Sampler(Generic[Tag]):
    """Up to `capacity` running rows. Holds float32 weights; `load` takes a State of any float type."""

    def __init__(self, config: PolicyConfig, capacity: int) -> None:
        self.config = config
        self.rows: Rows[Tag] = Rows(config, capacity)
        self._old = 0  # rows [0, old) have all but their last token in the cache
        self._again = 0  # rows [0, again) are read a second time: what they recorded stands
        self._policy = Policy(config)
        self._layers: list[LayerWeights] = []
        self._rope = rope_tables(config)
        self._version = -1

    @property
    def version(self) -> int:
        """-1 before the first `load`."""
        return self._version

    def load(self, version: int, state: State, *, recompute: bool = False) -> None:
        """Samples with these weights from the next step on; `recompute`: with a cache of these weights alone.

        Raises `StateMismatch` and then changes nothing.
        """
        load_state(self._policy, state)
        with torch.inference_mode():
            self._layers = [
                LayerWeights(*(tensor.detach() for tensor in layer)) for layer in self._policy.layer_weights()
            ]
        self._version = version
        if recompute:
            self.recompute()

    def recompute(self) -> None:
        """The next step reads all running rows from their start, with the weights held."""
        self._again, self._old = max(self._again, self._old), 0

    def join(self, new: NewRow, tag: Tag) -> None:
        self.rows.add(new, tag)

    def step(self) -> list[tuple[Tag, Sample, str]]:
        """Samples one token for every row; returns (tag, sample, "stop" | "length") of the rows that ended."""
        rows = self.rows
        count = rows.count
        if not count:
            return []
        with torch.inference_mode():
            logp_MV = self._forward().numpy()
        at_M = rows.length_M[:count]
        index_M = at_M - rows.prompt_M[:count]
        token_M = draw(logp_MV, uniforms(rows.seed_M[:count], index_M), rows.temperature_M[:count])
        all_M = np.arange(count)
        rows.token_MC[all_M, at_M] = token_M
        rows.logp_MC[all_M, at_M] = logp_MV[all_M, token_M]
        rows.version_MC[all_M, at_M] = self._version
        rows.length_M[:count] += 1
        stopped_M = rows.stop_MV[all_M, token_M]
        ended = np.flatnonzero(stopped_M | (rows.length_M[:count] >= rows.limit_M[:count]))
        done = [
            (rows.tags[row], rows.take(row), "stop" if stopped_M[row] else "length") for row in ended.tolist()
        ]
        if len(ended):
            rows.remove(ended)
        self._old, self._again = rows.count, 0
        return done

    def end(self, rows_N: NDArray[np.int64]) -> list[tuple[Tag, Sample]]:
        """Ends rows [N] with what they have. Only between a step and the next `join`: all rows have been read then."""
        taken = [(self.rows.tags[row], self.rows.take(row)) for row in rows_N.tolist()]
        self.rows.remove(rows_N)
        self._old, self._again = min(self._old, self.rows.count), min(self._again, self.rows.count)
        return taken

    def clear(self) -> list[tuple[Tag, Sample]]:
        """Ends all rows with what they have."""
        taken = [(self.rows.tags[row], self.rows.take(row)) for row in range(self.rows.count)]
        self.rows.remove(np.arange(self.rows.count))
        self._old = self._again = 0
        return taken

    def _forward(self) -> Tensor:
        """log-softmax of the next token of every row, f32 [M, V]; fills the cache and the routes."""
        rows, config, old, count = self.rows, self.config, self._old, self.rows.count
        lengths_M = rows.length_M[:count]
        fresh = lengths_M[old:]
        # (row, place) of every token of this pass
        row_T = np.concatenate([np.arange(old), np.repeat(np.arange(old, count), fresh)])
        starts = np.concatenate([[0], np.cumsum(fresh)])
        place_T = np.concatenate(
            [lengths_M[:old] - 1, np.arange(starts[-1]) - np.repeat(starts[:-1], fresh)]
        ).astype(np.int64)
        # What a token was routed to when it was first read stands: the token after it was sampled by that.
        first_read: slice | NDArray[np.int64] = slice(None)
        if self._again:
            first_read = np.flatnonzero((row_T >= self._again) | (place_T == lengths_M[row_T] - 1))
        last_M = torch.from_numpy(np.concatenate([np.arange(old), old + starts[1:] - 1]))
        layout = packed_layout(starts) if count > old else None
        heads = np.arange(config.num_key_value_heads)
        slot_TG = (row_T[:, None] * config.num_key_value_heads + heads) * rows.room + place_T[:, None]
        slot = torch.from_numpy(slot_TG.reshape(-1))
        attended = int(lengths_M[:old].max(initial=1))
        beyond = np.arange(attended)[None, :] >= lengths_M[:old, None]
        bias_MC = torch.zeros(beyond.shape).masked_fill_(torch.from_numpy(beyond), float("-inf"))

        cos, sin = rope_at(self._rope, torch.from_numpy(place_T))
        x_TH = self._policy.model.embed_tokens.weight[torch.from_numpy(rows.token_MC[row_T, place_T])]
        for index, weights in enumerate(self._layers):
            q_TAD, k_TGD, v_TGD = project(x_TH, weights, cos, sin, config)
            keys, values = rows.keys_LMGCD[index], rows.values_LMGCD[index]
            keys.view(-1, config.head_dim).index_copy_(0, slot, k_TGD.reshape(-1, config.head_dim))
            values.view(-1, config.head_dim).index_copy_(0, slot, v_TGD.reshape(-1, config.head_dim))
            parts = []
            if old:
                parts.append(_attend_cached(q_TAD[:old], keys[:old], values[:old], bias_MC))
            if layout is not None:
                parts.append(attend_packed(q_TAD[old:], k_TGD[old:], v_TGD[old:], layout, config))
            mixed = parts[0] if len(parts) == 1 else torch.cat(parts)
            x_TH = x_TH + nn.functional.linear(mixed, weights.o)
            normed = ops.rms_norm(x_TH, weights.post_norm_H, config.rms_norm_eps)
            routing = route(normed, weights.router_EH, config, None)
            used_TK = routing.used_TK.to(torch.uint8).numpy()
            rows.routes_MCLK[row_T[first_read], place_T[first_read], index] = used_TK[first_read]
            x_TH = x_TH + ops.experts(
                normed, routing.gates_TK, weights.gate_up, weights.down, routing.used_TK
            )
        final = ops.rms_norm(
            x_TH.index_select(0, last_M), self._policy.model.norm.weight, config.rms_norm_eps
        )
        return nn.functional.linear(final, self._policy.lm_head.weight).log_softmax(-1)


def _attend_cached(q_MAD: Tensor, keys_MGCD: Tensor, values_MGCD: Tensor, bias_MC: Tensor) -> Tensor:
    """One query a row over its cached tokens: [M, A D]. `bias_MC` is -inf where a row has no token."""
    rows, queries, dim = q_MAD.shape
    groups, attended = keys_MGCD.shape[1], bias_MC.shape[1]
    q = q_MAD.reshape(rows * groups, queries // groups, dim)
    keys = keys_MGCD.flatten(0, 1)[:, :attended]
    values = values_MGCD.flatten(0, 1)[:, :attended]
    scores = torch.bmm(q, keys.transpose(1, 2)).mul_(dim**-0.5).view(rows, queries, attended)
    weights = scores.add_(bias_MC.unsqueeze(1)).softmax(-1).view(rows * groups, queries // groups, attended)
    return torch.bmm(weights, values).view(rows, queries * dim)
