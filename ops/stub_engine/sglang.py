"""SGLang 0.5.23's HTTP calls for weights and generation, as its wheel has them. Source by source: `bodies`."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import time
import uuid
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from rollwire.kernels.policy.config import hf_config
from rollwire.ops.stub_engine import bodies
from rollwire.ops.stub_engine.core import NoSampler, StubCore, StubResult
from rollwire.ops.stub_engine.http import Endpoint, Refusal, build_app, read_body, read_query
from rollwire.ops.stub_engine.sampling import routes_from, sample_request, spans_json, stop_reason
from rollwire.schemas.errors import ConfigError, RollwireError
from rollwire.streams.seams.engine import SampleRequest

UNGUARDED = ("/health", "/ready")


def sglang_app(core: StubCore) -> Starlette:
    calls = _Calls(core)
    post, get, both = ("POST",), ("GET",), ("GET", "POST")
    routes: dict[str, tuple[tuple[str, ...], Endpoint]] = {
        "/health": (get, calls.health),
        "/ready": (get, calls.health),
        "/model_info": (get, calls.model_info),
        "/get_model_info": (get, calls.model_info),
        "/server_info": (get, calls.server_info),
        "/generate": (("POST", "PUT"), calls.generate),
        "/v1/completions": (post, calls.completions),
        "/pause_generation": (post, calls.pause),
        "/continue_generation": (post, calls.resume),
        "/update_weights_from_disk": (post, calls.update_from_disk),
        "/update_weight_version": (post, calls.update_weight_version),
        "/weights_checker": (both, calls.weights_checker),
        "/get_weights_by_name": (both, calls.weights_by_name),
        "/flush_cache": (both, calls.flush_cache),
        "/abort_request": (post, calls.abort),
        "/init_weights_update_group": (post, calls.no_transfer(bodies.InitGroup)),
        "/destroy_weights_update_group": (post, calls.no_transfer(bodies.DestroyGroup)),
        "/update_weights_from_distributed": (post, calls.no_transfer(bodies.UpdateFromDistributed)),
        "/update_weights_from_tensor": (post, calls.no_transfer(bodies.UpdateFromTensor)),
        "/update_weights_from_ipc": (post, calls.no_transfer(bodies.UpdateFromIpc)),
        "/begin_weight_update": (post, calls.no_transfer(bodies.BeginUpdate)),
        "/end_weight_update": (post, calls.no_transfer(bodies.Empty)),
        "/release_memory_occupation": (both, calls.no_transfer(bodies.Occupation)),
        "/resume_memory_occupation": (both, calls.no_transfer(bodies.Occupation)),
    }
    return build_app(core, routes, error_body=_error, guarded=lambda path: path not in UNGUARDED)


def _error(status: int, message: str) -> dict[str, Any]:
    return {"error": {"message": message}} if status != 404 else {"detail": message}


class _Calls:
    def __init__(self, core: StubCore) -> None:
        self._core = core

    async def health(self, _: Request) -> Response:
        return Response(status_code=200)

    async def model_info(self, _: Request) -> Response:
        config = hf_config(self._core.policy)
        return JSONResponse(
            {
                "model_path": self._core.model_path,
                "served_model_name": str(self._core.config.model_path),
                "is_generation": self._core.samples,
                "weight_version": self._core.label,
                "load_format": "auto",
                "model_type": config["model_type"],
                "architectures": config["architectures"],
            }
        )

    async def server_info(self, _: Request) -> Response:
        return JSONResponse(
            {
                "version": "0.5.23",
                "model_path": str(self._core.config.model_path),
                "enable_return_routed_experts": self._core.config.return_routed_experts,
                "internal_states": [],
            }
        )

    # Weights

    async def pause(self, request: Request) -> Response:
        body = await read_body(request, bodies.PauseGeneration)
        # New requests wait for the end of the pause, in every mode.
        await run_in_threadpool(
            self._core.pause,
            "abort" if body.mode == "abort" else "keep",
            reject=False,
            retract=body.mode == "retract",
        )
        return JSONResponse({"message": "Generation paused successfully.", "status": "ok"})

    async def resume(self, request: Request) -> Response:
        await read_body(request, bodies.ContinueGeneration)
        await run_in_threadpool(self._core.resume)
        return JSONResponse({"message": "Generation continued successfully.", "status": "ok"})

    async def update_from_disk(self, request: Request) -> Response:
        """A cache that cannot be flushed fails the call, though the weights are new by then."""
        body = await read_body(request, bodies.UpdateFromDisk)
        if body.load_format not in (None, "auto", "safetensors") or body.manifest is not None:
            raise Refusal(501, "the stub loads a folder of safetensors")
        if body.abort_all_requests:
            await run_in_threadpool(self._core.abort)
        success, message = True, "Succeeded to update model weights."
        try:
            await run_in_threadpool(self._core.load, Path(body.model_path))
        except RollwireError as error:
            success, message = False, f"Failed to update weights: {error}."
        else:
            if body.weight_version is not None:
                await run_in_threadpool(self._core.set_label, body.weight_version)
            if body.flush_cache and not await self._flush():
                success = False
                message = "Weights were updated, but the cache was not flushed because requests are still running or queued."
            elif body.weight_version is not None:
                message += f" Weight version updated to {body.weight_version}."
        answer = {"success": success, "message": message, "num_paused_requests": 0}
        return JSONResponse(answer, 200 if success else 400)

    async def update_weight_version(self, request: Request) -> Response:
        body = await read_body(request, bodies.SglangNewVersion)
        if body.abort_all_requests:
            await run_in_threadpool(self._core.abort)
        await run_in_threadpool(self._core.set_label, body.new_version)
        message = f"Weight version updated to {body.new_version}"
        return JSONResponse({"success": True, "message": message, "new_version": body.new_version})

    async def weights_checker(self, request: Request) -> Response:
        body = await read_body(request, bodies.WeightsChecker, empty=bodies.WeightsChecker())
        if body.action != "checksum":
            return JSONResponse({"success": False, "message": f"the stub does not {body.action}"}, 400)
        skipped = body.skip_tensor_list or []
        found = {
            name: digest
            for name, digest in (await run_in_threadpool(self._core.checksums)).items()
            if not any(part in name for part in skipped)
        }
        gpu = hashlib.sha256(
            "".join(f"{name}{digest}" for name, digest in found.items()).encode()
        ).hexdigest()
        rank = {
            "role": "target",
            "tp_rank": 0,
            "tp_size": 1,
            "dp_rank": 0,
            "dp_size": 1,
            "pp_rank": 0,
            "pp_size": 1,
        }
        return JSONResponse(
            {
                "success": True,
                "message": "Success",
                "ranks": [{"checksums": found, "per_gpu_checksum": gpu, "parallelism_info": [rank]}],
                "per_engine_checksum": hashlib.sha256(gpu.encode()).hexdigest(),
            }
        )

    async def weights_by_name(self, request: Request) -> Response:
        body = await read_body(request, bodies.WeightsByName)
        rows = await run_in_threadpool(self._core.rows_of, body.name, body.truncate_size)
        if rows is None:
            raise Refusal(400, "Get parameter by name failed")
        return JSONResponse(rows)

    async def flush_cache(self, request: Request) -> Response:
        read_query(request, {"timeout": None})
        if await self._flush():
            return Response("Cache flushed.\nPlease check backend logs for more details. \n")
        return Response("Flush cache failed.\n", 400)

    async def abort(self, request: Request) -> Response:
        """Ends every request whose id begins with that of one that runs."""
        body = await read_body(request, bodies.SglangAbort)
        if body.abort_all:
            await run_in_threadpool(self._core.abort)
        elif body.rid:
            await run_in_threadpool(self._core.abort_prefix, body.rid)
        return Response(status_code=200)

    def no_transfer(self, kind: type[msgspec.Struct]) -> Endpoint:
        """The body is checked; what it asks for needs NCCL, CUDA IPC, pickled tensors or a GPU's memory."""

        async def refuse(request: Request) -> Response:
            await read_body(request, kind)
            raise Refusal(501, "the stub has no GPU, and unpickles nothing")

        return refuse

    async def _flush(self) -> bool:
        return await run_in_threadpool(self._core.flush_cache)

    # Generation

    async def generate(self, request: Request) -> Response:
        body = await read_body(request, bodies.SglangGenerate)
        if body.stream:
            raise Refusal(501, "the stub does not stream")
        result = await self._sample(body)
        return JSONResponse(
            {
                "text": "",  # no tokenizer
                "output_ids": result.sampled.token_ids.tolist(),
                "meta_info": self._meta(body, result),
            }
        )

    async def completions(self, request: Request) -> Response:
        body = await read_body(request, bodies.SglangCompletion)
        if body.stream:
            raise Refusal(501, "the stub does not stream")
        asked = bodies.SglangGenerate(
            input_ids=body.prompt,
            rid=body.rid,
            sampling_params=bodies.SglangSampling(
                n=body.n,
                max_new_tokens=body.max_tokens,
                temperature=body.temperature,
                top_p=body.top_p,
                sampling_seed=body.seed,
                stop_token_ids=body.stop_token_ids,
                ignore_eos=body.ignore_eos,
            ),
        )
        result = await self._sample(asked)
        meta = self._meta(asked, result)
        count = result.sampled.token_ids.size
        return JSONResponse(
            {
                "id": meta["id"],
                "object": "text_completion",
                "created": int(time.time()),
                "model": str(self._core.config.model_path),
                "choices": [
                    {"index": 0, "text": "", "logprobs": None, "finish_reason": result.sampled.finish_reason}
                ],
                "usage": {
                    "prompt_tokens": len(body.prompt),
                    "completion_tokens": count,
                    "total_tokens": len(body.prompt) + count,
                },
                "metadata": {key: meta[key] for key in ("weight_version", "weight_versions")},
            }
        )

    async def _sample(self, body: bodies.SglangGenerate) -> StubResult:
        sampling = body.sampling_params
        plain = {
            "n": (sampling.n, 1),
            "top_p": (sampling.top_p, 1.0),
            "top_k": (sampling.top_k, -1),
            "min_p": (sampling.min_p, 0.0),
            "min_new_tokens": (sampling.min_new_tokens, 0),
            "ignore_eos": (sampling.ignore_eos, False),
            "logprob_start_len": (body.logprob_start_len, -1),
            "top_logprobs_num": (body.top_logprobs_num, 0),
            "return_text_in_logprobs": (body.return_text_in_logprobs, False),
        }
        if body.return_logprob and not self._core.config.original_logprobs:
            # There the logprobs are those of the tempered distribution, of which the built-in engine keeps none.
            plain["temperature"] = (sampling.temperature, 1.0)
        if not 0 <= body.routed_experts_start_len <= len(body.input_ids):
            raise Refusal(400, f"routed_experts_start_len must be in [0, {len(body.input_ids)}]")
        asked: SampleRequest = sample_request(
            self._core,
            body.rid or uuid.uuid4().hex,
            body.input_ids,
            max_tokens=sampling.max_new_tokens,
            seed=sampling.sampling_seed,
            temperature=sampling.temperature,
            stop_ids=sampling.stop_token_ids or (),
            routes=body.return_routed_experts and self._core.config.return_routed_experts,
            plain=plain,
        )
        try:
            future = await run_in_threadpool(self._core.submit, asked)
        except NoSampler:
            raise Refusal(501, "torch is not installed: the stub loads weights and samples nothing") from None
        except ConfigError as error:
            raise Refusal(400, str(error)) from error
        return await asyncio.wrap_future(future)

    def _meta(self, body: bodies.SglangGenerate, result: StubResult) -> dict[str, Any]:
        sampled = result.sampled
        tokens = sampled.token_ids.tolist()
        ended: dict[str, Any] = {"type": sampled.finish_reason}
        if sampled.finish_reason == "stop":
            reason = stop_reason(self._core, result)
            ended["matched"] = self._core.policy.eos_token_id if reason is None else reason
        elif sampled.finish_reason == "length":
            ended["length"] = len(tokens)
        else:
            ended["message"] = "Abort in waiting queue" if not tokens else "Aborted"
        meta: dict[str, Any] = {
            "id": sampled.request_id,
            "finish_reason": ended,
            "prompt_tokens": len(body.input_ids),
            "completion_tokens": len(tokens),
            "cached_tokens": 0,
            "num_retractions": 0,
            "weight_version": result.spans[-1].version if result.spans else self._core.label,
            "weight_versions": spans_json(result),
        }
        if body.return_logprob:
            meta["input_token_logprobs"] = []
            meta["output_token_logprobs"] = [
                [value, token, None] for value, token in zip(sampled.logprobs.tolist(), tokens, strict=True)
            ]
        routes = routes_from(result, body.routed_experts_start_len)
        if routes is not None:
            meta["routed_experts"] = base64.b64encode(routes.astype(np.int32).tobytes()).decode()
        return meta
