"""One attribution worker against a Faust agent with one table write an event, and how fast it catches up after a stop.

Both read the same topics, filled before they start, one event of five an answer, the others feedback on it. Events are counted by the
offsets that a worker commits. A rate is the slope between the first commit beyond a tenth of the events and the last one
before the end: both are moments at which the worker said how far it was.

For the catch-up, events arrive all the while at a quarter of what the worker can take (the bar of 3 then leaves it a quarter of its
speed to lose); after some seconds the worker is killed, a minute later started again. Its speed counts from its first
commit to the moment when it is within a second of the arrivals.
"""

from __future__ import annotations

import itertools
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from statistics import median
from typing import Any, Final, NamedTuple, Self

from confluent_kafka.admin import AdminClient

from rollwire.ops.bench.feedback.bodies import Bodies
from rollwire.ops.bench.feedback.traffic import EVENTS, traffic
from rollwire.ops.figures import Figure
from rollwire.ops.topics import apply_topics
from rollwire.schemas.errors import DeadlineExceeded
from rollwire.streams.seams.log import Log, Outgoing
from rollwire.streams.seams.log_kafka import KafkaLog
from rollwire.streams.seams.places import partitions_of
from rollwire.streams.seams.rdkafka_logs import bridge

TOPICS: Final = ("production-rollouts", "user-feedback")
_SHARE: Final = 0.25
_POLL_S: Final = 0.1
_TICK_S: Final = 0.02
_MOST_S: Final = 120.0
_FILL: Final = 2_000  # answers of one write


class Worker(NamedTuple):
    """One kind of worker: how it is run under a prefix (until the block ends, by kill -9), and the group that it commits in."""

    name: str
    run: Callable[
        [str], AbstractContextManager[Callable[[], None]]
    ]  # gives a check that raises where it has died
    group: Callable[[str], str]


class Sizes(NamedTuple):
    answers: int
    rounds: int
    before_s: float  # events arrive and the worker works
    stopped_s: float


FULL: Final = Sizes(6_000, 2, 5.0, 60.0)
QUICK: Final = Sizes(1_000, 1, 2.0, 4.0)


class Bench:
    def __init__(self, bootstrap: str, report: Callable[[str], None]) -> None:
        self.bootstrap = bootstrap
        self.report = report
        config: dict[str, Any] = {
            "bootstrap.servers": bootstrap,
            "broker.address.family": "v4",
            "logger": bridge(),
        }
        self._admin = AdminClient(config)

    @contextmanager
    def topics(self) -> Iterator[tuple[KafkaLog, str]]:
        """Topics of one's own, which are deleted afterwards."""
        prefix = f"bench-{uuid.uuid4().hex[:8]}."
        apply_topics(self.bootstrap, prefix)
        try:
            yield KafkaLog(self.bootstrap, prefix, client_id="bench"), prefix
        finally:
            names = [name for name in self._admin.list_topics(timeout=30).topics if name.startswith(prefix)]
            for future in self._admin.delete_topics(names).values():
                future.result(30)

    def rate(self, worker: Worker, answers: int) -> float:
        """Events a second of a worker that starts before full topics."""
        with self.topics() as (log, prefix):
            fill(log, Bodies(prefix.rstrip("."), time.time_ns() // 1_000), answers)
            total = answers * EVENTS
            with worker.run(prefix) as check:
                return _slope(_progress(log, worker.group(prefix), total, check), total)

    def catch_up(self, worker: Worker, rate: float, sizes: Sizes) -> CatchUp:
        """`rate`: what the worker can take, events a second."""
        arrival = rate * _SHARE
        with self.topics() as (log, prefix):
            group = worker.group(prefix)
            with Arrivals(log, Bodies(prefix.rstrip("."), time.time_ns() // 1_000), arrival) as arrivals:
                with worker.run(prefix) as check:
                    _until(lambda: position(log, group) > 0, check)
                    _wait(sizes.before_s)
                _wait(sizes.stopped_s)
                first = position(log, group)
                began_s = time.monotonic()
                with worker.run(prefix) as check:
                    _until(lambda: position(log, group) > first, check)
                    since_s, start = time.monotonic(), position(log, group)
                    _until(lambda: arrivals.written - position(log, group) <= arrival, check)
                    ended_s, done = time.monotonic(), position(log, group)
        ready_s = since_s - began_s
        if (
            done == start
        ):  # a short stop: its first commit was all, so the speed is that with its start included
            since_s, start = began_s, first
        return CatchUp(arrival, (done - start) / (ended_s - since_s), ready_s, ended_s - since_s)


class CatchUp(NamedTuple):
    arrival_per_s: float
    per_s: float
    start_s: float  # start to first commit
    took_s: float


def attribution_figures(bench: Bench, ours: Worker, baseline: Worker, sizes: Sizes) -> list[Figure]:
    rates: dict[str, list[float]] = {ours.name: [], baseline.name: []}
    for number, worker in itertools.product(range(sizes.rounds), (baseline, ours)):
        bench.report(f"{worker.name} {number}")
        rates[worker.name].append(bench.rate(worker, sizes.answers))
    rate, bare = median(rates[ours.name]), median(rates[baseline.name])
    bench.report("catching up")
    seen = bench.catch_up(ours, rate, sizes)
    return [
        Figure(name="attribution.ratio", value=rate / bare, unit="x"),
        Figure(name="attribution.per_s", value=rate, unit="1/s", baseline=bare),
        Figure(name="attribution.catchup", value=seen.per_s / seen.arrival_per_s, unit="x"),
        Figure(name="attribution.catchup_per_s", value=seen.per_s, unit="1/s", baseline=seen.arrival_per_s),
        Figure(name="attribution.catchup_s", value=seen.took_s, unit="s"),
        Figure(name="attribution.start_s", value=seen.start_s, unit="s"),
    ]


def fill(log: Log, bodies: Bodies, answers: int) -> None:
    """Writes answers and feedback on them, all at once."""
    writer = log.writer()
    try:
        for first in range(0, answers, _FILL):
            batches = traffic(bodies, first, min(_FILL, answers - first))
            writer.write(list(itertools.chain.from_iterable(batches)), 60.0)
    finally:
        writer.close()


class Arrivals:
    """Writes events at a rate while the block runs; `written` are in the log."""

    def __init__(self, log: Log, bodies: Bodies, per_s: float) -> None:
        self._writer = log.writer()
        self._bodies = bodies
        self._per_s = per_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="arrivals", daemon=True)
        self.written = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def _run(self) -> None:
        began_s = time.monotonic()
        answers = 0
        while not self._stop.wait(_TICK_S):
            due = int((time.monotonic() - began_s) * self._per_s / EVENTS)
            batch: list[Outgoing] = list(
                itertools.chain.from_iterable(traffic(self._bodies, answers, due - answers))
            )
            if batch:
                self._writer.write(batch, 30.0)
            answers = due
            self.written = answers * EVENTS

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._writer.close()


def position(log: Log, group: str) -> int:
    """Events that a group has committed, of topics that were read from their beginning."""
    partitions = partitions_of(log, TOPICS)
    return sum(log.committed(group, partitions).values())


def _progress(log: Log, group: str, total: int, check: Callable[[], None]) -> list[tuple[float, int]]:
    """(second, events) of now, and of every commit until all are committed."""
    seen: list[tuple[float, int]] = [(time.monotonic(), 0)]
    deadline_s = time.monotonic() + _MOST_S
    while seen[-1][1] < total:
        check()
        if time.monotonic() > deadline_s:
            raise DeadlineExceeded(f"{seen[-1:]} of {total} events after {_MOST_S:g} s")
        at_s, events = time.monotonic(), position(log, group)
        if events > seen[-1][1]:
            seen.append((at_s, events))
        _wait(_POLL_S)
    return seen


def _slope(seen: list[tuple[float, int]], total: int) -> float:
    """Events a second. With fewer than three commits between: over all, the worker's start included."""
    inner = [(at_s, events) for at_s, events in seen if total // 10 <= events < total]
    (first_s, first), (last_s, last) = (inner[0], inner[-1]) if len(inner) > 2 else (seen[0], seen[-1])
    return (last - first) / (last_s - first_s)


def _until(done: Callable[[], bool], check: Callable[[], None]) -> None:
    deadline_s = time.monotonic() + _MOST_S
    while not done():
        check()
        if time.monotonic() > deadline_s:
            raise DeadlineExceeded(f"the worker was not there after {_MOST_S:g} s")
        _wait(_POLL_S)


def _wait(seconds: float) -> None:
    threading.Event().wait(seconds)
