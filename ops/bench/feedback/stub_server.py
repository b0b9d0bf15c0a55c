"""A server that answers 204 to everything and does nothing else: what the load generator is tried on before it judges another."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from multiprocessing.connection import Connection as Pipe
from types import TracebackType
from typing import Final, NamedTuple, Self, cast

from rollwire.ops.bench.feedback.bodies import Bodies
from rollwire.ops.bench.feedback.generator import Outcome, Plan, Rate
from rollwire.ops.bench.feedback.latency import max_ms, merged, percentile_ms
from rollwire.ops.bench.feedback.senders import CONTEXT, Senders
from rollwire.ops.stack.ports import HOST
from rollwire.schemas.errors import DeadlineExceeded

_START_S: Final = 30.0
_STOP_S: Final = 5.0
_ANSWER: Final = b"HTTP/1.1 204 No Content\r\n\r\n"
_END: Final = b"\r\n\r\n"
_LENGTH: Final = b"\r\ncontent-length: "


class _Answers(asyncio.Protocol):
    def __init__(self) -> None:
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer
        buffer += data
        while (head_end := buffer.find(_END)) >= 0:
            at = buffer.find(_LENGTH, 0, head_end)
            length = 0
            if at >= 0:
                start = at + len(_LENGTH)
                end = buffer.find(b"\r\n", start)
                length = int(buffer[start:end])
            if len(buffer) < head_end + len(_END) + length:
                return
            del buffer[: head_end + len(_END) + length]
            if self._transport is not None:
                self._transport.write(_ANSWER)


def _serve(pipe: Pipe) -> None:
    import uvloop

    async def work() -> None:
        server = await asyncio.get_running_loop().create_server(_Answers, HOST, 0, backlog=2_048)
        pipe.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    uvloop.run(work())


class StubServer:
    """The server as a process; `stop` makes it stand still, `go_on` ends that."""

    def __init__(self) -> None:
        self._ours, theirs = CONTEXT.Pipe()
        self._process = CONTEXT.Process(target=_serve, args=(theirs,), daemon=True)
        self.port = 0

    def __enter__(self) -> Self:
        self._process.start()
        if not self._ours.poll(_START_S):
            self._process.kill()
            raise DeadlineExceeded(f"the stub server did not listen within {_START_S:g} s")
        self.port = int(self._ours.recv())
        return self

    def stop(self) -> None:
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        if self._process.pid is not None:
            os.kill(self._process.pid, number)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.join(_STOP_S)


class SelfTest(NamedTuple):
    """What the generator saw of a server that stood still for `stopped_s`."""

    outcome: Outcome
    stopped_s: float
    slow: int  # asks that took longer than a tenth of that
    p50_ms: float
    max_ms: float

    @property
    def honest(self) -> bool:
        """Whether the stall is in the figures: a closed loop would have one slow ask a connection, and nothing more."""
        planned = self.outcome.asked / self.outcome.seconds * self.stopped_s * 0.9
        return self.slow >= 0.8 * planned and self.max_ms >= 900 * self.stopped_s


def self_test(
    rate: float = 1_000.0, seconds: float = 3.0, stopped_s: float = 1.0, connections: int = 64
) -> SelfTest:
    """A stub server at `rate`, stopped by SIGSTOP in the middle. Some 11 times more asks come due than there are connections."""
    with StubServer() as server:
        plan = Plan(
            "127.0.0.1",
            server.port,
            "/v1/feedback",
            (),
            connections,
            (Rate(rate, seconds),),
            Bodies("self-test", time.time_ns() // 1_000),
        )
        with Senders([plan]) as senders:
            senders.go()
            time.sleep(seconds / 3)
            server.stop()
            began_s = time.monotonic()
            try:
                time.sleep(stopped_s)
            finally:
                server.go_on()
            stood_s = time.monotonic() - began_s
            (outcome,) = senders.outcomes()
    histogram = merged([outcome.histogram])
    slow = sum(
        item.count_added_in_this_iter_step
        for item in histogram.get_recorded_iterator()
        if item.value_iterated_to > stood_s * 1e5
    )
    return SelfTest(outcome, stood_s, slow, percentile_ms(histogram, 50), max_ms(histogram))
