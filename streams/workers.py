"""Shares the partitions of a group out among processes, and drives what this process has: one session for each, in threads.

What a rebalance takes away is settled and closed before anybody else gets it; what it gives is taken over by a new session.
The membership says who should work, the transactional ids see to it that nobody else can: a session that was fenced
although its process still has the partition starts again a little later, and after `_FENCED_AT_MOST` times the process
stops, since somebody outside of the group uses its ids. A session that failed takes over once more only after the member
was polled again: a process that stood still has then heard that its partitions are somebody else's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Final

import structlog

from rollwire.schemas.errors import DeadlineExceeded, Fenced, LogUnavailable
from rollwire.streams.runtime import Drive, RuntimeConfig, run_step
from rollwire.streams.seams.clock import Clock
from rollwire.streams.seams.log import Log, Member, SharedLog, TopicPartition

_logger = structlog.get_logger("rollwire.workers")

_POLL_S: Final = 0.2
_FENCED_PAUSE_S: Final = 2.0  # longer than it takes to hear of a rebalance
_FENCED_AT_MOST: Final = 3

Plan = Callable[[frozenset[TopicPartition]], Mapping[str, Drive]]


def run_shared(
    log: SharedLog,
    group: str,
    topics: Collection[str],
    plan: Plan,
    config: RuntimeConfig,
    *,
    stop: threading.Event,
    clock: Clock,
) -> None:
    """Joins `group` and drives what `plan` makes of its share of `topics`, until `stop` is set.

    `plan`: assigned partitions -> name -> drive; what it raises ends the run. So does what `run_step` raises, but for
    being fenced: see above.
    """
    workers = Workers(log, config, clock)
    member = log.member(group, sorted(topics), lambda _: workers.end())
    workers.member = member
    watch = _Watch(log, config.held_back_s, clock)
    try:
        while not stop.is_set():
            held = member.poll(_POLL_S)
            workers.drive(plan(held))
            watch.look(held)
        workers.end()
        workers.check()
    finally:
        workers.end()
        member.close()


def run_by_hand(
    log: Log, drives: Mapping[str, Drive], config: RuntimeConfig, *, stop: threading.Event, clock: Clock
) -> None:
    """Drives `drives` until `stop` is set; the first failure ends them all and is raised."""
    workers = Workers(log, config, clock)
    try:
        while not stop.is_set():
            workers.drive(drives)
            stop.wait(_POLL_S)
        workers.end()
        workers.check()
    finally:
        workers.end()


class _Watch:
    """Tells of inputs that an open transaction holds back: nothing of them can be read until it ends (C41).

    It asks in a thread of its own: the answers may take seconds, while the member keeps its place, and heeds a stop.
    """

    def __init__(self, log: SharedLog, every_s: float, clock: Clock) -> None:
        self._log = log
        self._every_s = every_s
        self._clock = clock
        self._looked = clock.monotonic_s()
        self._stable: dict[TopicPartition, int] = {}
        self._asking: threading.Thread | None = None

    def look(self, held: Collection[TopicPartition]) -> None:
        now = self._clock.monotonic_s()
        asked = self._asking is not None and self._asking.is_alive()
        if not held or asked or now - self._looked < self._every_s:
            return
        self._looked = now
        self._asking = threading.Thread(target=self._ask, args=(held,), name="held-back", daemon=True)
        self._asking.start()

    def _ask(self, held: Collection[TopicPartition]) -> None:
        try:
            found = self._log.held_back(sorted(held))
        except LogUnavailable:
            return  # the sessions tell of that
        for partition, behind in found.items():
            if self._stable.get(partition) == behind.stable:
                _logger.warning(
                    "stable offset blocked",
                    partition=f"{partition.topic}[{partition.partition}]",
                    by=self._log.openers(partition.topic) or "unknown",
                    stable=behind.stable,
                    written=behind.written,
                )
        self._stable = {partition: behind.stable for partition, behind in found.items()}


class Workers:
    """The threads of one process. All methods are called by one thread, but for `await_place`."""

    def __init__(self, log: Log, config: RuntimeConfig, clock: Clock) -> None:
        self.member: Member | None = None
        self._log = log
        self._config = config
        self._clock = clock
        self._running: dict[str, _Worker] = {}
        self._fenced: dict[str, list[float]] = {}  # when, since the last rebalance
        self._heard = threading.Condition()
        self._rounds = 0  # calls of `drive`: one follows each poll of the member

    def await_place(self, stop: threading.Event) -> None:
        """Returns when a poll that began after this call is over, or `stop` is set: by then `end` has stopped what a
        place that was lost took with it."""
        with self._heard:
            after = self._rounds + 2  # the poll that is under way may have looked already
            while self._rounds < after and not stop.is_set():
                self._heard.wait(_POLL_S)

    def drive(self, drives: Mapping[str, Drive]) -> None:
        """Starts what is missing. Raises what ended a worker."""
        with self._heard:
            self._rounds += 1
            self._heard.notify_all()
        self.check()
        now = self._clock.monotonic_s()
        for name, drive in drives.items():
            fenced = self._fenced.get(name)
            if name not in self._running and (not fenced or now - fenced[-1] > _FENCED_PAUSE_S):
                self._running[name] = _Worker(self._log, name, drive, self._config, self._clock, self)

    def check(self) -> None:
        """Raises what ended a worker, unless it was fenced and may start again."""
        for name, worker in list(self._running.items()):
            error = worker.error()
            if error is None:
                continue
            del self._running[name]
            if not isinstance(error, Fenced) or self.member is None:
                raise error
            times = self._fenced.setdefault(name, [])
            times.append(self._clock.monotonic_s())
            if len(times) >= _FENCED_AT_MOST:
                raise Fenced(
                    f"{error}; that was the {len(times)}th time although this process has the partition: somebody "
                    "outside of its group uses this transactional id"
                ) from error
            _logger.warning("worker.fenced", id=name, error=str(error))

    def end(self) -> None:
        """Lets every worker settle and close; returns when all have, or at the deadline of a transaction."""
        self._fenced.clear()
        for worker in self._running.values():
            worker.stop.set()
        deadline = self._clock.monotonic_s() + self._config.transaction_s + 1.0
        for name, worker in list(self._running.items()):
            if not worker.join(max(0.1, deadline - self._clock.monotonic_s())):
                # Its transaction is open or its outcome unknown; the next owner fences it.
                _logger.warning("worker.left", id=name)
                del self._running[name]
            elif (error := worker.error()) is None or isinstance(error, Fenced | LogUnavailable):
                if error is not None:
                    _logger.warning("worker.ended", id=name, error=str(error))
                del self._running[name]


class _Worker:
    """One thread that drives one step."""

    def __init__(
        self, log: Log, name: str, drive: Drive, config: RuntimeConfig, clock: Clock, owner: Workers
    ) -> None:
        self.stop = threading.Event()
        self._error: BaseException | None = None
        self._run = partial(
            run_step,
            log,
            drive,
            config,
            stop=self.stop,
            clock=clock,
            member=owner.member,
            placed=None if owner.member is None else partial(owner.await_place, self.stop),
        )
        self._thread = threading.Thread(target=self._guarded, name=name, daemon=True)
        self._thread.start()

    def _guarded(self) -> None:
        try:
            self._run()
        except BaseException as error:  # noqa: BLE001 - raised in the main thread
            self._error = error

    def error(self) -> BaseException | None:
        """What ended it; None while it runs, or when it was told to stop."""
        if self._thread.is_alive():
            return None
        if self._error is None and not self.stop.is_set():
            return DeadlineExceeded(f"{self._thread.name} ended without being told to")
        return self._error

    def join(self, timeout_s: float) -> bool:
        self._thread.join(timeout_s)
        return not self._thread.is_alive()
