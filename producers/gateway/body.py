"""A request's body off the wire: whole, within its size and its time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final

from rollwire.producers.gateway.access import Refusal

Receive = Callable[[], Awaitable[Any]]
_LOOK_S: Final = 0.25


class Disconnected(Exception):
    """The caller went away in the middle of its request: there is nobody to answer."""


class BodyReader:
    """Made and used on one event loop. All waits share one timer: nearly every body is there when its head is, and a timer
    a request would cost more than to read it."""

    def __init__(self, most: int, timeout_s: float) -> None:
        self._most = most
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[asyncio.Task[Any], float] = {}  # in order of deadline
        self._late: set[asyncio.Task[Any]] = set()
        self._timer = self._loop.call_later(_LOOK_S, self._look)

    def close(self) -> None:
        self._timer.cancel()

    async def read(self, receive: Receive, length: int | None) -> bytes | Refusal:
        """`length` is what the head says. Raises `Disconnected`."""
        most = self._most
        if length is not None and length > most:
            return self._too_large()
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a body is read in a task")
        self._waiting[task] = self._loop.time() + self._timeout_s
        try:
            message = await receive()
            body = _body(message)
            if message.get("more_body"):
                pieces, size = [body], len(body)
                while message.get("more_body") and size <= most:
                    message = await receive()
                    pieces.append(_body(message))
                    size += len(pieces[-1])
                body = b"".join(pieces)
        except asyncio.CancelledError:
            if task not in self._late:
                raise
            task.uncancel()
            return Refusal(408, "timed_out", f"the body did not arrive within {self._timeout_s:g} s")
        finally:
            del self._waiting[task]
            self._late.discard(task)
        return body if len(body) <= most else self._too_large()

    def _look(self) -> None:
        now_s = self._loop.time()
        for task, deadline_s in self._waiting.items():
            if deadline_s > now_s:
                break
            if task not in self._late:
                self._late.add(task)
                task.cancel()
        self._timer = self._loop.call_later(_LOOK_S, self._look)

    def _too_large(self) -> Refusal:
        return Refusal(413, "too_large", f"the body has more than {self._most} bytes")


def _body(message: Any) -> bytes:
    if message["type"] != "http.request":
        raise Disconnected
    body: bytes = message.get("body", b"")
    return body
