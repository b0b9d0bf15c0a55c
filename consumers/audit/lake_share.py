"""Shares planned ranges among processes. Once a round is planned they are independent of each other, and each ends in the same
files whoever writes it; a range is written by one process from its beginning to its end.

This process works too, from the start: another one needs a second or two to load what it needs.
"""

from __future__ import annotations

import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from itertools import chain
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Final, NamedTuple

from rollwire.consumers.audit.lake_plan import Lake, Range
from rollwire.consumers.audit.lake_stretches import Place, Told, Writing, Written
from rollwire.schemas.errors import AuditError, DeadlineExceeded, RollwireError
from rollwire.streams.seams.log import Log
from rollwire.streams.seams.store import ObjectStore

_LEAST: Final = 75_000
"""Offsets of each process: its start takes as much CPU as some 100,000 records of 1 kB."""

_TELL: Final = 2_000  # records that a process reads before it says so
_PATIENCE_S: Final = 300.0  # of a process that says nothing: it may be storing large files


class Past(NamedTuple):
    log: Log
    store: ObjectStore  # of the lake


class Share(NamedTuple):
    """How a lake is written by several processes."""

    processes: int  # this one included
    open_past: Callable[[], AbstractContextManager[Past]]  # called in each of the others: picklable


class _Read(NamedTuple):
    topic: str
    records: int


def write_ranges(place: Place, ranges: Sequence[Range], told: Told, share: Share | None) -> Written:
    """Writes all of them. Raises `AuditError` with what a process raises, or that it ended, `DeadlineExceeded` where one says
    nothing for five minutes; what is complete by then stands. `told` is called from several threads."""
    offsets = sum(one.next - one.first for one in ranges)
    count = min(share.processes, len(ranges), offsets // _LEAST) if share is not None else 1
    if share is None or count <= 1:
        return _written(place, ranges, told)
    crew = _Crew(ranges, told)
    context = get_context("spawn")
    with ExitStack() as stack:
        stack.callback(crew.fail, AuditError("this export has ended"))  # whoever is at work ends too
        threads: list[threading.Thread] = []
        for number in range(1, count):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_work, args=(share.open_past, place.root, place.lake, theirs), daemon=True
            )
            process.start()
            theirs.close()  # so that ours ends when the process does
            stack.callback(process.join, 10)
            stack.callback(process.terminate)
            thread = threading.Thread(
                target=_served, args=(crew, process, ours), name=f"lake-process-{number}"
            )
            thread.daemon = True
            thread.start()
            threads.append(thread)
        while (one := crew.next()) is not None:
            crew.finish(one, _written(place, [one], crew.told))
        for thread in threads:
            thread.join()  # it gives up by itself
        return summed_up(crew.finished())


def summed_up(written: Iterable[Written]) -> Written:
    some = list(written)
    return Written(
        stretches=sum(one.stretches for one in some),
        files=sum(one.files for one in some),
        rows=sum(one.rows for one in some),
        nbytes=sum(one.nbytes for one in some),
        findings=tuple(chain.from_iterable(one.findings for one in some)),
    )


def _written(place: Place, ranges: Sequence[Range], told: Told) -> Written:
    writing = Writing(place, told)
    writing.ranges(ranges)
    return writing.written()


class _Crew:
    """What is left to do, what is done, and the first thing that went wrong. Of all threads."""

    def __init__(self, ranges: Sequence[Range], told: Told) -> None:
        self._lock = threading.Lock()
        self._ranges = ranges
        # The largest first: the last ones then end at about the same time.
        self._left = deque(sorted(ranges, key=lambda one: one.first - one.next))
        self._told = told
        self._done: dict[Range, Written] = {}
        self._failed: RollwireError | None = None

    def next(self) -> Range | None:
        """A range for who asks. Raises what went wrong."""
        with self._lock:
            self._check()
            return self._left.popleft() if self._left else None

    def told(self, topic: str, records: int) -> None:
        """Raises what went wrong: whoever reads on after that would read for nothing."""
        with self._lock:
            self._check()
        self._told(topic, records)

    def finish(self, one: Range, written: Written) -> None:
        with self._lock:
            self._done[one] = written

    def fail(self, error: RollwireError) -> None:
        with self._lock:
            self._failed = self._failed or error

    def finished(self) -> list[Written]:
        """In the order of the plan. Raises what went wrong."""
        with self._lock:
            self._check()
            return [self._done[one] for one in self._ranges]

    def _check(self) -> None:
        if self._failed is not None:
            raise self._failed


def _served(crew: _Crew, process: BaseProcess, channel: Connection) -> None:
    """A thread: hands ranges to one process, and hears of it how far it is."""
    try:
        while (one := crew.next()) is not None:
            channel.send(one)
            while isinstance(said := _heard(channel), _Read):
                crew.told(*said)
            if isinstance(said, str):
                raise AuditError(said)
            crew.finish(one, said)
    except (EOFError, OSError):
        process.join(10)
        crew.fail(
            AuditError(
                f"a process of this export ended with code {process.exitcode}: run it again, it goes on where this one stood"
            )
        )
    except RollwireError as error:
        crew.fail(error)
    finally:
        channel.close()


def _heard(channel: Connection) -> _Read | Written | str:
    if not channel.poll(_PATIENCE_S):
        raise DeadlineExceeded(f"a process of this export said nothing for {_PATIENCE_S:g} s")
    said: _Read | Written | str = channel.recv()
    return said


def _work(
    open_past: Callable[[], AbstractContextManager[Past]], root: str, lake: Lake, channel: Connection
) -> None:
    """A process: writes range after range until nobody hands it one."""
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # the terminal's goes to all: the first process ends the others
    threading.Thread(target=_end_with_parent, daemon=True).start()
    teller = _Teller(channel)
    try:
        with open_past() as past:
            place = Place(past.log, past.store, root, lake)
            while True:
                written = _written(place, [channel.recv()], teller.told)
                teller.flush()
                channel.send(written)
    except RollwireError as error:
        channel.send(f"{type(error).__name__}: {error}")
    except (EOFError, BrokenPipeError):
        return


def _end_with_parent() -> None:
    """Another export may follow one that was killed: what this process wrote then would come between."""
    parent = parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


class _Teller:
    """Tells the first process what was read, not every batch of it."""

    def __init__(self, channel: Connection) -> None:
        self._channel = channel
        self._topic, self._records = "", 0

    def told(self, topic: str, records: int) -> None:
        self._topic, self._records = topic, self._records + records
        if self._records >= _TELL:
            self.flush()

    def flush(self) -> None:
        if self._records:
            self._channel.send(_Read(self._topic, self._records))
            self._records = 0
