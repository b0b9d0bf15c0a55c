"""The built-in engine: the torch policy behind the engine seam, on one thread.

Requests join and leave at any step; prompts are read in the step that also samples their first token. A swap takes
effect at the next step and drops nothing: the KV cache of running requests is kept, or computed anew with the new weights.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rollwire.kernels.policy.config import PolicyConfig
from rollwire.kernels.policy.rows import NewRow, Sample
from rollwire.kernels.policy.sampler import Sampler
from rollwire.kernels.tensors import State
from rollwire.schemas.errors import ConfigError, WeightError
from rollwire.streams.seams.engine import Sampled, SampleRequest


class TorchEngine:
    """Implements `streams.seams.engine.Engine`. At most `max_running` requests decode at once; more wait their turn."""

    def __init__(
        self, config: PolicyConfig, max_running: int, *, kv_at_swap: Literal["keep", "recompute"] = "keep"
    ) -> None:
        if max_running < 1:
            raise ConfigError(f"max_running must be at least 1, got {max_running}")
        self._config = config
        self._sampler: Sampler[SampleRequest] = Sampler(config, max_running)
        self._max_running = max_running
        self._recompute = kv_at_swap == "recompute"
        self._waiting: deque[SampleRequest] = deque()

    @property
    def version(self) -> int:
        """-1 before the first swap."""
        return self._sampler.version

    @property
    def running(self) -> int:
        """Requests accepted and not finished, those that wait for a row included."""
        return self._sampler.rows.count + len(self._waiting)

    def submit(self, requests: Sequence[SampleRequest]) -> None:
        """Raises `ConfigError` for a request that cannot be sampled; then none of them was taken."""
        for request in requests:
            self._check(request)
        self._waiting.extend(requests)

    def step(self) -> list[Sampled]:
        """Raises `WeightError` when requests run and no weights were swapped in yet."""
        if not self.running:
            return []
        if self.version < 0:
            raise WeightError("no weights to sample with: swap a version in first")
        while self._waiting and self._sampler.rows.count < self._max_running:
            request = self._waiting.popleft()
            row = NewRow(
                request.prompt_ids,
                request.max_new_tokens,
                request.seed,
                request.temperature,
                request.stop_ids,
            )
            self._sampler.join(row, request)
        return [_sampled(request, sample, reason) for request, sample, reason in self._sampler.step()]

    def swap(self, version: int, state: State) -> None:
        """Raises `StateMismatch` for a state that does not fit; the old weights then go on serving."""
        if version < 0:
            raise ConfigError(f"versions are not negative, got {version}")
        self._sampler.load(version, state, recompute=self._recompute)

    def recompute_cache(self) -> None:
        """The next step reads all running requests from their start, with the weights that are served then."""
        self._sampler.recompute()

    def abort(self, request_ids: Collection[str] | None = None) -> list[Sampled]:
        """Ends these requests, by default all that were accepted, in no particular order; ids that are not running are
        passed over. A request that had not started comes back with no tokens."""
        if request_ids is None:
            waiting, self._waiting = list(self._waiting), deque()
            samples = self._sampler.clear()
        else:
            ids = set(request_ids)
            waiting = [request for request in self._waiting if request.request_id in ids]
            self._waiting = deque(request for request in self._waiting if request.request_id not in ids)
            tags = self._sampler.rows.tags
            samples = self._sampler.end(
                np.array([row for row, tag in enumerate(tags) if tag.request_id in ids], np.int64)
            )
        shape = (0, self._config.num_hidden_layers, self._config.num_experts_per_tok)
        nothing = Sample(
            np.empty(0, np.int64), np.empty(0, np.float32), np.empty(0, np.int64), np.empty(shape, np.uint8)
        )
        return [
            *(_sampled(request, sample, "abort") for request, sample in samples),
            *(_sampled(request, nothing, "abort") for request in waiting),
        ]

    def _check(self, request: SampleRequest) -> None:
        prompt: NDArray[np.int64] = request.prompt_ids
        vocab = self._config.vocab_size
        if prompt.ndim != 1 or not prompt.size or prompt.min() < 0 or prompt.max() >= vocab:
            raise ConfigError(
                f"{request.request_id}: the prompt must be token ids of 0..{vocab - 1}, at least one"
            )
        longest = prompt.size + request.max_new_tokens
        if request.max_new_tokens < 1 or longest > self._config.max_position_embeddings:
            raise ConfigError(
                f"{request.request_id}: {prompt.size} + {request.max_new_tokens} tokens; the policy reads "
                f"{self._config.max_position_embeddings}"
            )
        if any(not 0 <= token < vocab for token in request.stop_ids):
            raise ConfigError(f"{request.request_id}: stop_ids must be token ids of 0..{vocab - 1}")
        if not (math.isfinite(request.temperature) and request.temperature >= 0):
            raise ConfigError(f"{request.request_id}: temperature {request.temperature}")


def _sampled(request: SampleRequest, sample: Sample, reason: str) -> Sampled:
    routes = sample.routes if request.record_routes else None
    return Sampled(request.request_id, sample.token_ids, sample.logprobs, sample.versions, routes, reason)
