"""Before there is a request: heads that do not end, heads that do not come, and lines that are no HTTP (C76)."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
import uvicorn

from rollwire.ops.http_bounds import HEAD_BYTES, BoundedHttp
from rollwire.ops.http_server import listen

GOOD = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\nok"
CHUNKED = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"


class Hasty(BoundedHttp):
    head_s = 0.3


async def echo_length(scope: Any, receive: Any, send: Any) -> None:
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] != "http.request":
            return
        size += len(message.get("body", b""))
        more = message.get("more_body", False)
    body = b"%d" % size
    headers = [(b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@pytest.fixture
def port() -> Iterator[int]:
    listener = listen("127.0.0.1", 0)
    config = uvicorn.Config(echo_length, http=Hasty, ws="none", lifespan="off", log_level="error")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    with closing(listener):
        yield listener.getsockname()[1]
        server.should_exit = True
        thread.join(30)


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=30)


def read(wire: socket.socket) -> bytes:
    data = b""
    try:
        while piece := wire.recv(65_536):
            data += piece
    except ConnectionError:
        pass
    return data


def answered(wire: socket.socket) -> tuple[int, str]:
    """(status, code) of the last answer on a connection that the server ends."""
    head, _, body = read(wire).partition(b"\r\n\r\n")
    found = json.loads(body)
    assert found["request_id"].encode() in head
    return int(head.split(b" ")[1]), found["code"]


def flood(wire: socket.socket, piece: bytes, most: int) -> int:
    """Bytes that the server took before it ended the connection."""
    sent = 0
    try:
        while sent < most:
            wire.sendall(piece)
            sent += len(piece)
    except ConnectionError:
        pass
    return sent


def good(port: int) -> None:
    with connect(port) as wire:
        wire.sendall(GOOD)
        assert wire.recv(4_096).endswith(b"\r\n\r\n2")


@pytest.mark.parametrize(
    ("begin", "piece"),
    [
        (b"GET /", b"a" * 65_536),
        (b"GET / HTTP/1.1\r\nx: ", b"a" * 65_536),
        (b"GET / HTTP/1.1\r\n", b"x: y\r\n" * 10_000),
        (CHUNKED + b"1;", b"a" * 65_536),
        (CHUNKED + b"0\r\nx: ", b"a" * 65_536),
    ],
    ids=["an address", "one header", "many headers", "a chunk's extension", "a trailer"],
)
def test_c76_a_head_that_does_not_end_is_cut_off(port: int, begin: bytes, piece: bytes) -> None:
    most = 512 * 1024 * 1024
    with connect(port) as wire:
        wire.sendall(begin)
        assert flood(wire, piece, most) < most
    good(port)


def test_c76_a_long_head_is_told_why(port: int) -> None:
    with connect(port) as wire:
        wire.sendall(b"GET / HTTP/1.1\r\nx: " + b"a" * HEAD_BYTES)
        assert answered(wire) == (431, "too_large")


def test_a_head_of_the_allowed_length_and_a_long_body_pass(port: int) -> None:
    size = 3 * 1024 * 1024
    with connect(port) as wire:
        wire.sendall(b"POST / HTTP/1.1\r\nhost: x\r\nx: " + b"a" * (HEAD_BYTES - 200))
        wire.sendall(b"\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % size + b"b" * size)
        assert read(wire).endswith(b"\r\n\r\n%d" % size)
    with connect(port) as wire:
        wire.sendall(CHUNKED + b"1\r\nx\r\n" * 50_000 + b"0\r\n\r\n")
        assert wire.recv(4_096).endswith(b"\r\n\r\n50000")


def test_half_a_head_is_not_waited_for(port: int) -> None:
    with connect(port) as wire:
        wire.sendall(b"GET / HTTP/1.1\r\nhost")
        assert answered(wire) == (408, "timed_out")
    with connect(port) as wire:
        assert read(wire) == b""  # nothing was sent: nothing is answered
    with connect(port) as wire:  # and the next one on a connection neither
        wire.sendall(GOOD)
        assert wire.recv(4_096).endswith(b"\r\n\r\n2")
        wire.sendall(GOOD[:20])
        assert answered(wire) == (408, "timed_out")


def test_a_connection_between_two_requests_is_kept(port: int) -> None:
    with connect(port) as wire:
        wire.sendall(GOOD)
        assert wire.recv(4_096).endswith(b"\r\n\r\n2")
        begun = time.monotonic()
        wire.settimeout(Hasty.head_s * 3)
        with pytest.raises(TimeoutError):
            wire.recv(1)
        assert time.monotonic() - begun > Hasty.head_s * 2
        wire.settimeout(30)
        wire.sendall(GOOD)
        assert wire.recv(4_096).endswith(b"\r\n\r\n2")


@pytest.mark.parametrize(
    "line",
    [b"GARBAGE\r\n\r\n", b"GET /\xff HTTP/1.1\r\n\r\n", b"POST / HTTP/1.1\r\ncontent-length: -1\r\n\r\n"],
)
def test_no_http_is_told_so(port: int, line: bytes) -> None:
    with connect(port) as wire:
        wire.sendall(line)
        assert answered(wire) == (400, "malformed")
    good(port)
