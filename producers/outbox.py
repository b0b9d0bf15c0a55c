"""Writes finished rollouts in the background, so that the decode loop never waits for the broker.

Nothing counts as written before the broker has acknowledged it (law 2). What is in flight is bounded by the callers'
slots: a group holds its slot until its fate is known, so at most slots * group size rollouts are ever queued here.
A batch whose outcome is unknown is written again whole: same ids, same bytes, so readers drop the repeat.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Final

import structlog

from rollwire.producers.claims import claim_check
from rollwire.producers.emit import outgoing
from rollwire.producers.trajectory import Finished
from rollwire.schemas.errors import LogUnavailable, Refused, RollwireError, StoreUnavailable
from rollwire.streams.seams.clock import Clock
from rollwire.streams.seams.log import Log, Outgoing, Writer
from rollwire.streams.seams.store import ObjectStore

_log = structlog.get_logger()

MAX_BATCH: Final = 1_000  # rollouts of one write


class Outbox:
    """Thread-safe. `written` and `refused` count rollouts; `check` raises what ended the thread."""

    def __init__(
        self,
        log: Log,
        *,
        source: str,
        clock: Clock,
        patience_s: float,
        retry_s: float = 0.5,
        store: ObjectStore | None = None,
    ) -> None:
        self._log = log
        self._store = store  # None = a trace too large for an event is refused
        self._source = source
        self._clock = clock
        self._patience_s = patience_s
        self._retry_s = retry_s
        self._queue: deque[Finished] = deque()
        self._changed = threading.Condition()
        self._in_hand = 0
        self._closing = threading.Event()
        self._error: RollwireError | None = None
        self.written = 0
        self.refused = 0
        self._refused_groups: list[str] = []
        self._thread = threading.Thread(target=self._run, name="outbox", daemon=True)
        self._thread.start()

    @property
    def pending(self) -> int:
        with self._changed:
            return len(self._queue) + self._in_hand

    def put(self, finished: Finished) -> None:
        with self._changed:
            self._queue.append(finished)
            self._changed.notify_all()

    def check(self) -> None:
        if self._error is not None:
            raise self._error

    def take_refused(self) -> list[str]:
        """Group ids of the rollouts refused since the last call, one a rollout."""
        with self._changed:
            taken, self._refused_groups = self._refused_groups, []
            return taken

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
        """Ends the thread. What was not flushed is lost and named: its group is dropped at its deadline."""
        self._closing.set()
        with self._changed:
            self._changed.notify_all()
        self._thread.join(timeout_s)
        if left := self.pending:
            _log.warning("rollouts_not_written", rollouts=left)

    def _run(self) -> None:
        writer: Writer | None = None
        try:
            while not self._closing.is_set():
                batch = self._take()
                if not batch:
                    continue
                claimed = self._claim(batch)
                if claimed is None:
                    return
                records, rollouts = self._encode(claimed)
                writer = self._write(writer, records)
                if writer is None:
                    return
                with self._changed:
                    self._in_hand = 0
                    self.written += rollouts
                    self._changed.notify_all()
        except RollwireError as error:
            self._error = error
        except Exception as error:  # noqa: BLE001  a thread's edge: sampling on while nothing is written must not go unseen
            unexpected = RollwireError(f"rollouts can no longer be written: {error!r}")
            unexpected.__cause__ = error
            self._error = unexpected
        finally:
            if writer is not None:
                writer.close()

    def _take(self) -> list[Finished]:
        with self._changed:
            if not self._queue:
                self._changed.wait(0.5)
            batch = [self._queue.popleft() for _ in range(min(len(self._queue), MAX_BATCH))]
            self._in_hand = len(batch)
            return batch

    def _claim(self, batch: list[Finished]) -> list[Finished] | None:
        """Large traces into the store. None where the outbox was closed before; raises as `_write` does."""
        claimed: list[Finished] = []
        began = self._clock.monotonic_s()
        for finished in batch:
            while True:
                try:
                    claimed.append(self._with_claim(finished))
                    break
                except StoreUnavailable as error:
                    _log.warning("outbox_retries", error=str(error), rollouts=len(batch) - len(claimed))
                    if self._clock.monotonic_s() - began > self._patience_s:
                        raise
                    if self._closing.wait(self._retry_s):
                        return None
        return claimed

    def _with_claim(self, finished: Finished) -> Finished:
        rollout, trace = finished
        if rollout is None or trace is None:
            return finished
        try:
            return Finished(rollout, claim_check(trace, rollout.model, self._store))
        except Refused:
            return finished  # too large for an event, so that the codec refuses it and counts

    def _encode(self, batch: list[Finished]) -> tuple[list[Outgoing], int]:
        """A rollout that the codec refuses (an engine gave NaN, say) is counted and named; the others go on."""
        records: list[Outgoing] = []
        rollouts = 0
        for rollout, trace in batch:
            if rollout is None:
                continue
            events = (rollout,) if trace is None else (trace, rollout)
            try:
                records += [outgoing(e, source=self._source, time_us=rollout.finished_us) for e in events]
                rollouts += 1
            except Refused as refused:
                self.refused += 1
                with self._changed:
                    self._refused_groups.append(rollout.group_id)
                _log.error(
                    "rollout_refused",
                    rollout=rollout.rollout_id,
                    reason=refused.reason,
                    detail=refused.detail,
                )
        return records, rollouts

    def _write(self, writer: Writer | None, records: list[Outgoing]) -> Writer | None:
        """Until it is durable; None where the outbox was closed before. Raises `LogUnavailable` after `patience_s`."""
        began = self._clock.monotonic_s()
        while True:
            try:
                writer = writer or self._log.writer()
                writer.write(records, timeout_s=10.0)
                return writer
            except LogUnavailable as error:
                _log.warning("outbox_retries", error=str(error), records=len(records))
                if writer is not None:
                    writer.close()
                    writer = None
                if self._clock.monotonic_s() - began > self._patience_s:
                    raise
                if self._closing.wait(self._retry_s):
                    return None
