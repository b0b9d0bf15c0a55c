"""vLLM 0.33's HTTP calls for weights and generation, as its wheel has them. Source by source: `bodies`."""

from __future__ import annotations

import asyncio
import base64
import io
import time
import uuid
from pathlib import Path
from typing import Any, Literal, cast

import msgspec
import numpy as np
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from rollwire.ops.stub_engine import bodies
from rollwire.ops.stub_engine.core import NoSampler, Paused, StubCore, StubResult
from rollwire.ops.stub_engine.http import BOOLS, Endpoint, Refusal, build_app, is_true, read_body, read_query
from rollwire.ops.stub_engine.sampling import routes_from, sample_request, spans_json, stop_reason
from rollwire.schemas.errors import ConfigError, RollwireError
from rollwire.streams.seams.engine import SampleRequest

GUARDED = ("/v1", "/v2", "/inference", "/cohere")  # what --api-key guards; the calls on weights are not
CHECKSUM_PREFIX = "dp0:pp0:pcp0:tp0:"
MODES = ("abort", "wait", "keep")
_PHRASES = {
    400: "BadRequestError",
    404: "NotFoundError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
}


def vllm_app(core: StubCore) -> Starlette:
    calls = _Calls(core)
    post, get = ("POST",), ("GET",)
    routes: dict[str, tuple[tuple[str, ...], Endpoint]] = {
        "/health": (get, calls.health),
        "/version": (get, calls.version),
        "/v1/models": (get, calls.models),
        "/v1/completions": (post, calls.completions),
        "/inference/v1/generate": (post, calls.generate),
        "/inference/v1/abort_requests": (post, calls.abort_guarded),
    }
    if core.config.dev_mode:
        routes |= {
            "/pause": (post, calls.pause),
            "/resume": (post, calls.resume),
            "/is_paused": (get, calls.is_paused),
            "/abort_requests": (post, calls.abort),
            "/init_weight_transfer_engine": (post, calls.no_transfer(bodies.InitInfo)),
            "/shutdown_weight_transfer_engine": (post, calls.no_transfer(None)),
            "/start_weight_update": (post, calls.no_transfer(None)),
            "/start_draft_weight_update": (post, calls.no_transfer(None)),
            "/update_weights": (post, calls.no_transfer(bodies.UpdateInfo)),
            "/finish_weight_update": (post, calls.no_transfer(bodies.FinishUpdate)),
            "/update_weight_version": (post, calls.update_weight_version),
            "/weight_info": (get, calls.weight_info),
            "/weight_checker": (post, calls.weight_checker),
            "/get_world_size": (get, calls.world_size),
            "/collective_rpc": (post, calls.collective_rpc),
            "/reset_prefix_cache": (post, calls.reset_prefix_cache),
            "/reset_mm_cache": (post, calls.nothing_to_reset),
            "/reset_encoder_cache": (post, calls.nothing_to_reset),
            "/sleep": (post, calls.sleep),
            "/wake_up": (post, calls.wake_up),
            "/is_sleeping": (get, calls.is_sleeping),
            "/release_kv_cache_memory": (post, calls.release_kv_cache),
        }
    return build_app(core, routes, error_body=_error, guarded=lambda path: path.startswith(GUARDED))


def _error(status: int, message: str) -> dict[str, Any]:
    kind = _PHRASES.get(status, "InternalServerError")
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


class _Calls:
    def __init__(self, core: StubCore) -> None:
        self._core = core

    async def health(self, _: Request) -> Response:
        return Response(status_code=200)

    async def version(self, _: Request) -> Response:
        return JSONResponse({"version": "0.33.0"})

    async def models(self, _: Request) -> Response:
        model = {"id": str(self._core.config.model_path), "object": "model", "owned_by": "vllm"}
        return JSONResponse({"object": "list", "data": [model]})

    # Weights

    async def pause(self, request: Request) -> Response:
        query = read_query(request, {"mode": MODES, "clear_cache": BOOLS})
        mode = cast(Literal["abort", "wait", "keep"], query.get("mode", "abort"))
        # "keep" takes and queues new requests, the others turn them away.
        await run_in_threadpool(self._core.pause, mode, reject=mode != "keep")
        if mode != "keep" and is_true(query.get("clear_cache", "true")):
            await run_in_threadpool(self._core.reset_cache, running=False)
        return JSONResponse({"status": "paused"})

    async def resume(self, request: Request) -> Response:
        read_query(request, {})
        await run_in_threadpool(self._core.resume)
        return JSONResponse({"status": "resumed"})

    async def is_paused(self, _: Request) -> Response:
        return JSONResponse({"is_paused": self._core.paused})

    async def abort(self, request: Request) -> Response:
        """No ids: all."""
        body = await read_body(request, bodies.AbortRequests)
        count = await run_in_threadpool(self._core.abort, body.request_ids or None)
        return JSONResponse({"status": "aborted", "aborted": len(body.request_ids or ()) or count})

    async def abort_guarded(self, request: Request) -> Response:
        body = await read_body(request, bodies.AbortRequests)
        if body.request_ids is None:
            raise Refusal(400, "Missing 'request_ids' in request body")
        await run_in_threadpool(self._core.abort, body.request_ids)
        return Response(status_code=200)

    def no_transfer(self, kind: type[msgspec.Struct] | None) -> Endpoint:
        """A call of the weight transfer engine: the body is checked; moving tensors needs NCCL or CUDA IPC on both ends."""

        async def refuse(request: Request) -> Response:
            if kind is bodies.FinishUpdate:
                await read_body(request, bodies.FinishUpdate, empty=bodies.FinishUpdate())
            elif kind is not None:
                await read_body(request, kind)
            raise Refusal(501, "no weight transfer engine: the stub has no GPU to receive tensors on")

        return refuse

    async def update_weight_version(self, request: Request) -> Response:
        body = await read_body(request, bodies.NewVersion)
        await run_in_threadpool(self._core.set_label, body.new_version)
        return JSONResponse({"success": True, "new_version": body.new_version})

    async def weight_info(self, _: Request) -> Response:
        return JSONResponse({"weight_version": self._core.label})

    async def weight_checker(self, request: Request) -> Response:
        body = await read_body(request, bodies.WeightChecker)
        if body.action == "reset":
            raise Refusal(501, "the stub does not zero its weights")
        if body.action == "compare" and body.baseline is None:
            raise Refusal(400, "action='compare' requires a 'baseline' object")
        found = await run_in_threadpool(self._core.checksums)
        checksums = {CHECKSUM_PREFIX + name: digest for name, digest in found.items()}
        if body.action == "checksum" or body.baseline is None:
            return JSONResponse({"checksums": checksums})
        differing = sorted(
            key
            for key in checksums.keys() | body.baseline.keys()
            if checksums.get(key) != body.baseline.get(key)
        )
        return JSONResponse({"match": not differing, "mismatches": differing})

    async def world_size(self, request: Request) -> Response:
        read_query(request, {"include_dp": BOOLS})
        return JSONResponse({"world_size": 1})

    async def collective_rpc(self, request: Request) -> Response:
        """Of the workers' methods the one that reads weights from disk. An error in it is a 500, as there."""
        body = await read_body(request, bodies.CollectiveRpc)
        if body.method != "reload_weights" or body.args:
            raise Refusal(501, f"the stub's worker has reload_weights(weights_path=...), not {body.method!r}")
        try:
            call = msgspec.convert(body.kwargs, bodies.ReloadWeights)
        except msgspec.ValidationError as error:
            raise Refusal(500, f"reload_weights: {error}") from error
        if not call.is_checkpoint_format:
            raise Refusal(501, "the stub has no kernel format")
        folder = Path(self._core.model_path if call.weights_path is None else call.weights_path)
        try:
            await run_in_threadpool(self._core.load, folder)
        except RollwireError as error:
            raise Refusal(500, str(error)) from error
        return JSONResponse({"results": [None]})

    async def reset_prefix_cache(self, request: Request) -> Response:
        query = read_query(request, {"reset_running_requests": BOOLS, "reset_external": BOOLS})
        running = is_true(query.get("reset_running_requests", "false"))
        return JSONResponse({"success": await run_in_threadpool(self._core.reset_cache, running=running)})

    async def nothing_to_reset(self, _: Request) -> Response:
        return Response(status_code=200)

    async def sleep(self, request: Request) -> Response:
        query = read_query(request, {"level": ("0", "1", "2"), "mode": MODES})
        mode = cast(Literal["abort", "wait", "keep"], query.get("mode", "abort"))
        level = int(query.get("level", "1"))
        if level:
            raise Refusal(501, "the stub frees no memory: it sleeps at level 0 only")
        await run_in_threadpool(self._core.pause, mode, reject=False)
        await run_in_threadpool(self._core.resume)
        await run_in_threadpool(self._core.sleep)
        return JSONResponse({"status": "sleeping", "level": level})

    async def wake_up(self, request: Request) -> Response:
        tags = request.query_params.getlist("tags") or None
        await run_in_threadpool(self._core.wake)
        return JSONResponse({"status": "awake", "tags": tags})

    async def is_sleeping(self, _: Request) -> Response:
        return JSONResponse({"is_sleeping": self._core.sleeping})

    async def release_kv_cache(self, _: Request) -> Response:
        raise Refusal(501, "the stub's cache is the requests' own: there is nothing to free while they run")

    # Generation

    async def generate(self, request: Request) -> Response:
        body = await read_body(request, bodies.VllmGenerate)
        sampling = body.sampling_params
        if body.stream:
            raise Refusal(501, "the stub does not stream")
        name = request.headers.get("x-request-id") or body.request_id or uuid.uuid4().hex
        asked = self._asked(f"generate-tokens-{name}", body.token_ids, sampling)
        result = await self._sample(asked)
        choice = {
            "index": 0,
            "logprobs": None if sampling.logprobs is None else {"content": _logprobs(result)},
            "finish_reason": result.sampled.finish_reason,
            "stop_reason": stop_reason(self._core, result),
            "token_ids": result.sampled.token_ids.tolist(),
            "routed_experts": _routed(result, sampling.routed_experts_prompt_start),
            "sampling_mask": None,
            "weight_versions": spans_json(result),
        }
        answer = {
            "request_id": asked.request_id,
            "model": str(self._core.config.model_path),
            "created": int(time.time()),
            "output_mode": "tokens",
            "choices": [choice],
            "usage": _usage(len(body.token_ids), result),
            "prompt_token_ids": body.token_ids if body.return_token_ids else None,
        }
        return JSONResponse(answer)

    async def completions(self, request: Request) -> Response:
        body = await read_body(request, bodies.VllmCompletion)
        if body.stream:
            raise Refusal(501, "the stub does not stream")
        sampling = bodies.VllmSampling(
            n=body.n,
            temperature=body.temperature,
            top_p=body.top_p,
            seed=body.seed,
            stop_token_ids=body.stop_token_ids,
            ignore_eos=body.ignore_eos,
            max_tokens=body.max_tokens,
            logprobs=body.logprobs,
            routed_experts_prompt_start=body.routed_experts_prompt_start,
        )
        name = request.headers.get("x-request-id") or uuid.uuid4().hex
        asked = self._asked(f"cmpl-{name}-0", body.prompt, sampling)
        result = await self._sample(asked)
        choice = {
            "index": 0,
            "text": "",  # no tokenizer
            "logprobs": None
            if body.logprobs is None
            else {"token_logprobs": [float(value) for value in result.sampled.logprobs]},
            "finish_reason": result.sampled.finish_reason,
            "stop_reason": stop_reason(self._core, result),
            "token_ids": result.sampled.token_ids.tolist() if body.return_token_ids else None,
            "weight_versions": spans_json(result) if body.return_weight_versions else None,
            "routed_experts": _routed(result, body.routed_experts_prompt_start),
        }
        answer = {
            "id": f"cmpl-{name}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": str(self._core.config.model_path),
            "choices": [choice],
            "usage": _usage(len(body.prompt), result),
        }
        return JSONResponse(answer)

    def _asked(self, name: str, token_ids: list[int], sampling: bodies.VllmSampling) -> SampleRequest:
        start = sampling.routed_experts_prompt_start
        if not 0 <= start <= len(token_ids):
            raise Refusal(400, f"routed_experts_prompt_start must be between 0 and {len(token_ids)}")
        return sample_request(
            self._core,
            name,
            token_ids,
            max_tokens=sampling.max_tokens,
            seed=sampling.seed,
            temperature=sampling.temperature,
            stop_ids=sampling.stop_token_ids or (),
            routes=self._core.config.return_routed_experts,
            plain={
                "n": (sampling.n, 1),
                "top_p": (sampling.top_p, 1.0),
                "top_k": (max(sampling.top_k, 0), 0),
                "min_p": (sampling.min_p, 0.0),
                "min_tokens": (sampling.min_tokens, 0),
                "ignore_eos": (sampling.ignore_eos, False),
                "logprobs": (sampling.logprobs or 0, 0),
            },
        )

    async def _sample(self, asked: SampleRequest) -> StubResult:
        try:
            future = await run_in_threadpool(self._core.submit, asked)
        except Paused:
            raise Refusal(503, "Generation is paused. Please retry after it resumes.") from None
        except NoSampler:
            raise Refusal(501, "torch is not installed: the stub loads weights and samples nothing") from None
        except ConfigError as error:
            raise Refusal(400, str(error)) from error
        return await asyncio.wrap_future(future)


def _logprobs(result: StubResult) -> list[dict[str, Any]]:
    tokens, values = result.sampled.token_ids.tolist(), result.sampled.logprobs.tolist()
    return [
        {
            "token_id": token,
            "logprob": value,
            "rank": None,
            "top_logprobs": [{"token_id": token, "logprob": value, "rank": None}],
        }
        for token, value in zip(tokens, values, strict=True)
    ]


def _routed(result: StubResult, start: int) -> str | None:
    """Base64 of a `.npy` file."""
    routes = routes_from(result, start)
    if routes is None:
        return None
    file = io.BytesIO()
    np.save(file, routes, allow_pickle=False)
    return base64.b64encode(file.getvalue()).decode()


def _usage(prompt: int, result: StubResult) -> dict[str, int]:
    count = result.sampled.token_ids.size
    return {"prompt_tokens": prompt, "completion_tokens": count, "total_tokens": prompt + count}
