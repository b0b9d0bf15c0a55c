"""The commit pipeline: one transaction a step, strictly in step order, while the next step computes (law 3).

For step n, in the background: its checkpoint's vectors (when one is due), then its version's objects (the publisher's
future), then the checkpoint's manifest, then *one* transaction with the offsets of all ranks, `train-steps`,
`weight-versions` and the step's notices. Any doubt about the transaction means a new producer, which reads the committed
offsets to learn the outcome (law 4). The first failure stops the pipeline: later steps are never committed, their owner
discards them.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from typing import NamedTuple, Protocol

import msgspec
import structlog

from rollwire.schemas.errors import DeadlineExceeded, Fenced, LogError, OffsetLost, RollwireError
from rollwire.schemas.records import Claim, Event, Notice, TrainStep, WeightVersion
from rollwire.streams.emit import outgoing
from rollwire.streams.seams.clock import Clock
from rollwire.streams.seams.log import Log, TopicPartition, TransactionalWriter

_log = structlog.get_logger()


class CheckpointWriter(Protocol):
    """Writes one checkpoint in two parts: what does not need the version's digest, and the manifest that does."""

    def vectors(self) -> None: ...

    def manifest(self, state_digest: str) -> Claim: ...


class Taken(NamedTuple):
    """A step that was computed and is not committed; `step=None` is version 0."""

    version: int
    step: TrainStep | None  # its digest and time are filled in from the published version
    published: Future[WeightVersion]
    checkpoint: CheckpointWriter | None
    before: Mapping[TopicPartition, int]  # committed offsets before it, empty if there are none
    offsets: Mapping[TopicPartition, int]  # after it
    notices: tuple[Notice, ...] = ()  # what the step made known


class Committer:
    """Owns the transactional producer and a thread. `landed` asks the log whether version 0 is there.

    `take` and everything below it are called by the trainer's thread.
    """

    def __init__(
        self,
        log: Log,
        writer: TransactionalWriter,
        *,
        transactional_id: str,
        group: str,
        source: str,
        clock: Clock,
        publish_deadline_s: float,
        commit_deadline_s: float,
        committed: Callable[[WeightVersion, TrainStep | None], None],
        anchored: Callable[[], bool],
    ) -> None:
        self._log = log
        self._writer: TransactionalWriter | None = writer
        self._transactional_id = transactional_id
        self._group = group
        self._source = source
        self._clock = clock
        self._publish_deadline_s = publish_deadline_s
        self._commit_deadline_s = commit_deadline_s
        self._on_committed = committed
        self._anchored = anchored
        self._changed = threading.Condition()
        self._pending: deque[tuple[Taken, float]] = deque()
        self._failure: RollwireError | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="trainer-commit", daemon=True)
        self._thread.start()

    def take(self, taken: Taken) -> None:
        with self._changed:
            self._pending.append((taken, self._clock.monotonic_s()))
            self._changed.notify_all()

    def check(self) -> None:
        """Raises what stopped the pipeline."""
        with self._changed:
            if self._failure is not None:
                raise self._failure

    def wait_below(self, uncommitted: int, timeout_s: float) -> bool:
        """Whether fewer than `uncommitted` steps are open, after at most `timeout_s`. Raises what stopped the pipeline."""
        with self._changed:
            done = self._changed.wait_for(
                lambda: len(self._pending) < uncommitted or self._failure is not None, timeout_s
            )
            if self._failure is not None:
                raise self._failure
            return done

    def close(self, timeout_s: float = 5.0) -> None:
        """Ends the thread; what is not committed stays uncommitted and is replayed by the next start."""
        self._closing.set()
        with self._changed:
            self._changed.notify_all()
        self._thread.join(timeout_s)
        if self._writer is not None and not self._thread.is_alive():
            self._writer.close()
            self._writer = None

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._pending) or self._closing.is_set())
                if self._closing.is_set():
                    return
                taken, since_s = self._pending[0]
            try:
                version, step = self._finish(taken, since_s)
                if version is None:
                    return
                self._on_committed(version, step)
            except RollwireError as error:
                self._fail(error)
                return
            except Exception as error:  # noqa: BLE001  the thread's edge: nothing may fail unseen
                unexpected = RollwireError(f"version {taken.version} was not committed: {error!r}")
                unexpected.__cause__ = error
                self._fail(unexpected)
                return
            with self._changed:
                self._pending.popleft()
                self._changed.notify_all()

    def _fail(self, failure: RollwireError) -> None:
        with self._changed:
            self._failure = failure
            self._changed.notify_all()

    def _finish(self, taken: Taken, since_s: float) -> tuple[WeightVersion | None, TrainStep | None]:
        if taken.checkpoint is not None:
            taken.checkpoint.vectors()
        version = self._published(taken, since_s)
        if version is None:
            return None, None
        if taken.checkpoint is not None:
            claim = taken.checkpoint.manifest(version.state_digest)
            version = msgspec.structs.replace(version, checkpoint=claim)
        step = taken.step
        if step is not None:
            step = msgspec.structs.replace(
                step, state_digest=version.state_digest, finished_us=self._clock.now_us()
            )
        self._commit(taken, version, step)
        return version, step

    def _published(self, taken: Taken, since_s: float) -> WeightVersion | None:
        while not self._closing.is_set():
            try:
                return taken.published.result(timeout=0.1)
            except NotYet:
                # A result that *is* a time-out is the publisher's, and final.
                if taken.published.done():
                    raise
            if self._clock.monotonic_s() - since_s > self._publish_deadline_s:
                raise DeadlineExceeded(
                    f"version {taken.version} did not reach the object store within {self._publish_deadline_s:g} s"
                )
        return None

    def _commit(self, taken: Taken, version: WeightVersion, step: TrainStep | None) -> None:
        now_us = self._clock.now_us()
        events: tuple[Event, ...] = (version,) if step is None else (step, version)
        events += taken.notices
        records = [outgoing(event, source=self._source, time_us=now_us) for event in events]
        deadline_s = self._clock.monotonic_s() + self._commit_deadline_s
        while True:
            try:
                if self._writer is None:
                    self._writer = self._log.transactional_writer(self._transactional_id)
                    # Its predecessor's transaction is finished now: the outcome can be read.
                    if self._landed(taken):
                        return
                self._writer.begin()
                self._writer.write(records)
                left_s = max(1.0, deadline_s - self._clock.monotonic_s())
                self._writer.commit(self._group, taken.offsets, timeout_s=left_s)
                return
            except (Fenced, OffsetLost):
                raise
            except LogError as doubt:
                _log.warning("trainer.transaction_in_doubt", version=taken.version, error=str(doubt))
                if self._writer is not None:
                    self._writer.close()
                    self._writer = None
                if self._clock.monotonic_s() > deadline_s or self._closing.wait(0.2):
                    raise

    def _landed(self, taken: Taken) -> bool:
        if taken.step is None:
            return self._anchored()
        found = self._log.committed(self._group, list(taken.offsets))
        if found == taken.offsets:
            return True
        if found == taken.before:
            return False
        raise OffsetLost(
            f"while step {taken.step.step} was committed the consumer group {self._group} moved to {found}; expected "
            f"{dict(taken.before)} or {dict(taken.offsets)}"
        )
