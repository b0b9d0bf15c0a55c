"""SGLang (0.5.23) for the rollout worker: `/generate`, token ids in and out. Pure.

Its logprobs are those at the request's temperature, unless the server runs with SGLANG_RETURN_ORIGINAL_LOGPROB=1. Routed experts come
with `--enable-return-routed-experts`; a request's seed counts with `--enable-deterministic-inference`.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Collection, Sequence
from typing import Any

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
from rollwire.schemas.errors import ConfigError, EngineRefused
from rollwire.streams.seams.engine import Sampled, SampleRequest


class SglangWire:
    """Implements `Wire`. `layers` and `top_k` shape the routed experts, which come without a shape."""

    def __init__(self, *, layers: int, top_k: int, original_logprobs: bool) -> None:
        self._layers = layers
        self._top_k = top_k
        self._original = original_logprobs

    def check(self, request: SampleRequest) -> None:
        if request.temperature != 1.0 and not self._original:
            raise ConfigError(
                f"{request.request_id}: SGLang's logprobs at temperature {request.temperature:g} are not those at 1: start it "
                "with SGLANG_RETURN_ORIGINAL_LOGPROB=1 and set engine.original_logprobs, or sample at temperature 1"
            )

    def generate(self, request: SampleRequest, wire_id: str, label: str) -> Call:
        sampling = {
            "temperature": request.temperature,
            "max_new_tokens": request.max_new_tokens,
            "sampling_seed": request.seed,
            "stop_token_ids": list(request.stop_ids),
        }
        # The key keeps keys and values of other versions' weights out of the prefix cache's answers.
        body = {
            "rid": _named(wire_id),
            "input_ids": request.prompt_ids.tolist(),
            "sampling_params": sampling,
            "return_logprob": True,
            "return_routed_experts": request.record_routes,
            "extra_key": label,
        }
        return Call("/generate", body)

    def read(self, request: SampleRequest, answer: Any, versions: Collection[int]) -> Sampled:
        meta = at(answer, "meta_info")
        ended = at(meta, "finish_reason")
        reason = finish_reason(at(ended, "type"))
        if reason == "abort" and ended.get("status_code"):
            raise EngineRefused(f"SGLang ended {request.request_id}: {ended}")
        tokens_N = token_array(at(answer, "output_ids"))
        pairs = [(at(entry, 1), at(entry, 0)) for entry in meta.get("output_token_logprobs") or []]
        routes = checked_routes(
            self._routes(meta.get("routed_experts")) if request.record_routes else None,
            request,
            tokens_N.size,
            aborted=reason == "abort",
            flag="--enable-return-routed-experts",
        )
        return Sampled(
            request.request_id,
            tokens_N,
            logprob_array(pairs, tokens_N),
            version_array(meta.get("weight_versions") or [], tokens_N.size, versions),
            routes,
            reason,
        )

    def aborts(self, wire_ids: Sequence[str]) -> list[Call]:
        return [Call("/abort_request", {"rid": _named(each)}) for each in wire_ids]

    def _routes(self, text: Any) -> NDArray[np.integer[Any]] | None:
        """From base64 of int32, without a shape."""
        if text is None:
            return None
        try:
            flat = np.frombuffer(base64.b64decode(text), np.dtype("<i4"))
            return flat.reshape(-1, self._layers, self._top_k)
        except (TypeError, ValueError, binascii.Error) as error:
            raise EngineRefused(
                f"SGLang's routed experts do not fit {self._layers} layers of {self._top_k}: {error}"
            ) from error


def _named(wire_id: str) -> str:
    """No id may begin with another one: an abort ends all that begin with the id it names."""
    return f"{wire_id};"
