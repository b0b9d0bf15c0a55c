"""vLLM (0.33) for the rollout worker: `/inference/v1/generate`, token ids in and out. Pure.

Logprobs are those at temperature 1 (the server's default `--logprobs-mode raw_logprobs`). Routed experts come with
`--enable-return-routed-experts`.
"""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Collection, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rollwire.producers.engine_http_wire import (
    Call,
    at,
    checked_routes,
    finish_reason,
    logprob_array,
    token_array,
    version_array,
)
from rollwire.schemas.errors import EngineRefused
from rollwire.streams.seams.engine import Sampled, SampleRequest

_NAMED: Final = (
    "generate-tokens-"  # what the server puts before a request's id, and wants when it is to be aborted
)


class VllmWire:
    """Implements `Wire`."""

    def check(self, request: SampleRequest) -> None:
        return None

    def generate(self, request: SampleRequest, wire_id: str, label: str) -> Call:
        sampling = {
            "temperature": request.temperature,
            "max_tokens": request.max_new_tokens,
            "seed": request.seed,
            "stop_token_ids": list(request.stop_ids),
            "logprobs": 0,  # of the sampled token alone
            "detokenize": False,
        }
        # The salt keeps keys and values of other versions' weights out of the prefix cache's answers.
        body = {
            "request_id": wire_id,
            "token_ids": request.prompt_ids.tolist(),
            "sampling_params": sampling,
            "cache_salt": label,
        }
        return Call("/inference/v1/generate", body)

    def read(self, request: SampleRequest, answer: Any, versions: Collection[int]) -> Sampled:
        choice = at(answer, "choices", 0)
        reason = finish_reason(at(choice, "finish_reason"))
        tokens_N = token_array(at(choice, "token_ids"))
        content = at(choice, "logprobs", "content") or []
        pairs = [(at(entry, "token_id"), at(entry, "logprob")) for entry in content]
        routes = checked_routes(
            _routes(at(choice, "routed_experts")) if request.record_routes else None,
            request,
            tokens_N.size,
            aborted=reason == "abort",
            flag="--enable-return-routed-experts",
        )
        return Sampled(
            request.request_id,
            tokens_N,
            logprob_array(pairs, tokens_N),
            version_array(at(choice, "weight_versions"), tokens_N.size, versions),
            routes,
            reason,
        )

    def aborts(self, wire_ids: Sequence[str]) -> list[Call]:
        return [Call("/inference/v1/abort_requests", {"request_ids": [_NAMED + each for each in wire_ids]})]


def _routes(text: Any) -> NDArray[np.integer[Any]] | None:
    """From base64 of a `.npy` file."""
    if text is None:
        return None
    try:
        routes: NDArray[np.integer[Any]] = np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)
    except (TypeError, ValueError, binascii.Error, EOFError) as error:
        raise EngineRefused(f"vLLM's routed experts are no base64 of a .npy file: {error}") from error
    return routes
