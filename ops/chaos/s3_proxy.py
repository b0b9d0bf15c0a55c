"""A proxy in front of an S3 server that breaks its word by rule: cuts, lost and false answers, damage, delays.

A rule says which requests it takes and what becomes of them; what no rule takes goes through as it is. Requests are read
whole before they are passed on, so a rule sees all of one, and cuts it where it likes.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final, NamedTuple, Self
from urllib.parse import urlsplit

from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

_TIMEOUT_S: Final = 60.0
# What belongs to one connection, and is not passed on.
_HOP: Final = frozenset({"connection", "keep-alive", "expect", "transfer-encoding"})
_SIGNATURE: Final = frozenset({"authorization", "x-amz-date", "x-amz-content-sha256"})


class S3Request(NamedTuple):
    """A request as it came."""

    method: str
    path: str  # "/bucket/key", quoted, with its query
    headers: dict[str, str]  # names in lower case
    body: bytes


class S3Response(NamedTuple):
    status: int
    headers: list[tuple[str, str]]
    body: bytes


class Exchange:
    """One request in the proxy's hands. An act ends in `reply`, `reply_part` or `cut`."""

    def __init__(self, proxy: S3Proxy, request: S3Request, handler: BaseHTTPRequestHandler) -> None:
        self.proxy = proxy
        self.request = request
        self._handler = handler

    def forward(self, request: S3Request | None = None) -> S3Response:
        """Asks the server and returns its answer."""
        asked = self.request if request is None else request
        upstream = http.client.HTTPConnection(self.proxy.host, self.proxy.upstream_port, timeout=_TIMEOUT_S)
        try:
            upstream.putrequest(asked.method, asked.path, skip_host=True, skip_accept_encoding=True)
            for name, value in asked.headers.items():
                if name not in _HOP:
                    upstream.putheader(name, value)
            upstream.endheaders(asked.body)
            answer = upstream.getresponse()
            return S3Response(answer.status, answer.getheaders(), answer.read())
        finally:
            upstream.close()

    def forward_part(self, size: int) -> None:
        """The head and the first `size` bytes of the body reach the server, then its connection ends."""
        lines = [f"{self.request.method} {self.request.path} HTTP/1.1"]
        lines += [f"{n}: {v}" for n, v in self.request.headers.items() if n not in _HOP]
        head = "\r\n".join([*lines, "", ""]).encode("latin-1")
        with socket.create_connection((self.proxy.host, self.proxy.upstream_port), _TIMEOUT_S) as upstream:
            upstream.sendall(head + self.request.body[:size])

    def reply(self, response: S3Response) -> None:
        self.reply_part(response, None)

    def reply_part(self, response: S3Response, size: int | None) -> None:
        """The head and the first `size` bytes of the body; where that is not all of it, the connection ends there."""
        handler = self._handler
        handler.send_response_only(response.status)
        for name, value in response.headers:
            if name.lower() not in _HOP | {"content-length"}:
                handler.send_header(name, value)
        # The answer to a HEAD states the size of a body that it does not have.
        stated = {n.lower(): v for n, v in response.headers}.get("content-length")
        length = stated if self.request.method == "HEAD" and stated is not None else str(len(response.body))
        handler.send_header("Content-Length", length)
        handler.end_headers()
        handler.wfile.write(response.body[:size])
        if size is not None:
            self.cut()

    def cut(self) -> None:
        """Ends the client's connection."""
        self._handler.close_connection = True
        with contextlib.suppress(OSError):
            self._handler.connection.shutdown(socket.SHUT_RDWR)


Act = Callable[[Exchange], None]
Matches = Callable[[S3Request], bool]


class Rule:
    """Takes the next `times` requests that match, all of them if None."""

    def __init__(self, matches: Matches, act: Act, times: int | None = 1) -> None:
        self.matches = matches
        self.act = act
        self.times = times
        self.hits = 0
        self.hit = threading.Event()

    def take(self, request: S3Request) -> bool:
        if (self.times is not None and self.hits >= self.times) or not self.matches(request):
            return False
        self.hits += 1
        return True


class S3Proxy:
    """Listens on a free port of this machine, in threads of its own; passes on to `endpoint` (an http URL)."""

    def __init__(self, endpoint: str) -> None:
        parts = urlsplit(endpoint)
        self.host = parts.hostname or "127.0.0.1"
        self.upstream_port = parts.port or 80
        self._lock = threading.Lock()
        self._rules: list[Rule] = []
        self.seen: list[S3Request] = []  # without their bodies

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            proxy = self

            def _pass(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                headers = {name.lower(): value for name, value in self.headers.items()}
                request = S3Request(self.command, self.path, headers, body)
                exchange = Exchange(self.proxy, request, self)
                rule = self.proxy.rule_for(request)
                try:
                    if rule is None:
                        exchange.reply(exchange.forward())
                    else:
                        try:
                            rule.act(exchange)
                        finally:
                            rule.hit.set()
                except (OSError, http.client.HTTPException):  # the client has gone, or the server has
                    exchange.cut()

            do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = _pass

            def log_message(self, format: str, *args: Any) -> None:
                """Quiet."""

        self._server = ThreadingHTTPServer((self.host, 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True, name="s3-proxy"
        )

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join(10.0)
        self._server.server_close()

    @property
    def endpoint(self) -> str:
        return f"http://{self.host}:{self._server.server_address[1]}"

    def rule(self, matches: Matches, act: Act, *, times: int | None = 1) -> Rule:
        """A rule from now on; of several that match, the oldest takes a request."""
        made = Rule(matches, act, times)
        with self._lock:
            self._rules.append(made)
        return made

    def clear(self) -> None:
        """No rules any more."""
        with self._lock:
            self._rules.clear()

    def rule_for(self, request: S3Request) -> Rule | None:
        with self._lock:
            self.seen.append(request._replace(body=b""))
            return next((rule for rule in self._rules if rule.take(request)), None)


def requests(method: str, part: str = "") -> Matches:
    """Requests of a method whose path has `part` in it: `/deltas/`, say."""
    return lambda request: request.method == method and part in request.path


def cut_upload(after: int) -> Act:
    """The server gets the first `after` bytes, the client a closed connection."""

    def act(exchange: Exchange) -> None:
        exchange.forward_part(after)
        exchange.cut()

    return act


def cut_download(after: int) -> Act:
    """The client gets the first `after` bytes, then a closed connection."""

    def act(exchange: Exchange) -> None:
        exchange.reply_part(exchange.forward(), after)

    return act


def lose_reply(exchange: Exchange) -> None:
    """The request takes effect, and its answer never comes."""
    exchange.forward()
    exchange.cut()


def answer(status: int, code: str) -> Act:
    """The server never hears of the request; the client gets this error."""

    def act(exchange: Exchange) -> None:
        body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>by rule</Message></Error>".encode()
        exchange.reply(S3Response(status, [("Content-Type", "application/xml")], body))

    return act


def damage_upload(at: int) -> Act:
    """One bit of the body is another one when it reaches the server."""

    def act(exchange: Exchange) -> None:
        exchange.reply(exchange.forward(exchange.request._replace(body=_flipped(exchange.request.body, at))))

    return act


def damage_download(at: int) -> Act:
    """One bit of the body is another one when it reaches the client."""

    def act(exchange: Exchange) -> None:
        response = exchange.forward()
        exchange.reply(response._replace(body=_flipped(response.body, at)))

    return act


def slow(seconds: float) -> Act:
    """The answer comes that much later."""

    def act(exchange: Exchange) -> None:
        response = exchange.forward()
        threading.Event().wait(seconds)
        exchange.reply(response)

    return act


def hold(gate: threading.Event) -> Act:
    """The request reaches the server only when the gate opens; its client may have given up long before."""

    def act(exchange: Exchange) -> None:
        gate.wait(_TIMEOUT_S)
        exchange.reply(exchange.forward())

    return act


def strip_condition(access_key: str, secret_key: str, region: str = "us-east-1") -> Act:
    """Takes `If-None-Match` off: behind it the server is one that ignores the condition. The request is signed anew."""

    def act(exchange: Exchange) -> None:
        asked = exchange.request
        headers = {
            n: v for n, v in asked.headers.items() if n not in _SIGNATURE | _HOP | {"if-none-match", "host"}
        }
        url = f"http://{exchange.proxy.host}:{exchange.proxy.upstream_port}{asked.path}"
        signed = AWSRequest(method=asked.method, url=url, data=asked.body, headers=headers)
        S3SigV4Auth(Credentials(access_key, secret_key), "s3", region).add_auth(signed)
        named = {name.lower(): value for name, value in signed.headers.items()}
        named["host"] = f"{exchange.proxy.host}:{exchange.proxy.upstream_port}"
        exchange.reply(exchange.forward(asked._replace(headers=named)))

    return act


def _flipped(body: bytes, at: int) -> bytes:
    at = min(at, len(body) - 1)
    return body[:at] + bytes([body[at] ^ 1]) + body[at + 1 :] if body else body
