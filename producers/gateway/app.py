"""The gateway as an ASGI application.

The hot route is answered without a request object: a scope's headers are looked through once, an answer is two messages. All
other routes are as short, so there is no framework between the server and this file.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from importlib import resources
from typing import Any, Final, NamedTuple

import structlog
from msgspec import structs

from rollwire.producers.gateway import answers
from rollwire.producers.gateway.access import Access, Refusal, lacks
from rollwire.producers.gateway.body import Disconnected, Receive
from rollwire.producers.gateway.dialects.seam import Answer, Dialect
from rollwire.producers.gateway.exposition import MEDIA_TYPE, exposition
from rollwire.producers.gateway.head import Head, RequestIds, Scope, read_head
from rollwire.producers.gateway.intake import Intake
from rollwire.producers.gateway.ledger import Ledger
from rollwire.producers.gateway.origins import answer_headers, preflight_headers

_log = structlog.get_logger()

Send = Callable[[Any], Awaitable[None]]
_SCRIPT: Final = "/v1/feedback.js"
_EMPTY: Final = Answer(204, b"", b"")


class Service(NamedTuple):
    """What answers requests while the application runs."""

    intake: Intake
    access: Access
    ledger: Ledger
    ready: Callable[[], Awaitable[str]]  # "" = ready, else why not
    hurry: Callable[[], None]  # answers what is in flight soon, and nothing new
    stop: Callable[[], Awaitable[None]]


class GatewayApp:
    """`start` is called on the server's loop when it starts, and makes the service; its `stop` when the server ends."""

    def __init__(
        self,
        start: Callable[[], Service],
        dialects: tuple[Dialect, ...],
        document: bytes,
        ids: RequestIds,
        *,
        open_metrics: bool,
    ) -> None:
        self._start = start
        self._dialects: Mapping[str, Dialect] = {dialect.path: dialect for dialect in dialects}
        self._document = document
        self._ids = ids
        self._open_metrics = open_metrics
        self._service: Service | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pages: Mapping[str, Callable[[Service, Head], Awaitable[Answer]]] = {
            "/healthz": self._healthz,
            "/readyz": self._readyz,
            "/metrics": self._metrics,
            "/openapi.json": self._openapi,
            _SCRIPT: self._script,
        }

    def stopping(self) -> None:
        """The server is about to be told to stop: what is in flight is answered in time. From any thread."""
        if self._loop is not None and self._service is not None:
            self._loop.call_soon_threadsafe(self._service.hurry)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        service = self._service
        if scope["type"] != "http" or service is None:
            raise RuntimeError(f"a scope of type {scope['type']!r} before the gateway started")
        head = read_head(scope, self._ids)
        dialect = self._dialects.get(scope["path"])
        try:
            if dialect is not None and scope["method"] == "POST":
                answer = await service.intake.take(dialect, head, receive)
            else:
                answer = await self._other(service, head, scope["method"], scope["path"])
        except Disconnected:
            return
        head_only = scope["method"] == "HEAD"
        headers = self._headers(service, head, answer, scope["method"])
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        await send({"type": "http.response.body", "body": b"" if head_only else answer.body})

    def _headers(
        self, service: Service, head: Head, answer: Answer, method: str
    ) -> list[tuple[bytes, bytes]]:
        headers = [(b"x-request-id", head.request_id.encode())]
        if answer.media_type:
            headers.append((b"content-type", answer.media_type))
            if method != "HEAD":
                headers.append((b"content-length", b"%d" % len(answer.body)))
        if answer.retry_after_s is not None:
            headers.append((b"retry-after", b"%d" % max(1, -int(-answer.retry_after_s // 1))))
        if answer.close:
            headers.append((b"connection", b"close"))
        headers.extend(answer.headers)
        if head.origin is not None and method != "OPTIONS":
            allowed = service.access.allows_origin(head.origin)
            headers.extend((n.encode(), v.encode()) for n, v in answer_headers(head.origin, allowed))
        return headers

    async def _other(self, service: Service, head: Head, method: str, path: str) -> Answer:
        page = self._pages.get(path)
        if page is None and path not in self._dialects:
            return answers.problem(
                Refusal(404, "not_found", f"there is nothing at {path[:200]}"), head.request_id
            )
        if method == "OPTIONS":
            origin = head.origin
            allowed = origin is not None and service.access.allows_origin(origin)
            headers = [(n.encode(), v.encode()) for n, v in preflight_headers(origin, allowed)]
            return structs.replace(_EMPTY, headers=(*headers, _allow(page is None)))
        if page is None or method not in ("GET", "HEAD"):
            refusal = Refusal(405, "method_not_allowed", f"{path} takes {'POST' if page is None else 'GET'}")
            answer = answers.problem(refusal, head.request_id)
            return structs.replace(answer, headers=(_allow(page is None),))
        return await page(service, head)

    async def _healthz(self, service: Service, head: Head) -> Answer:
        return _EMPTY

    async def _readyz(self, service: Service, head: Head) -> Answer:
        why = await service.ready()
        if not why:
            return Answer(200, b'{"ready":true}')
        return answers.problem(Refusal(503, "unavailable", why, "", 1.0), head.request_id)

    async def _metrics(self, service: Service, head: Head) -> Answer:
        if not self._open_metrics:
            caller = service.access.identify(head.authorization, head.origin, head.address_key)
            wrong = caller if isinstance(caller, Refusal) else lacks(caller, "metrics")
            if wrong is not None:
                return answers.problem(wrong, head.request_id)
        return Answer(200, exposition(service.ledger), MEDIA_TYPE)

    async def _openapi(self, service: Service, head: Head) -> Answer:
        return Answer(200, self._document)

    async def _script(self, service: Service, head: Head) -> Answer:
        script = resources.files("rollwire.producers.gateway") / "browser" / "feedback.js"
        if not script.is_file():
            return answers.problem(
                Refusal(404, "not_found", "no browser script in this installation"), head.request_id
            )
        answer = Answer(200, script.read_bytes(), b"text/javascript; charset=utf-8")
        return structs.replace(answer, headers=((b"cache-control", b"public, max-age=3600"),))

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        self._loop = asyncio.get_running_loop()
        self._service = self._start()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self._service.stop()
        await send({"type": "lifespan.shutdown.complete"})


def _allow(dialect: bool) -> tuple[bytes, bytes]:
    return (b"allow", b"POST, OPTIONS" if dialect else b"GET, HEAD, OPTIONS")
