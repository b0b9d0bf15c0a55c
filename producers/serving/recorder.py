"""Seals answers and writes them in the background, so that the decode loop waits neither for a key nor for the broker.

Nothing counts as recorded before the broker has acknowledged it (law 2). A batch whose outcome is unknown is written again
whole: same ids, same bytes, so readers drop the repeat. What is open is bounded by the caller (`ServingConfig.max_open`).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

import structlog

from rollwire.producers.emit import outgoing
from rollwire.schemas.errors import LogUnavailable, Refused, RollwireError, StoreUnavailable
from rollwire.schemas.records import ProductionRollout
from rollwire.streams.seams.clock import Clock
from rollwire.streams.seams.log import Log, Outgoing, Writer

_log = structlog.get_logger()

SOURCE: Final = "rollwire/serving"
MAX_BATCH: Final = 500


class Unsealed(NamedTuple):
    """An answer whose event is made on the recorder's thread: the key store may have to be asked."""

    rollout_id: str
    make: Callable[[], ProductionRollout | None]  # None = there is nothing to write
    done: Callable[[bool], None]  # told once whether it is durable; called by the recorder's thread


class Recorder:
    """Thread-safe. `written` and `refused` count answers; `check` raises what ended the thread."""

    def __init__(self, log: Log, *, clock: Clock, patience_s: float, retry_s: float = 0.5) -> None:
        self._log = log
        self._clock = clock
        self._patience_s = patience_s
        self._retry_s = retry_s
        self._queue: deque[Unsealed] = deque()
        self._changed = threading.Condition()
        self._in_hand = 0
        self._closing = threading.Event()
        self._error: RollwireError | None = None
        self.written = 0
        self.refused = 0
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)
        self._thread.start()

    @property
    def pending(self) -> int:
        with self._changed:
            return len(self._queue) + self._in_hand

    def put(self, unsealed: Unsealed) -> None:
        with self._changed:
            self._queue.append(unsealed)
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
        """Ends the thread. What was not flushed is lost and counted; whoever asked was told that it was not recorded."""
        self._closing.set()
        with self._changed:
            self._changed.notify_all()
        self._thread.join(timeout_s)
        if left := self.pending:
            _log.warning("answers_not_written", answers=left)

    def _run(self) -> None:
        writer: Writer | None = None
        try:
            while not self._closing.is_set():
                batch = self._take()
                if not batch:
                    continue
                sealed = [(each, record) for each in batch if (record := self._sealed(each)) is not None]
                if sealed:
                    writer = self._written(writer, [record for _, record in sealed])
                    if writer is None:
                        return
                for each, _ in sealed:
                    each.done(True)
                with self._changed:
                    self._in_hand = 0
                    self.written += len(sealed)
                    self._changed.notify_all()
        except RollwireError as error:
            self._error = error
            _log.error("recorder_ended", error=str(error))
        except Exception as error:  # noqa: BLE001  a thread's edge: answering on while nothing is recorded must not go unseen
            self._error = RollwireError(f"answers can no longer be written: {type(error).__name__}")
            self._error.__cause__ = error
            _log.error("recorder_ended", error=type(error).__name__)  # its text may hold what a person wrote
        finally:
            if writer is not None:
                writer.close()

    def _take(self) -> list[Unsealed]:
        with self._changed:
            while not self._queue and not self._closing.is_set():
                self._changed.wait(0.5)
            batch = [self._queue.popleft() for _ in range(min(len(self._queue), MAX_BATCH))]
            self._in_hand = len(batch)
            return batch

    def _sealed(self, each: Unsealed) -> Outgoing | None:
        """None where there is nothing to write, or nothing that the codec takes; it is counted and named, others go on."""
        began = self._clock.monotonic_s()
        while True:
            try:
                rollout = each.make()
                if rollout is not None:
                    return outgoing(rollout, source=SOURCE, time_us=rollout.finished_us)
            except StoreUnavailable as error:
                _log.warning("recorder_waits_for_keys", error=str(error))
                if self._clock.monotonic_s() - began > self._patience_s:
                    raise
                if not self._closing.wait(self._retry_s):
                    continue
            except Refused as refused:
                self.refused += 1
                _log.error(
                    "answer_refused", rollout=each.rollout_id, reason=refused.reason, detail=refused.detail
                )
            each.done(False)
            return None

    def _written(self, writer: Writer | None, records: list[Outgoing]) -> Writer | None:
        """Until it is durable; None where the recorder was closed before. Raises `LogUnavailable` after `patience_s`."""
        began = self._clock.monotonic_s()
        while True:
            try:
                writer = writer or self._log.writer()
                writer.write(records, timeout_s=10.0)
                return writer
            except LogUnavailable as error:
                _log.warning("recorder_retries", error=str(error), records=len(records))
                if writer is not None:
                    writer.close()
                    writer = None
                if self._clock.monotonic_s() - began > self._patience_s:
                    raise
                if self._closing.wait(self._retry_s):
                    return None
