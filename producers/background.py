"""A thread that writes what is put into it, so that who puts it there never waits for the broker.

Nothing counts as written before the broker has acknowledged it (law 2). A batch whose outcome is unknown is written again
whole: same ids, same bytes, so readers drop the repeat. What is queued is bounded by the callers.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import structlog

from rollwire.schemas.errors import LogUnavailable, RollwireError
from rollwire.streams.seams.clock import Clock
from rollwire.streams.seams.log import Log, Outgoing, Writer

_log = structlog.get_logger()

T = TypeVar("T")
R = TypeVar("R")


class Background(ABC, Generic[T]):
    """Thread-safe. `written` counts what is durable; `check` raises what ended the thread. `what` names the items in logs."""

    def __init__(
        self, log: Log, *, name: str, what: str, most: int, clock: Clock, patience_s: float, retry_s: float
    ) -> None:
        self._log = log
        self._what = what
        self._most = most  # items of one write
        self._clock = clock
        self._patience_s = patience_s
        self._retry_s = retry_s
        self._queue: deque[T] = deque()
        self._changed = threading.Condition()
        self._in_hand = 0
        self._closing = threading.Event()
        self._error: RollwireError | None = None
        self._writer: Writer | None = None
        self.written = 0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Called by the subclass once it is whole."""
        self._thread.start()

    @property
    def pending(self) -> int:
        with self._changed:
            return len(self._queue) + self._in_hand

    def put(self, item: T) -> None:
        with self._changed:
            self._queue.append(item)
            self._changed.notify_all()

    def check(self) -> None:
        if self._error is not None:
            raise self._error

    def flush(self, timeout_s: float) -> bool:
        """Waits until everything is durable; False at the deadline or after an error."""
        deadline = self._clock.monotonic_s() + timeout_s
        with self._changed:
            while self._queue or self._in_hand:
                left = deadline - self._clock.monotonic_s()
                if left <= 0 or self._error is not None:
                    return False
                self._changed.wait(min(left, 0.1))
        return True

    def close(self, timeout_s: float = 1.0) -> None:
        """Ends the thread. What was not flushed is lost and counted."""
        self._closing.set()
        with self._changed:
            self._changed.notify_all()
        self._thread.join(timeout_s)
        if left := self.pending:
            _log.warning(f"{self._what}_not_written", left=left)

    @abstractmethod
    def _take_out(self, batch: list[T]) -> int | None:
        """Writes a batch by `_durable`; how many of its items are durable then. None where it was closed before."""

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                batch = self._take()
                if not batch:
                    continue
                written = self._take_out(batch)
                if written is None:
                    return
                with self._changed:
                    self._in_hand = 0
                    self.written += written
                    self._changed.notify_all()
        except RollwireError as error:
            self._error = error
            _log.error(f"{self._what}_ended", error=str(error))
        except Exception as error:  # noqa: BLE001  a thread's edge: going on while nothing is written must not go unseen
            # Its text may hold what a person wrote: the cause has it, logs and messages do not.
            unexpected = RollwireError(f"{self._what} can no longer be written: {type(error).__name__}")
            unexpected.__cause__ = error
            self._error = unexpected
            _log.error(f"{self._what}_ended", error=type(error).__name__)
        finally:
            if self._writer is not None:
                self._writer.close()

    def _take(self) -> list[T]:
        with self._changed:
            while not self._queue and not self._closing.is_set():
                self._changed.wait(0.5)
            batch = [self._queue.popleft() for _ in range(min(len(self._queue), self._most))]
            self._in_hand = len(batch)
            return batch

    def _until_done(self, attempt: Callable[[], R], again: type[RollwireError], event: str) -> R | None:
        """What `attempt` returns, tried again after an error of type `again`. None where it was closed before; raises that
        error after `patience_s`."""
        began = self._clock.monotonic_s()
        while True:
            try:
                return attempt()
            except again as error:
                _log.warning(event, error=str(error))
                if self._clock.monotonic_s() - began > self._patience_s:
                    raise
                if self._closing.wait(self._retry_s):
                    return None

    def _durable(self, records: Sequence[Outgoing]) -> bool:
        """Until they are; False where it was closed before. Raises `LogUnavailable` after `patience_s`."""

        def attempt() -> bool:
            try:
                self._writer = self._writer or self._log.writer()
                self._writer.write(records, timeout_s=10.0)
            except LogUnavailable:
                if self._writer is not None:
                    self._writer.close()
                    self._writer = None
                raise
            return True

        return self._until_done(attempt, LogUnavailable, f"{self._what}_written_again") or False
