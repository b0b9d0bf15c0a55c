"""The gate: a reverse proxy in front of one engine that answers 409 where a request's demand on the version is not met.

It lets through generation and what tells about the engine, nothing else: the calls that change weights are not for whoever asks
questions. Answers carry the spans of `weight_versions` as the engine tells them, and again in a header.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final, Literal

import httpx
from pydantic import BaseModel, ConfigDict, Field
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from rollwire.consumers.weights.gate import (
    BadDemand,
    Conflict,
    Demand,
    format_spans,
    judge_answer,
    judge_start,
    spans_of_answer,
    take_demand,
)
from rollwire.schemas.errors import EngineError
from rollwire.streams.seams.engine_calls import field, read_answer

ASKED: Final = {
    "vllm": ("/inference/v1/generate", "/v1/completions", "/v1/chat/completions"),
    "sglang": ("/generate", "/v1/completions", "/v1/chat/completions"),
}
TOLD: Final = {
    "vllm": ("/health", "/version", "/v1/models", "/weight_info"),
    "sglang": ("/health", "/ready", "/v1/models", "/model_info", "/server_info"),
}
SERVED_HEADER: Final = "X-Rollwire-Served-Version"
SPANS_HEADER: Final = "X-Rollwire-Weight-Versions"
_PASSED: Final = ("authorization", "x-request-id", "traceparent", "tracestate", "accept")


class GateConfig(BaseModel):
    """One gate."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["vllm", "sglang"] = Field(description="what stands behind the gate")
    url: str = Field(description="its address: http://host:port")
    api_key: str | None = Field(
        default=None, description="key with which the gate asks for the version; questions keep their own"
    )
    request_s: float = Field(default=900.0, gt=0, description="deadline of one question, in seconds")
    label_s: float = Field(
        default=5.0, gt=0, description="deadline of asking for the served version, in seconds"
    )
    body_bytes: int = Field(default=16 << 20, ge=1, description="largest question")


def gate_app(config: GateConfig) -> Starlette:
    """The gate's application. Its connections to the engine live as long as it is served."""
    gate = _Gate(config)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with gate.client:
            yield

    return Starlette(
        routes=[
            *(Route(path, gate.ask, methods=["POST"]) for path in ASKED[config.kind]),
            *(Route(path, gate.tell, methods=["GET"]) for path in TOLD[config.kind]),
        ],
        lifespan=lifespan,
    )


class _Gate:
    def __init__(self, config: GateConfig) -> None:
        self._config = config
        self.client = httpx.AsyncClient(
            base_url=config.url.rstrip("/"),
            timeout=httpx.Timeout(config.request_s, connect=10.0),
            trust_env=False,
        )

    async def tell(self, request: Request) -> Response:
        try:
            answer = await self.client.get(
                request.url.path, headers=_passed(request), timeout=self._config.label_s
            )
        except httpx.HTTPError as error:
            return _unreachable(error)
        return Response(answer.content, answer.status_code, media_type=answer.headers.get("content-type"))

    async def ask(self, request: Request) -> Response:
        config = self._config
        data = await _body(request, config.body_bytes)
        if data is None:
            return _error(413, "request_too_large", f"a question has at most {config.body_bytes} bytes")
        try:
            body = json.loads(data)
            if not isinstance(body, dict):
                raise BadDemand("the body must be a JSON object")
            demand, body = take_demand(request.headers, body)
        except (ValueError, RecursionError, BadDemand) as error:
            return _error(400, "invalid_request_error", str(error))
        if config.kind == "vllm" and request.url.path.startswith("/v1/"):
            body["return_weight_versions"] = True
        served = ""
        if demand.any:
            try:
                served = await self._label()
            except (httpx.HTTPError, EngineError) as error:
                return _unreachable(error)
            if conflict := judge_start(demand, served):
                return _conflict(conflict)
        return await self._forward(request, body, demand, served)

    async def _forward(self, request: Request, body: dict[str, Any], demand: Demand, served: str) -> Response:
        question = self.client.build_request("POST", request.url.path, json=body, headers=_passed(request))
        try:
            answer = await self.client.send(question, stream=True)
            if answer.headers.get("content-type", "").startswith("text/event-stream"):
                # What is streamed can't be taken back: its last part tells the spans, and the asker judges.
                return StreamingResponse(
                    answer.aiter_bytes(),
                    answer.status_code,
                    {SERVED_HEADER: served} if served else None,
                    "text/event-stream",
                    BackgroundTask(answer.aclose),
                )
            try:
                content = await answer.aread()
            finally:
                await answer.aclose()
        except httpx.HTTPError as error:
            return _unreachable(error)
        headers: dict[str, str] = {}
        if answer.is_success:
            spans = spans_of_answer(_parsed(content))
            if conflict := judge_answer(demand, served, spans):
                return _conflict(conflict)
            if spans:
                headers = {SPANS_HEADER: format_spans(spans), SERVED_HEADER: str(spans[-1].get("version"))}
        return Response(content, answer.status_code, headers, answer.headers.get("content-type"))

    async def _label(self) -> str:
        """What the engine calls its weights. Raises `httpx.HTTPError`, `EngineError`."""
        path, name = ("/weight_info" if self._config.kind == "vllm" else "/model_info"), "weight_version"
        key = self._config.api_key
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        answer = await self.client.get(path, headers=headers, timeout=self._config.label_s)
        label: str = field(read_answer(answer), name, str)
        return label


async def _body(request: Request, limit: int) -> bytes | None:
    """None where it is larger."""
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            return None
        parts.append(part)
    return b"".join(parts)


def _parsed(content: bytes) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return None


def _passed(request: Request) -> dict[str, str]:
    return {name: request.headers[name] for name in _PASSED if name in request.headers}


def _conflict(conflict: Conflict) -> Response:
    more: dict[str, Any] = {"served_version": conflict.served, **conflict.demand._asdict()}
    if conflict.spans is not None:
        more["weight_versions"] = list(conflict.spans)
    headers = {"Retry-After": "1"} if conflict.may_come else None
    return _error(409, "version_conflict", conflict.message, more, headers)


def _unreachable(error: Exception) -> Response:
    return _error(502, "engine_unavailable", f"{type(error).__name__}: {error}")


def _error(
    status: int,
    kind: str,
    message: str,
    more: dict[str, Any] | None = None,
    headers: dict[str, str] | None = None,
) -> Response:
    said = {"message": message, "type": kind, "code": status, **(more or {})}
    return JSONResponse({"error": said}, status, headers)
