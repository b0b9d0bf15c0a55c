"""A request's body off the wire: whole, within its size and its time."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, Final

from rollwire.producers.gateway.access import Caller, Refusal

Receive = Callable[[], Awaitable[Any]]
_LOOK_S: Final = 0.25
_PAGES: Final = 4  # a publishable key has this part of the room


class Disconnected(Exception):
    """The caller went away in the middle of its request: there is nobody to answer."""


class BodyReader:
    """Made and used on one event loop. All waits share one timer: nearly every body is there when its head is, and a timer
    a request would cost more than to read it."""

    def __init__(self, most: int, room: int, timeout_s: float, busy: Refusal) -> None:
        self._most = most
        self._room = room
        self._busy = busy  # where there is no room
        self.held = 0  # bytes that arrived and were not given back
        self._by_page_key: Counter[str] = Counter()  # the part of it that came by each publishable key
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[asyncio.Task[Any], float] = {}  # in order of deadline
        self._late: set[asyncio.Task[Any]] = set()
        self._timer = self._loop.call_later(_LOOK_S, self._look)

    def close(self) -> None:
        self._timer.cancel()

    async def read(self, receive: Receive, length: int | None, caller: Caller) -> bytes | Refusal:
        """`length` is what the head says. A body that is given must be given back by `done`. Raises `Disconnected`.

        What counts is what arrived, not what is promised: who promises much and sends nothing takes nobody's room. A
        publishable key, which anybody can have, never takes more than a quarter.
        """
        most = self._most
        if length is not None and length > most:
            return self._too_large()
        size, given = 0, False
        task = asyncio.current_task(self._loop)
        if task is None:
            raise RuntimeError("a body is read in a task")
        self._waiting[task] = self._loop.time() + self._timeout_s
        try:
            message = await receive()
            body = _body(message)
            size = len(body)
            if not self._hold(size, size, caller):
                return self._busy
            if message.get("more_body"):
                pieces = [body]
                while message.get("more_body") and size <= most:
                    message = await receive()
                    pieces.append(_body(message))
                    size += len(pieces[-1])
                    if not self._hold(len(pieces[-1]), size, caller):
                        return self._busy
                body = b"".join(pieces)
            if size > most:
                return self._too_large()
            given = True
            return body
        except asyncio.CancelledError:
            if task not in self._late:
                raise
            task.uncancel()
            return Refusal(408, "timed_out", f"the body did not arrive within {self._timeout_s:g} s")
        finally:
            del self._waiting[task]
            self._late.discard(task)
            if not given:
                self.done(size, caller)

    def done(self, size: int, caller: Caller) -> None:
        """Gives back the room of a body of `size` bytes."""
        self.held -= size
        if caller.publishable:
            self._by_page_key[caller.key_id] -= size

    def _hold(self, more: int, size: int, caller: Caller) -> bool:
        """Counts `more` bytes of a body that has `size` by now; whether there is room. A body alone always has."""
        self.held += more
        room = self.held <= self._room or self.held == size
        if caller.publishable:
            self._by_page_key[caller.key_id] += more
            held = self._by_page_key[caller.key_id]
            room = room and (held <= self._room // _PAGES or held == size)
        return room

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
