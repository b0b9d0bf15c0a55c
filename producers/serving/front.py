"""The HTTP front of a serving replica: `POST /v1/answers` gives an answer and the id that feedback on it names.

It is made for a product's own server in the same network, which knows its people: there are no API keys here.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from typing import Any, Final, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from rollwire.producers.serving.answer import Answer, Question, Texts
from rollwire.producers.serving.config import ServingConfig
from rollwire.producers.serving.serving import Serving
from rollwire.schemas.errors import ConfigError, Refused

_PROBLEM: Final = "application/problem+json"
_RETRY_AFTER: Final = {"retry-after": "1"}
_T = TypeVar("_T")


class _Asked(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    prompt: str
    subject: str  # who asks, by the product's own name for them; stands nowhere in the log


class _Reply:
    """Two futures of one event loop, set by other threads."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.answer: asyncio.Future[Answer | None] = loop.create_future()
        self.durable: asyncio.Future[bool] = loop.create_future()

    def answered(self, answer: Answer | None) -> None:
        self._tell(self.answer, answer)

    def recorded(self, durable: bool) -> None:
        self._tell(self.durable, durable)

    def _tell(self, future: asyncio.Future[Any], value: object) -> None:
        def tell() -> None:
            if not future.done():
                future.set_result(value)

        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(tell)


def make_front(
    serving: Serving, texts: Texts, pseudonym: Callable[[str], str], config: ServingConfig
) -> Starlette:
    """`pseudonym` of a subject raises `Refused` for what names nobody."""

    async def answers(request: Request) -> Response:
        request_id = str(uuid.uuid4())

        def problem(status: int, code: str, detail: str, field: str = "") -> Response:
            body = {"code": code, "detail": detail, "field": field, "request_id": request_id}
            headers = {"x-request-id": request_id, **(_RETRY_AFTER if status == 503 else {})}
            return JSONResponse(body, status, headers, _PROBLEM)

        body = b""
        async for chunk in request.stream():
            body += chunk
            if len(body) > config.max_body_bytes:
                return problem(413, "too_large", f"a question has at most {config.max_body_bytes} bytes")
        try:
            asked = msgspec.json.decode(body, type=_Asked)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            return problem(400, "invalid", str(error))
        try:
            subject = pseudonym(asked.subject)
        except Refused as refused:
            return problem(400, refused.reason, refused.detail, "subject")
        try:
            prompt_ids = texts.encode(asked.prompt)
        except ConfigError as error:
            return problem(400, "prompt_invalid", str(error), "prompt")
        if not 1 <= prompt_ids.size <= config.max_prompt_tokens:
            detail = f"{prompt_ids.size} tokens; 1 to {config.max_prompt_tokens} are answered"
            return problem(400, "prompt_invalid", detail, "prompt")
        if serving.version < 0:
            return problem(503, "not_ready", "no version is served yet")
        reply = _Reply(asyncio.get_running_loop())
        if not serving.ask(Question(prompt_ids, subject), reply):
            return problem(503, "shed", f"{config.max_open} questions are open")
        answer = await _within(reply.answer, config.answer_s)
        if answer is None:
            return problem(503, "no_answer", "the replica stopped, or did not answer in time")
        durable = await _within(reply.durable, config.record_s)
        told = {
            "rollout_id": answer.rollout_id,
            "answer": texts.decode(answer.sampled_ids),
            "version": answer.version,
            "finish_reason": answer.finish_reason,
            "recorded": bool(durable),
            "request_id": request_id,
        }
        return JSONResponse(told, headers={"x-request-id": request_id})

    async def healthz(request: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def readyz(request: Request) -> Response:
        version = serving.version
        return PlainTextResponse(f"version {version}\n", 200 if version >= 0 else 503)

    return Starlette(
        routes=[
            Route("/v1/answers", answers, methods=["POST"]),
            Route("/healthz", healthz),
            Route("/readyz", readyz),
        ]
    )


async def _within(future: asyncio.Future[_T], timeout_s: float) -> _T | None:
    """None at the deadline."""
    done, _ = await asyncio.wait([future], timeout=timeout_s)
    return future.result() if done else None
