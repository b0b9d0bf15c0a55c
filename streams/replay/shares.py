"""Shares the partitions of a replay among processes, and gives what they make in the same order, however many there are."""

from __future__ import annotations

import heapq
import queue
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from itertools import islice
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from typing import Any, Final, NamedTuple

from rollwire.schemas.errors import AuditError, DeadlineExceeded, RollwireError
from rollwire.streams.replay.window import Made
from rollwire.streams.seams.log import Log

_BATCH: Final = 200  # records that go from one process to another at once
_AHEAD: Final = 16  # batches that a worker may be ahead
_PATIENCE_S: Final = 120.0
_PAUSE_S: Final = 0.02
_LOOK_S: Final = 1.0


class Logs(NamedTuple):
    """What a job reads: the history, and what was replayed of it before."""

    history: Log
    shadow: Log


OpenLogs = Callable[[], AbstractContextManager[Logs]]
Job = Callable[[Logs], Iterator[Made]]
"""One partition's replay. Both have to be picklable where there is more than one worker."""


def shared(jobs: Sequence[Job], open_logs: OpenLogs, workers: int) -> Iterator[Made]:
    """What all jobs make, by (moment, job, order within it). Raises `AuditError` with what a job raises in a worker, or that
    it died; `DeadlineExceeded` where one gives nothing for two minutes."""
    if workers <= 1 or len(jobs) <= 1:
        with open_logs() as logs:
            yield from _in_order([job(logs) for job in jobs])
        return
    context = get_context("spawn")
    with ExitStack() as stack:
        channels = [context.Queue(_AHEAD) for _ in jobs]
        processes: list[BaseProcess] = []
        count = min(workers, len(jobs))
        for number in range(count):
            mine = list(zip(jobs, channels, strict=True))[number::count]
            process = context.Process(target=_work, args=(open_logs, mine), daemon=True)
            process.start()
            stack.callback(process.join, 10)
            stack.callback(process.terminate)
            processes.append(process)
        yield from _in_order([_received(c, processes[i % count]) for i, c in enumerate(channels)])


def _in_order(streams: Sequence[Iterator[Made]]) -> Iterator[Made]:
    return heapq.merge(*streams, key=lambda made: made.at_us)


def _received(channel: Any, worker: BaseProcess) -> Iterator[Made]:
    """What a worker sends of one job."""
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        ended = not worker.is_alive()  # before the look: what it sent last is there then
        try:
            batch = channel.get(timeout=_LOOK_S)
        except queue.Empty:
            if ended:
                raise AuditError(f"a replay's worker ended with code {worker.exitcode}") from None
            if time.monotonic() > deadline:
                raise DeadlineExceeded(f"a replay's worker gave nothing for {_PATIENCE_S:g} s") from None
            continue
        if isinstance(batch, str):
            raise AuditError(batch)
        if not batch:
            return
        yield from batch
        deadline = time.monotonic() + _PATIENCE_S


class _Running:
    """A job in a worker, and the batch that waits to be sent; an empty one is its end."""

    def __init__(self, made: Iterator[Made], channel: Any) -> None:
        self.made = made
        self.channel = channel
        self.batch: list[Made] | None = None

    def send(self, wait_s: float) -> bool:
        """Whether there was room for its next batch."""
        if self.batch is None:
            self.batch = list(islice(self.made, _BATCH))
        try:
            self.channel.put(self.batch, timeout=wait_s) if wait_s else self.channel.put_nowait(self.batch)
        except queue.Full:
            return False
        return True


def _work(open_logs: OpenLogs, jobs: Sequence[tuple[Job, Any]]) -> None:
    """A worker: its jobs side by side, since they are merged while they run. One that is ahead waits for no room: the reader
    may wait for another one."""
    with open_logs() as logs:
        running = [_Running(job(logs), channel) for job, channel in jobs]
        wait_s = 0.0
        while running:
            moved = False
            for one in list(running):
                try:
                    sent = one.send(wait_s)
                except RollwireError as error:
                    one.channel.put(f"{type(error).__name__}: {error}")
                    return
                if sent:
                    moved = True
                    if not one.batch:
                        running.remove(one)
                    one.batch = None
            wait_s = 0.0 if moved else _PAUSE_S
