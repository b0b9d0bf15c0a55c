"""The running requests of a sampler: one row each, kept without holes.

Legend: M rows there is room for, C tokens a row has room for, L layers, G key/value heads, D head width, K experts a
token, V vocabulary. Rows [0, count) run.
"""

from __future__ import annotations

from typing import Final, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from rollwire.kernels.policy.config import PolicyConfig

_FIRST_ROOM: Final = 32

Tag = TypeVar("Tag")  # the caller's object of a request


class NewRow(NamedTuple):
    prompt_ids: NDArray[np.int64]  # [P]
    max_new_tokens: int
    seed: int
    temperature: float
    stop_ids: tuple[int, ...] = ()  # end the row, beside the end token


class Sample(NamedTuple):
    """What a row holds: P prompt tokens, N sampled ones."""

    token_ids: NDArray[np.int64]  # [N]
    logprobs: NDArray[np.float32]  # [N]
    versions: NDArray[np.int64]  # [N]
    routes: NDArray[np.uint8]  # [P + N - 1, L, K], or [0, L, K] before the prompt was read


class Rows(Generic[Tag]):
    """Arrays by row, and the KV cache. `tags` carries the caller's object of each running row."""

    def __init__(self, config: PolicyConfig, capacity: int) -> None:
        self.config = config
        self.capacity = capacity
        self.count = 0
        self.room = 0
        self.tags: list[Tag] = []
        self.prompt_M = np.zeros(capacity, np.int64)  # P
        self.length_M = np.zeros(capacity, np.int64)  # P + N: tokens known
        self.limit_M = np.zeros(capacity, np.int64)  # P + max_new_tokens
        self.seed_M = np.zeros(capacity, np.uint64)
        self.temperature_M = np.ones(capacity, np.float64)
        self.stop_MV = np.zeros((capacity, config.vocab_size), np.bool_)  # tokens that end the row
        layers, top_k = config.num_hidden_layers, config.num_experts_per_tok
        self.token_MC = np.zeros((capacity, 0), np.int64)
        self.logp_MC = np.zeros((capacity, 0), np.float32)  # of the token at the same place
        self.version_MC = np.zeros((capacity, 0), np.int64)
        self.routes_MCLK = np.zeros((capacity, 0, layers, top_k), np.uint8)  # of the token as an input
        shape = (layers, capacity, config.num_key_value_heads, 0, config.head_dim)
        self.keys_LMGCD = torch.zeros(shape)
        self.values_LMGCD = torch.zeros(shape)

    def _make_room(self, tokens: int) -> None:
        if tokens <= self.room:
            return
        room = max(_FIRST_ROOM, 1 << (tokens - 1).bit_length())
        more = room - self.room

        def wider_numpy(array: NDArray[np.generic]) -> NDArray[np.generic]:
            return np.concatenate([array, np.zeros((self.capacity, more, *array.shape[2:]), array.dtype)], 1)

        self.token_MC = wider_numpy(self.token_MC).astype(np.int64, copy=False)
        self.logp_MC = wider_numpy(self.logp_MC).astype(np.float32, copy=False)
        self.version_MC = wider_numpy(self.version_MC).astype(np.int64, copy=False)
        self.routes_MCLK = wider_numpy(self.routes_MCLK).astype(np.uint8, copy=False)
        self.keys_LMGCD = torch.nn.functional.pad(self.keys_LMGCD, (0, 0, 0, more))
        self.values_LMGCD = torch.nn.functional.pad(self.values_LMGCD, (0, 0, 0, more))
        self.room = room

    def add(self, new: NewRow, tag: Tag) -> None:
        """Puts a request into the next row; the caller has seen to it that there is one."""
        row, prompt = self.count, len(new.prompt_ids)
        self._make_room(prompt + new.max_new_tokens)
        self.prompt_M[row] = self.length_M[row] = prompt
        self.limit_M[row] = prompt + new.max_new_tokens
        self.seed_M[row] = new.seed & 0xFFFF_FFFF_FFFF_FFFF
        self.temperature_M[row] = new.temperature
        self.stop_MV[row] = False
        self.stop_MV[row, [self.config.eos_token_id, *new.stop_ids]] = True
        self.token_MC[row, :prompt] = new.prompt_ids
        self.tags.append(tag)
        self.count += 1

    def take(self, row: int) -> Sample:
        """A copy of what a row holds."""
        start, end = int(self.prompt_M[row]), int(self.length_M[row])
        inputs = end - 1 if end > start else 0
        return Sample(
            self.token_MC[row, start:end].copy(),
            self.logp_MC[row, start:end].copy(),
            self.version_MC[row, start:end].copy(),
            self.routes_MCLK[row, :inputs].copy(),
        )

    def remove(self, rows: NDArray[np.int64]) -> None:
        """Ends rows; the last running ones move into the holes, so that the cost follows the rows that run."""
        left = self.count - len(rows)
        holes = rows[rows < left]
        movers = np.setdiff1d(np.arange(left, self.count), rows, assume_unique=True)
        if len(holes):
            for array in (self.prompt_M, self.length_M, self.limit_M, self.seed_M, self.temperature_M):
                array[holes] = array[movers]
            self.stop_MV[holes] = self.stop_MV[movers]
            used = int(self.length_M[holes].max())
            for wide in (self.token_MC, self.logp_MC, self.version_MC, self.routes_MCLK):
                wide[holes, :used] = wide[movers, :used]
            into, source = torch.from_numpy(holes), torch.from_numpy(movers)
            for cache in (self.keys_LMGCD, self.values_LMGCD):
                cache[:, into, :, :used] = cache[:, source, :, :used]
            for hole, mover in zip(holes.tolist(), movers.tolist(), strict=True):
                self.tags[hole] = self.tags[mover]
        del self.tags[left:]
        self.count = left
