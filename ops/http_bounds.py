"""uvicorn's HTTP protocol with bounds before there is a request: on the bytes of a head, and on its time.

Its parser keeps whatever is sent until a head is whole, and waits for ever: a stranger without a key could fill the memory with one
endless header, or hold connections open with half of one (C76). What is answered here never reached the application.
"""

from __future__ import annotations

import asyncio
import secrets
from http import HTTPStatus
from typing import Final, Literal

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from rollwire.ops.one_write import OneWriteTransport

HEAD_BYTES: Final = 32 * 1024
"""Of a request line with its headers; also of anything else between two pieces of a body (trailers, chunk extensions)."""
HEAD_S: Final = 10.0
_CODES: Final[dict[int, Literal["malformed", "timed_out", "too_large"]]] = {
    400: "malformed",
    408: "timed_out",
    431: "too_large",
}


class BoundedHttp(HttpToolsProtocol):
    """For `uvicorn.Config(http=BoundedHttp)`."""

    head_s = HEAD_S
    _surplus = 0  # bytes since the head was whole, or since the last piece of the body
    _in_head = True
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        # The gateway sends both messages of an answer without a wait between them: they leave as one.
        super().connection_made(OneWriteTransport(transport))  # type: ignore[arg-type]
        self._begin()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._surplus += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._surplus > HEAD_BYTES:
            self._turn_away(431, f"a head has {HEAD_BYTES} bytes at most")
        elif self._in_head and self._surplus and self._timer is None:
            self._begin()

    def on_headers_complete(self) -> None:
        self._surplus, self._in_head = 0, False
        if self._timer is not None:
            self._end()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._surplus = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._surplus, self._in_head = 0, True
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._turn_away(400, msg)

    def _begin(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self.head_s, self._overdue)

    def _end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _overdue(self) -> None:
        self._timer = None
        if not self._in_head or self.transport.is_closing():
            return
        if self.cycle is not None and not self.cycle.response_complete:
            self._begin()  # the answer to the request before comes first
        elif self._surplus:
            self._turn_away(408, f"no whole head within {self.head_s:g} s")
        else:
            self.transport.close()  # opened ahead of need, as browsers do: nobody waits for an answer

    def _turn_away(self, status: Literal[400, 408, 431], detail: str) -> None:
        request_id = secrets.token_hex(8)
        phrase = HTTPStatus(status).phrase
        body = msgspec.json.encode(
            {
                "type": "about:blank",
                "title": phrase,
                "status": status,
                "code": _CODES[status],
                "field": "",
                "detail": detail,
                "request_id": request_id,
            }
        )
        head = (
            f"HTTP/1.1 {status} {phrase}\r\nx-request-id: {request_id}\r\ncontent-type: application/problem+json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()
