"""The in-memory twin of an engine: a real sampler over a tiny seeded distribution, without torch.

It keeps what callers must get right: requests of different lengths finish at different steps, each request's draws depend
on its own seed alone, logprobs are those of the distribution that was sampled from (at temperature 1), versions change between
two steps of one request, and no row of routes exists for a token that was never fed back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from rollwire.kernels.tensors import State
from rollwire.schemas.errors import ConfigError
from rollwire.streams.seams.engine import Sampled, SampleRequest

LAYERS: Final = 3
EXPERTS: Final = 8
TOP_K: Final = 2


class _Running:
    """One request being sampled: what it has so far."""

    def __init__(self, request: SampleRequest) -> None:
        self.request = request
        self.draws = np.random.default_rng(request.seed)
        self.inputs: list[int] = request.prompt_ids.tolist()
        self.input_versions: list[int] = []
        self.tokens: list[int] = []
        self.logprobs: list[np.float32] = []
        self.versions: list[int] = []


class MemoryEngine:
    """Samples next tokens from a distribution that is a function of (version, last token). Implements `Engine`.

    `end_bias` is added to the end token's logit. At most `max_running` requests are decoded at once, others wait.
    Requests of equal id at the same time, empty prompts and limits below 1 raise `ConfigError`.
    """

    def __init__(
        self, *, vocab_size: int, end_id: int, max_running: int = 512, end_bias: float = 1.0
    ) -> None:
        self._vocab_size = vocab_size
        self._end_id = end_id
        self._max_running = max_running
        self._end_bias = end_bias
        self._version = -1
        self._waiting: deque[_Running] = deque()
        self._active: list[_Running] = []
        self._tables: dict[int, NDArray[np.float64]] = {}

    @property
    def version(self) -> int:
        return self._version

    @property
    def running(self) -> int:
        """Submitted and not finished, the waiting ones included."""
        return len(self._waiting) + len(self._active)

    def submit(self, requests: Sequence[SampleRequest]) -> None:
        known = {each.request.request_id for each in (*self._waiting, *self._active)}
        for request in requests:
            if request.request_id in known:
                raise ConfigError(f"request {request.request_id} is running already")
            if request.prompt_ids.size == 0 or request.max_new_tokens < 1:
                raise ConfigError(f"request {request.request_id} has an empty prompt or samples nothing")
            known.add(request.request_id)
            self._waiting.append(_Running(request))

    def swap(self, version: int, state: State) -> None:
        self._version = version

    def step(self) -> list[Sampled]:
        if self.running and self._version < 0:
            raise ConfigError("nothing to serve yet: swap in a version before stepping")
        while self._waiting and len(self._active) < self._max_running:
            self._active.append(self._waiting.popleft())
        finished = [sampled for each in self._active if (sampled := self._advance(each)) is not None]
        ended = {sampled.request_id for sampled in finished}
        self._active = [each for each in self._active if each.request.request_id not in ended]
        return finished

    def abort(self) -> list[Sampled]:
        handed_back = [self._sampled(each, "abort") for each in (*self._active, *self._waiting)]
        self._active.clear()
        self._waiting.clear()
        return handed_back

    def log_probabilities(self, version: int, last_token: int) -> NDArray[np.float64]:
        """[V] log-softmax at temperature 1 of the token after `last_token` under `version`."""
        table_VV = self._tables.get(version)
        if table_VV is None:
            seeded = np.random.default_rng([17, version])
            logits_VV = seeded.normal(size=(self._vocab_size, self._vocab_size))
            logits_VV[:, self._end_id] += self._end_bias
            table_VV = logits_VV - np.log(np.exp(logits_VV).sum(axis=1, keepdims=True))
            self._tables[version] = table_VV
        row_V: NDArray[np.float64] = table_VV[last_token]
        return row_V

    def _advance(self, each: _Running) -> Sampled | None:
        fed = len(each.inputs) - len(each.input_versions)
        each.input_versions += [self._version] * fed
        logp_V = self.log_probabilities(self._version, each.inputs[-1])
        tempered_V = np.exp(logp_V / each.request.temperature)
        token = int(each.draws.choice(self._vocab_size, p=tempered_V / tempered_V.sum()))
        each.tokens.append(token)
        each.logprobs.append(np.float32(logp_V[token]))
        each.versions.append(self._version)
        if token == self._end_id or token in each.request.stop_ids:
            return self._sampled(each, "stop")
        if len(each.tokens) == each.request.max_new_tokens:
            return self._sampled(each, "length")
        each.inputs.append(token)
        return None

    def _sampled(self, each: _Running, finish_reason: str) -> Sampled:
        rows = each.request.prompt_ids.size + len(each.tokens) - 1 if each.tokens else 0
        routes = None
        if each.request.record_routes:
            fed_R = np.array(each.inputs[:rows], dtype=np.int64)
            versions_R = np.array(each.input_versions[:rows], dtype=np.int64)
            layer_L = np.arange(LAYERS)
            first_RL = (fed_R[:, None] * 7 + versions_R[:, None] * 3 + layer_L) % EXPERTS
            second_RL = (first_RL + 1 + fed_R[:, None] % (EXPERTS - 1)) % EXPERTS
            routes = np.stack([first_RL, second_RL], axis=-1).astype(np.uint8)
        return Sampled(
            each.request.request_id,
            np.array(each.tokens, dtype=np.int64),
            np.array(each.logprobs, dtype=np.float32),
            np.array(each.versions, dtype=np.int64),
            routes,
            finish_reason,
        )
