"""One HTTP request, sent byte by byte as it is: broken, cut off or endless. No client library sends such things."""

from __future__ import annotations

import json
import select
import socket
import time
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit

PATH = "/v1/feedback"


class Said(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes
    seconds: float

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def problem(self) -> tuple[int, str, str]:
        """(status, code, field)"""
        found = self.json
        assert found["request_id"] == self.headers["x-request-id"]
        assert found["detail"]
        assert self.headers["content-type"] == "application/problem+json"
        return self.status, found["code"], found["field"]


def post(
    url: str,
    body: bytes | Iterable[bytes],
    headers: Mapping[str, str],
    *,
    path: str = PATH,
    promised: int | None = None,
) -> Said:
    """One request on a connection of its own, sent as it is. An answer that comes before the body is whole is read as well:
    the rest is not sent then. `body`: an iterable is sent in chunks, without its length; `promised`: the length that the
    head says, where it is another one."""
    at = urlsplit(url)
    begun = time.monotonic()
    with socket.create_connection((at.hostname or "", at.port or 0), timeout=60) as wire:
        head = [f"POST {path} HTTP/1.1", f"host: {at.netloc}", "connection: close"]
        head += [f"{name}: {value}" for name, value in headers.items()]
        if isinstance(body, bytes):
            head.append(f"content-length: {len(body) if promised is None else promised}")
            pieces: Iterable[bytes] = (body[at : at + 64 * 1024] for at in range(0, len(body), 64 * 1024))
        else:
            head.append("transfer-encoding: chunked")
            pieces = (b"%x\r\n%b\r\n" % (len(piece), piece) for piece in (*body, b""))
        wire.sendall("\r\n".join(head).encode("latin-1") + b"\r\n\r\n")
        try:
            for piece in pieces:
                if select.select([wire], [], [], 0)[0]:
                    break
                wire.sendall(piece)
            if promised is not None and isinstance(body, bytes) and promised > len(body):
                wire.shutdown(socket.SHUT_WR)
        except ConnectionError:
            pass  # the answer is there: the server reads no more
        return read_answer(wire, begun)


def read_answer(wire: socket.socket, begun: float) -> Said:
    data = b""
    try:
        while piece := wire.recv(64 * 1024):
            data += piece
            head, found, body = data.partition(b"\r\n\r\n")
            if found and len(body) >= int(_headers(head).get("content-length", 0)):
                break
    except ConnectionError:
        pass
    head, _, body = data.partition(b"\r\n\r\n")
    status = int(head.split(b" ", 2)[1]) if head else 0
    return Said(status, _headers(head), body, time.monotonic() - begun)


def _headers(head: bytes) -> dict[str, str]:
    lines = head.decode("latin-1").split("\r\n")[1:]
    return {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
