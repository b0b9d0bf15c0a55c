"""Bodies off the wire: how much is held at once, and by whom (C76)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from rollwire.producers.gateway.access import Caller, Refusal
from rollwire.producers.gateway.body import BodyReader

BUSY = Refusal(503, "overloaded", "busy")
SERVER = Caller("server", "acme", frozenset())
PAGE, OTHER_PAGE = (Caller(name, "acme", frozenset(), publishable=True) for name in ("page", "other"))


class Sender:
    """Sends a body piece by piece, each when it is told to."""

    def __init__(self, reader: BodyReader, caller: Caller, promised: int | None = None) -> None:
        self._pieces: asyncio.Queue[Any] = asyncio.Queue()
        self._promised = promised
        self._read = asyncio.create_task(reader.read(self._pieces.get, promised, caller))

    async def send(self, size: int, *, more: bool = True) -> None:
        await self._pieces.put({"type": "http.request", "body": bytes(size), "more_body": more})
        for _ in range(3):
            await asyncio.sleep(0)

    async def answer(self) -> bytes | Refusal:
        return await asyncio.wait_for(self._read, 30)

    async def code(self) -> str:
        found = await self.answer()
        return found.code if isinstance(found, Refusal) else f"{len(found)} bytes"


def run(scenario: Callable[[BodyReader], Coroutine[Any, Any, None]], timeout_s: float = 30.0) -> None:
    async def whole() -> None:
        reader = BodyReader(100, 200, timeout_s, BUSY)
        try:
            await scenario(reader)
        finally:
            reader.close()

    asyncio.run(whole())


def test_c76_what_is_promised_takes_no_room() -> None:
    async def scenario(reader: BodyReader) -> None:
        slow = [Sender(reader, SERVER, promised=100) for _ in range(50)]
        for sender in slow:
            await sender.send(1)
        good = Sender(reader, SERVER)
        await good.send(100, more=False)
        assert await good.code() == "100 bytes"
        for sender in slow:
            await sender.send(1, more=False)
            assert await sender.code() == "2 bytes"

    run(scenario)


def test_c76_what_arrived_takes_room_until_it_is_given_back() -> None:
    async def scenario(reader: BodyReader) -> None:
        held = [Sender(reader, SERVER) for _ in range(2)]
        for sender in held:
            await sender.send(99)
        late = Sender(reader, SERVER)
        await late.send(50, more=False)
        assert await late.answer() == BUSY
        for sender in held:
            await sender.send(1, more=False)
            assert await sender.code() == "100 bytes"
        reader.done(100, SERVER)
        again = Sender(reader, SERVER)
        await again.send(50, more=False)
        assert await again.code() == "50 bytes"

    run(scenario)


def test_c76_one_page_leaves_room_for_all_others() -> None:
    async def scenario(reader: BodyReader) -> None:
        stalling = [Sender(reader, PAGE) for _ in range(20)]
        for sender in stalling:
            await sender.send(49)
        kept = [sender for sender in stalling if not sender._read.done()]
        assert len(kept) == 1  # a quarter of the room
        for caller in (SERVER, OTHER_PAGE):
            good = Sender(reader, caller)
            await good.send(49, more=False)
            assert await good.code() == "49 bytes"
        large = Sender(reader, OTHER_PAGE)
        await large.send(2, more=False)
        assert await large.answer() == BUSY
        reader.done(49, OTHER_PAGE)
        again = Sender(reader, OTHER_PAGE)
        await again.send(50, more=False)
        assert await again.code() == "50 bytes"
        await kept[0].send(0, more=False)
        assert await kept[0].code() == "49 bytes"

    run(scenario)


def test_a_body_above_the_limit_is_refused_and_holds_nothing() -> None:
    async def scenario(reader: BodyReader) -> None:
        assert await Sender(reader, SERVER, promised=101).code() == "too_large"
        for caller, code in ((SERVER, "too_large"), (PAGE, "overloaded")):
            pieces = Sender(reader, caller)
            await pieces.send(60)
            if code == "overloaded":
                other = Sender(reader, PAGE)
                await other.send(1)
                assert await other.code() == code
            await pieces.send(60)
            assert await pieces.code() == "too_large"
            assert reader.held == 0

    run(scenario)


def test_a_body_that_does_not_come_is_given_up_and_holds_nothing() -> None:
    async def scenario(reader: BodyReader) -> None:
        stalling = [Sender(reader, SERVER) for _ in range(3)]
        for sender in stalling:
            await sender.send(9)
            assert await sender.code() == "timed_out"
        assert reader.held == 0

    run(scenario, timeout_s=0.01)
