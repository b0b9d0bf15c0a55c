"""An open-loop load generator: requests leave by a timetable, whatever becomes of those before.

One uvloop, raw HTTP/1.1 on keep-alive connections. An ask's latency runs from the moment that the timetable says, not from when
it was sent, to its first 2xx: so a server that stands still for a second shows up in every ask of that second (no coordinated
omission). Asks sent `LATE_S` or more behind the timetable are counted: all connections were busy, or the generator itself could
not keep up.

What gets no 2xx is sent again with the same ids, as a client would: after a broken connection, no answer in time, 429 or 5xx, with
full jitter, honouring Retry-After; until `patience_s` after its planned time. Other 4xx are final.

Without a rate the loop is closed: as many asks as there are connections, each followed by the next at once. That finds the maximum.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import time
from array import array
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from hdrh.histogram import HdrHistogram  # type: ignore[import-untyped]

from rollwire.ops.bench.feedback.bodies import Bodies
from rollwire.ops.bench.feedback.connection import Ask, Connection
from rollwire.ops.bench.feedback.http import Answer, request
from rollwire.schemas.errors import ConfigError

LATE_S: Final = 0.005
TOP_US: Final = 600_000_000
DIGITS: Final = 3
_TICK_S: Final = 0.001
_SWEEP_S: Final = 0.05
_BACKOFF_S: Final = (0.05, 2.0)  # of the first retry, and of the last
_SERVER_ERROR: Final = 500
_TOO_MANY: Final = 429


class Rate(NamedTuple):
    """A part of the timetable."""

    per_s: float  # asks; 0: as fast as answers come
    seconds: float


class Plan(NamedTuple):
    """What one generator is to do."""

    host: str
    port: int
    path: str
    headers: tuple[tuple[str, str], ...]
    connections: int
    rates: tuple[Rate, ...]
    bodies: Bodies | None  # None: GET without a body
    batch: int = 1  # events an ask
    answer_s: float = 10.0  # one try
    patience_s: float = 60.0  # all tries, from the planned time
    seed: int = 0
    prepared: int = 0  # asks that are made before the first is sent


class Outcome(NamedTuple):
    """What came of it."""

    histogram: bytes  # microseconds; see `latency.merged`
    asked: int
    accepted: array[int]  # the first event's number of every ask that got its 2xx
    refused: int  # asks that ended with a final 4xx
    given_up: int
    late: int
    latest_s: float
    tries: int
    unknown: int  # tries without an answer: broken connection, or none in time
    statuses: dict[int, int]
    seconds: float  # of the timetable
    answered_in_time: int  # 2xx before the timetable's end
    cpu_s: float

    @property
    def per_s(self) -> float:
        """Asks with a 2xx a second of the timetable."""
        return self.answered_in_time / self.seconds if self.seconds else 0.0


class Generator:
    def __init__(self, plan: Plan) -> None:
        closed = [rate for rate in plan.rates if not rate.per_s]
        if closed and len(plan.rates) > 1:
            raise ConfigError("a closed loop is a timetable of its own")
        self._plan = plan
        self._closed = bool(closed)
        self._loop = asyncio.get_running_loop()
        self._histogram = HdrHistogram(1, TOP_US, DIGITS)
        self._random = random.Random(plan.seed)
        self._idle: deque[Connection] = deque()
        self._all: set[Connection] = set()
        self._waiting: deque[Ask] = deque()  # due, no connection is free
        self._pausing = 0  # asks that wait for their next try
        self._opening: set[asyncio.Task[None]] = set()
        self._next = 0
        self._timetable: Iterator[float] = iter(())
        self._due_s = 0.0
        self._ends_s = 0.0
        self._over = False
        self._ready: deque[bytes] = deque()
        self._headers = (*plan.headers, *((("content-type", _content_type(plan)),) if plan.bodies else ()))
        self._empty = request("GET", plan.path, f"{plan.host}:{plan.port}", b"", self._headers)
        self.accepted: array[int] = array("q")
        self.statuses: Counter[int] = Counter()
        self.refused = self.given_up = self.late = self.tries = self.unknown = self.in_time = 0
        self.latest_s = 0.0
        self._done = self._loop.create_future()

    async def connect(self) -> None:
        """Opens all connections and makes what is to be made before the first ask. Raises `OSError`."""
        for _ in range(self._plan.connections):
            await self._open()
        for number in range(self._plan.prepared):
            self._ready.append(self._data(number))

    async def run(self) -> Outcome:
        """The whole timetable, and until everything is answered or given up."""
        gc.collect()
        gc.freeze()
        gc.disable()  # what it makes has no cycles; its pauses would be the server's
        cpu_s = time.process_time()
        rates = self._plan.rates
        began_s = time.monotonic()
        self._ends_s = began_s + sum(rate.seconds for rate in rates)
        self._timetable = _planned(rates, began_s)
        self._due_s = began_s if self._closed else next(self._timetable, self._ends_s)
        self._loop.call_soon(self._tick)
        self._loop.call_later(_SWEEP_S, self._sweep)
        await self._done
        gc.enable()
        gc.unfreeze()
        for one in list(self._all):
            one.close()
        for task in self._opening:
            task.cancel()
        return Outcome(
            histogram=self._histogram.encode(),
            asked=self._next,
            accepted=self.accepted,
            refused=self.refused,
            given_up=self.given_up,
            late=self.late,
            latest_s=self.latest_s,
            tries=self.tries,
            unknown=self.unknown,
            statuses=dict(self.statuses),
            seconds=self._ends_s - began_s,
            answered_in_time=self.in_time,
            cpu_s=time.process_time() - cpu_s,
        )

    def answered(self, connection: Connection, ask: Ask, answer: Answer) -> None:
        now_s = time.monotonic()
        status = answer.status
        self.statuses[status] += 1
        if 200 <= status < 300:
            self._histogram.record_value(min(TOP_US, max(1, round((now_s - ask.planned_s) * 1e6))))
            self.accepted.append(ask.first)
            self.in_time += now_s <= self._ends_s
        elif status == _TOO_MANY or status >= _SERVER_ERROR:
            self._again(ask, answer.retry_after_s, now_s)
        else:
            self.refused += 1
        if connection.usable:
            self._free(connection, now_s)

    def lost(self, connection: Connection, ask: Ask | None) -> None:
        self._all.discard(connection)
        with contextlib.suppress(ValueError):
            self._idle.remove(connection)
        if ask is not None:
            self.unknown += 1
            self._again(ask, None, time.monotonic())
        if not self._over:
            task = self._loop.create_task(self._reopen())
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    def _free(self, connection: Connection, now_s: float) -> None:
        if self._waiting:
            self._send(connection, self._waiting.popleft(), now_s)
        elif self._closed and now_s < self._ends_s:
            self._send(connection, self._make(now_s), now_s)
        else:
            self._idle.append(connection)

    def _send(self, connection: Connection, ask: Ask, now_s: float) -> None:
        if ask.tries == 0:
            behind_s = now_s - ask.planned_s
            if behind_s >= LATE_S:
                self.late += 1
                self.latest_s = max(self.latest_s, behind_s)
        self.tries += 1
        connection.send(ask, now_s)

    def _make(self, planned_s: float) -> Ask:
        number = self._next
        self._next += 1
        data = self._ready.popleft() if self._ready else self._data(number)
        return Ask(planned_s, data, number * self._plan.batch)

    def _data(self, number: int) -> bytes:
        plan = self._plan
        if plan.bodies is None:
            return self._empty
        body = plan.bodies.lines(number * plan.batch, plan.batch)
        return request("POST", plan.path, f"{plan.host}:{plan.port}", body, self._headers)

    def _tick(self) -> None:
        """Whatever is due goes out; then looks again in a millisecond."""
        now_s = time.monotonic()
        if self._closed:
            while self._idle and now_s < self._ends_s:
                self._send(self._idle.popleft(), self._make(now_s), now_s)
        else:
            while self._due_s <= now_s and self._due_s < self._ends_s:
                one = self._make(self._due_s)
                if self._idle:
                    self._send(self._idle.popleft(), one, now_s)
                else:
                    self._waiting.append(one)
                self._due_s = next(self._timetable, self._ends_s)
        if now_s < self._ends_s:
            self._loop.call_later(_TICK_S, self._tick)

    def _again(self, ask: Ask, retry_after_s: float | None, now_s: float) -> None:
        first, last = _BACKOFF_S
        wait_s = self._random.uniform(0, min(last, first * 2 ** min(ask.tries, 10)))
        if retry_after_s is not None:
            wait_s += retry_after_s
        if now_s + wait_s > ask.planned_s + self._plan.patience_s:
            self.given_up += 1
            return
        self._pausing += 1
        self._loop.call_later(wait_s, self._retry, ask)

    def _retry(self, ask: Ask) -> None:
        self._pausing -= 1
        if self._idle:
            self._send(self._idle.popleft(), ask, time.monotonic())
        else:
            self._waiting.append(ask)

    def _sweep(self) -> None:
        """Breaks connections whose answer is overdue; ends when nothing is left to wait for."""
        now_s = time.monotonic()
        for one in list(self._all):
            if one.ask is not None and now_s - one.ask.sent_s > self._plan.answer_s:
                one.close()
        while self._waiting and now_s > self._waiting[0].planned_s + self._plan.patience_s:
            self._waiting.popleft()
            self.given_up += 1
        busy = self._waiting or self._pausing or any(one.ask is not None for one in self._all)
        if now_s >= self._ends_s and not busy:
            self._over = True
            self._done.set_result(None)
        else:
            self._loop.call_later(_SWEEP_S, self._sweep)

    async def _open(self) -> None:
        _, connection = await self._loop.create_connection(
            lambda: Connection(self), self._plan.host, self._plan.port
        )
        self._all.add(connection)
        self._free(connection, time.monotonic())

    async def _reopen(self) -> None:
        """Until the server takes connections again."""
        wait_s = _BACKOFF_S[0]
        while not self._over:
            try:
                await self._open()
            except OSError:
                await asyncio.sleep(self._random.uniform(0.5, 1.0) * wait_s)
                wait_s = min(_BACKOFF_S[1] / 4, wait_s * 2)
            else:
                return


def _planned(rates: Sequence[Rate], began_s: float) -> Iterator[float]:
    """When each ask is to be sent."""
    for rate in rates:
        for number in range(round(rate.per_s * rate.seconds)):
            yield began_s + number / rate.per_s
        began_s += rate.seconds


def _content_type(plan: Plan) -> str:
    return "application/json" if plan.batch == 1 else "application/x-ndjson"
