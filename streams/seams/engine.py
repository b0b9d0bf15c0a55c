"""The engine seam: what samples. The built-in engine is `rollwire.producers.engine_torch`; vLLM and SGLang fit here.

An engine decodes many requests at once, one token each per `step`. Weights may be swapped between two steps without
dropping requests: their KV cache stays, and the tokens before and after carry different versions (spans).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from rollwire.kernels.tensors import State


class SampleRequest(NamedTuple):
    request_id: str
    prompt_ids: NDArray[np.int64]  # [P]
    max_new_tokens: int
    seed: int  # the draws of a request depend on its own seed alone, not on its neighbours
    temperature: float = 1.0
    record_routes: bool = True
    stop_ids: tuple[int, ...] = ()  # end the request as the end token does, and are kept


class Sampled(NamedTuple):
    """A finished request."""

    request_id: str
    token_ids: NDArray[np.int64]  # [N] sampled tokens, the token that ended it included
    logprobs: NDArray[np.float32]  # [N] log-softmax at temperature 1
    versions: NDArray[np.int64]  # [N] the version of the weights that sampled each token
    routes: NDArray[np.integer[Any]] | None
    """[P + N - 1, L, K] expert ids of every token that was an input, -1 throughout a (row, layer) not recorded"""
    finish_reason: str  # "stop" | "length" | "abort"
    routes_start: int | None = 0  # the first row's token; None = only the rows that were not returned before
    routes_of_last: bool = False  # there is a row of the last token as well: one row more


class Engine(Protocol):
    def submit(self, requests: Sequence[SampleRequest]) -> None: ...

    def step(self) -> list[Sampled]:
        """One decode step for all running requests; returns those that finished. Nothing running: returns at once."""
        ...

    def swap(self, version: int, state: State) -> None:
        """Serve `state` as `version` from the next step on. Running requests keep their KV cache."""
        ...

    def abort(self) -> list[Sampled]:
        """Ends all running requests with what they have."""
        ...

    @property
    def version(self) -> int: ...

    @property
    def running(self) -> int: ...
