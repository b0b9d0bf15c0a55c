"""A TCP proxy that understands Kafka's frames: it holds, drops, delays or cuts by rule what goes through it.

The broker has a listener for it, which advertises the proxy's port (`StackConfig.kafka_proxied`), so that a client that
bootstraps through the proxy stays behind it. What is held can be let go much later, on another connection: a network that
delays a request past its sender's time-out, made to order (C36).
"""

from __future__ import annotations

import asyncio
import struct
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final, NamedTuple, Self, TypeVar

from rollwire.ops.stack.ports import HOST
from rollwire.schemas.errors import DeadlineExceeded, StackError

ADD_PARTITIONS_TO_TXN: Final = 24
END_TXN: Final = 26
_FRAME_LIMIT: Final = 100 << 20
_CALL_S: Final = 10.0
T = TypeVar("T")


class Side(Enum):
    """Where a rule takes hold: before the broker has seen a request, or when it has answered."""

    REQUEST = "request"
    RESPONSE = "response"


class Request(NamedTuple):
    """The header of one request, and its whole frame without the length in front."""

    api_key: int
    api_version: int
    correlation: int
    client_id: str
    frame: bytes


class EndTxn(NamedTuple):
    """What an EndTxn request asks for."""

    transactional_id: str
    producer_id: int
    epoch: int
    committed: bool


def parse_request(frame: bytes) -> Request:
    """The header of a request (version 1 and 2 begin alike). Raises `ValueError` where there is none."""
    try:
        api_key, api_version, correlation, length = struct.unpack_from(">hhih", frame)
    except struct.error as error:
        raise ValueError(f"a frame of {len(frame)} bytes has no request header") from error
    client = frame[10 : 10 + max(length, 0)]
    if len(client) != max(length, 0):
        raise ValueError("a request header ends within its client id")
    return Request(api_key, api_version, correlation, client.decode(errors="replace"), frame)


def parse_end_txn(request: Request) -> EndTxn:
    """The body of an EndTxn request, of any version. Raises `ValueError` for another request."""
    if request.api_key != END_TXN:
        raise ValueError(f"request {request.api_key} is no EndTxn")
    try:
        name, at = _transactional_id(request)
        producer_id, epoch, committed = struct.unpack_from(">qh?", request.frame, at)
    except (struct.error, IndexError) as error:
        raise ValueError(f"an EndTxn request ends after {len(request.frame)} bytes") from error
    return EndTxn(name, producer_id, epoch, committed)


def _transactional_id(request: Request) -> tuple[str, int]:
    """The string that the bodies of transactional requests begin with, and where it ends."""
    at = 10 + len(request.client_id.encode())
    if request.api_version >= 3:  # flexible: the header's tagged fields (none), then a compact string
        length, at = request.frame[at + 1] - 1, at + 2
    else:
        length, at = struct.unpack_from(">h", request.frame, at)[0], at + 2
    return request.frame[at : at + length].decode(), at + length


@dataclass(eq=False)
class Hold:
    """A rule, and what it caught: the next matching request (or the answer to it) does not go on until `release`.

    Made by `KafkaProxy.hold`; its methods may be called from any thread.
    """

    proxy: KafkaProxy
    matches: Callable[[Request], bool]
    side: Side
    cut_then: bool = False  # the connection ends when the request has been caught
    caught: Request | None = None
    answer: bytes | None = None
    happened: threading.Event = field(default_factory=threading.Event)
    _link: _Link | None = None

    def wait(self, timeout_s: float) -> Request:
        """The request that was caught. Raises `DeadlineExceeded`."""
        if not self.happened.wait(timeout_s) or self.caught is None:
            raise DeadlineExceeded(f"no request was held within {timeout_s:g} s")
        return self.caught

    def release(self) -> bytes:
        """Lets the request go, on a connection of its own, and returns the broker's answer (without its length).

        A held answer is given to the client, if it is still there, and returned. Raises `DeadlineExceeded`.
        """
        return self.proxy.call(self._release(), "releasing a request")

    def resume(self) -> None:
        """Lets a held request go on its own connection, as if it had only been slow."""
        self.proxy.call(self._resume(), "resuming a request")

    def cancel(self) -> None:
        """Takes the rule back: from now on it catches nothing."""
        self.proxy.forget(self)

    async def _resume(self) -> None:
        if self.caught is None or self._link is None or self.side is Side.RESPONSE:
            raise DeadlineExceeded("no request is held")
        self._link.to_broker(self.caught.frame)

    async def _release(self) -> bytes:
        if self.caught is None:
            raise DeadlineExceeded("nothing is held")
        if self.side is Side.RESPONSE:
            answer = self.answer or b""
            if self._link is not None:
                self._link.to_client(answer)
            return answer
        reader, writer = await asyncio.open_connection(HOST, self.proxy.upstream)
        try:
            _write(writer, self.caught.frame)
            return await _read(reader)
        finally:
            writer.close()


def error_code(answer: bytes, api_version: int) -> int:
    """The error code in the broker's answer to an EndTxn request."""
    tagged = 1 if api_version >= 3 else 0
    code: int = struct.unpack_from(">h", answer, 4 + tagged + 4)[0]
    return code


class KafkaProxy:
    """Listens on `port` and passes everything on to `upstream` on this machine, in a thread of its own."""

    def __init__(self, port: int, upstream: int) -> None:
        self.port = port
        self.upstream = upstream
        self.delay_s = 0.0  # of each request from now on
        self._holds: list[Hold] = []
        self._watches: list[tuple[Callable[[Request], bool], threading.Event]] = []
        self._links: set[_Link] = set()
        self._loop = asyncio.new_event_loop()
        self._server: asyncio.Server | None = None
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name="kafka-proxy")

    def __enter__(self) -> Self:
        self._thread.start()
        try:
            self.call(self._listen(), "starting the proxy")
        except OSError as error:
            self.close()
            raise StackError(f"the proxy cannot listen on {HOST}:{self.port}: {error}") from error
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def bootstrap(self) -> str:
        return f"{HOST}:{self.port}"

    def hold(
        self, matches: Callable[[Request], bool], side: Side = Side.REQUEST, *, cut: bool = False
    ) -> Hold:
        """Catches the next request that matches, once; with `cut`, its connection ends at once. `matches` runs in the
        proxy's thread."""
        made = Hold(self, matches, side, cut)
        self._holds.append(made)
        return made

    def hold_end_txn(self, transactional_id: str, side: Side = Side.REQUEST, *, cut: bool = False) -> Hold:
        """Catches the next EndTxn of a producer."""

        def matches(request: Request) -> bool:
            return request.api_key == END_TXN and parse_end_txn(request).transactional_id == transactional_id

        return self.hold(matches, side, cut=cut)

    def watch(self, matches: Callable[[Request], bool]) -> threading.Event:
        """Is set when the next request that matches has come by; nothing is done to it."""
        seen = threading.Event()
        self._watches.append((matches, seen))
        return seen

    def watch_transaction(self, transactional_id: str, api_key: int) -> threading.Event:
        """Is set when a producer's next transaction reaches the broker, with the first partition it writes to
        (`ADD_PARTITIONS_TO_TXN`), or is asked to end (`END_TXN`)."""

        def matches(request: Request) -> bool:
            return request.api_key == api_key and _transactional_id(request)[0] == transactional_id

        return self.watch(matches)

    def cut_all(self) -> int:
        """Ends every connection; how many there were."""

        async def cut() -> int:
            links = list(self._links)
            for link in links:
                link.close()
            return len(links)

        return self.call(cut(), "cutting all connections")

    def close(self) -> None:
        if not self._thread.is_alive():
            return
        with suppress(DeadlineExceeded):
            self.call(self._stop(), "ending the proxy")
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CALL_S)
        self._loop.close()

    def call(self, work: Coroutine[Any, Any, T], what: str) -> T:
        """Runs `work` in the proxy's thread. Raises `DeadlineExceeded`, and what it raises."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(_CALL_S)
        except TimeoutError:
            future.cancel()
            raise DeadlineExceeded(f"{what} took longer than {_CALL_S:g} s") from None

    def forget(self, hold: Hold) -> None:
        with suppress(ValueError):
            self._holds.remove(hold)

    def rule_for(self, request: Request) -> Hold | None:
        """The first rule that the request meets; it is used up."""
        for watch in list(self._watches):
            if watch[0](request):
                self._watches.remove(watch)
                watch[1].set()
        for hold in list(self._holds):
            if hold.matches(request):
                self.forget(hold)
                return hold
        return None

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._accept, HOST, self.port)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            up_reader, up_writer = await asyncio.open_connection(HOST, self.upstream)
        except OSError:  # no broker: the client sees its connection end, as it would without a proxy
            writer.close()
            return
        link = _Link(self, writer, up_writer)
        self._links.add(link)
        try:
            done, running = await asyncio.wait(
                [
                    asyncio.ensure_future(link.requests(reader)),
                    asyncio.ensure_future(link.answers(up_reader)),
                ],
                return_when=asyncio.FIRST_COMPLETED,
            )
            for task in running:
                task.cancel()
            await asyncio.gather(*done, *running, return_exceptions=True)
        finally:
            self._links.discard(link)
            link.close()

    async def _stop(self) -> None:
        if self._server is not None:
            self._server.close()
        for link in list(self._links):
            link.close()
        current = asyncio.current_task()
        others = [task for task in asyncio.all_tasks() if task is not current]
        if others:  # each ends with its connection
            await asyncio.wait(others, timeout=_CALL_S / 2)


class _Link:
    """One client's connection, with the one to the broker behind it."""

    def __init__(self, proxy: KafkaProxy, client: asyncio.StreamWriter, broker: asyncio.StreamWriter) -> None:
        self._proxy = proxy
        self._client = client
        self._broker = broker
        self._answers: dict[int, Hold] = {}  # correlation id -> the rule that wants its answer

    async def requests(self, reader: asyncio.StreamReader) -> None:
        with suppress(OSError, asyncio.IncompleteReadError, ValueError):
            while True:
                request = parse_request(await _read(reader))
                if self._proxy.delay_s > 0:
                    await asyncio.sleep(self._proxy.delay_s)
                hold = self._proxy.rule_for(request)
                if hold is not None:
                    hold.caught, hold._link = request, self
                    if hold.side is Side.REQUEST:
                        hold.happened.set()
                        if hold.cut_then:
                            return
                        continue
                    self._answers[request.correlation] = hold
                _write(self._broker, request.frame)
                await self._broker.drain()

    async def answers(self, reader: asyncio.StreamReader) -> None:
        with suppress(OSError, asyncio.IncompleteReadError, ValueError):
            while True:
                frame = await _read(reader)
                (correlation,) = struct.unpack_from(">i", frame)
                hold = self._answers.pop(correlation, None)
                if hold is not None:
                    hold.answer = frame
                    hold.happened.set()
                    if hold.cut_then:
                        return
                    continue
                self.to_client(frame)
                await self._client.drain()

    def to_client(self, frame: bytes) -> None:
        if not self._client.is_closing():
            _write(self._client, frame)

    def to_broker(self, frame: bytes) -> None:
        if not self._broker.is_closing():
            _write(self._broker, frame)

    def close(self) -> None:
        self._client.close()
        self._broker.close()


async def _read(reader: asyncio.StreamReader) -> bytes:
    (length,) = struct.unpack(">i", await reader.readexactly(4))
    if not 4 <= length <= _FRAME_LIMIT:
        raise ValueError(f"a frame of {length} bytes is none of Kafka's")
    return await reader.readexactly(length)


def _write(writer: asyncio.StreamWriter, frame: bytes) -> None:
    writer.write(struct.pack(">i", len(frame)) + frame)
