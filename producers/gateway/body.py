"""A request's body off the wire: whole, within its size and its time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from rollwire.producers.gateway.access import Refusal

Receive = Callable[[], Awaitable[Any]]


class Disconnected(Exception):
    """The caller went away in the middle of its request: there is nobody to answer."""


async def read_body(receive: Receive, length: int | None, most: int, timeout_s: float) -> bytes | Refusal:
    """`length` is what the head says. Raises `Disconnected`."""
    if length is not None and length > most:
        return _too_large(most)
    try:
        async with asyncio.timeout(timeout_s):
            message = await receive()
            body: bytes = _body(message)
            if not message.get("more_body"):
                return body if len(body) <= most else _too_large(most)
            pieces, size = [body], len(body)
            while message.get("more_body"):
                message = await receive()
                pieces.append(_body(message))
                size += len(pieces[-1])
                if size > most:
                    return _too_large(most)
    except TimeoutError:
        return Refusal(408, "timed_out", f"the body did not arrive within {timeout_s:g} s")
    return b"".join(pieces)


def _body(message: Any) -> bytes:
    if message["type"] != "http.request":
        raise Disconnected
    body: bytes = message.get("body", b"")
    return body


def _too_large(most: int) -> Refusal:
    return Refusal(413, "too_large", f"the body has more than {most} bytes")
