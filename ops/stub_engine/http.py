"""Routes, bodies and answers that both stub servers share. What is not listed is 404; a body with a key too many is 400.

The real servers pass over unknown keys; this one refuses them, so that a client that sends what nobody reads is found out.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from rollwire.ops.stub_engine.core import StubCore

Body = TypeVar("Body")
Endpoint = Callable[[Request], Awaitable[Response]]


class Refusal(Exception):
    """Answered with this status and these words."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


async def read_body(request: Request, kind: type[Body], *, empty: Body | None = None) -> Body:
    """The JSON body. Raises `Refusal` (400) where it is none, or not of that kind."""
    data = await request.body()
    if not data and empty is not None:
        return empty
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.MsgspecError as error:
        raise Refusal(400, str(error)) from error


def read_query(request: Request, allowed: Mapping[str, tuple[str, ...] | None]) -> dict[str, str]:
    """The query; None allows any value. Raises `Refusal` (400) for a key or a value that is not allowed."""
    query = dict(request.query_params)
    for key, value in query.items():
        values = allowed.get(key, ())
        if values is not None and value not in values:
            raise Refusal(400, f"query {key}={value}: allowed are {dict(allowed)}")
    return query


BOOLS = ("true", "false", "True", "False", "1", "0")


def is_true(value: str) -> bool:
    return value in ("true", "True", "1")


def build_app(
    core: StubCore,
    routes: Mapping[str, tuple[tuple[str, ...], Endpoint]],
    *,
    error_body: Callable[[int, str], dict[str, Any]],
    guarded: Callable[[str], bool],
) -> Starlette:
    """An application of exactly these routes (path -> methods, endpoint). `guarded` paths want the API key, where there is one."""

    async def refused(_: Request, error: Exception) -> Response:
        if isinstance(error, Refusal):
            return JSONResponse(error_body(error.status, error.message), error.status)
        if isinstance(error, HTTPException):
            return JSONResponse(error_body(error.status_code, error.detail), error.status_code)
        return JSONResponse(error_body(500, f"{type(error).__name__}: {error}"), 500)

    return Starlette(
        routes=[Route(path, endpoint, methods=list(methods)) for path, (methods, endpoint) in routes.items()],
        middleware=[Middleware(_Door, core=core, guarded=guarded)],
        exception_handlers={Refusal: refused, HTTPException: refused},
    )


class _Door:
    """Writes down each call, and turns away who lacks the key."""

    def __init__(self, app: ASGIApp, core: StubCore, guarded: Callable[[str], bool]) -> None:
        self._app = app
        self._core = core
        self._guarded = guarded

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        query = scope["query_string"].decode()
        self._core.calls.append(f"{scope['method']} {scope['path']}" + (f"?{query}" if query else ""))
        key = self._core.config.api_key
        if key is not None and self._guarded(scope["path"]):
            given = Request(scope).headers.get("authorization", "")
            if not secrets.compare_digest(given, f"Bearer {key}"):
                await JSONResponse({"error": "Unauthorized"}, 401)(scope, receive, send)
                return
        await self._app(scope, receive, send)
