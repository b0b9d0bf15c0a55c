"""One keep-alive connection of the load generator: one ask at a time, its answer or its loss told to the owner."""

from __future__ import annotations

import asyncio
from typing import Protocol, cast

from rollwire.ops.bench.feedback.http import Answer, parse_answer
from rollwire.schemas.errors import LogError


class Ask:
    """One request on its way. Mutable: a load generator makes thousands a second."""

    __slots__ = ("data", "first", "planned_s", "sent_s", "tries")

    def __init__(self, planned_s: float, data: bytes, first: int) -> None:
        self.planned_s = planned_s  # when the timetable wanted it sent; seconds of the event loop
        self.data = data
        self.first = first  # the number of its first event
        self.tries = 0
        self.sent_s = 0.0  # the last try


class Owner(Protocol):
    def answered(self, connection: Connection, ask: Ask, answer: Answer) -> None: ...

    def lost(self, connection: Connection, ask: Ask | None) -> None: ...


class Connection(asyncio.Protocol):
    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None
        self.ask: Ask | None = None

    @property
    def usable(self) -> bool:
        return self._transport is not None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def send(self, ask: Ask, now_s: float) -> None:
        """For a usable connection without an ask."""
        self.ask = ask
        ask.sent_s = now_s
        ask.tries += 1
        if self._transport is not None:
            self._transport.write(ask.data)

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer
        buffer += data
        found = parse_answer(buffer)
        if found is None:
            return
        answer, end = found
        del buffer[:end]
        ask, self.ask = self.ask, None
        if ask is None:
            raise LogError(f"an answer {answer.status} to nothing that was asked")
        if answer.closes:
            self.close()
        self._owner.answered(self, ask, answer)

    def close(self) -> None:
        """Breaks it; `Owner.lost` follows."""
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        ask, self.ask = self.ask, None
        self._owner.lost(self, ask)
