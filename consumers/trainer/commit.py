"""The commit pipeline: one transaction a step, strictly in step order, while the next step computes (law 3).

For step n, in the background: its checkpoint's vectors (when one is due), then its version's objects (the publisher's
future), then the checkpoint's manifest, then *one* transaction with the offsets of all ranks, `train-steps`,
`weight-versions` and the step's notices. Any doubt about the transaction means a new producer, which reads the committed
offsets to learn the outcome (law 4). The first failure stops the pipeline: later steps are never committed, their owner
discards them. What may be committed when is decided by `books`; here is what is done about it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Final, NamedTuple, Protocol

import msgspec
import structlog

from rollwire.consumers.trainer.books import Books, Entry, landed, start
from rollwire.schemas.errors import (
    DeadlineExceeded,
    Fenced,
    LogError,
    OffsetLost,
    ReplayDiverged,
    RollwireError,
    WeightError,
)
from rollwire.schemas.records import Claim, Event, Notice, TrainStep, WeightVersion
from rollwire.streams.emit import outgoing
from rollwire.streams.seams.clock import Clock
from rollwire.streams.seams.log import Log, Outgoing, TopicPartition, TransactionalWriter
from rollwire.streams.seams.store_memory import REFRESH_US
from rollwire.streams.seams.work import Task, Threads, Work

_log = structlog.get_logger()
_RETRY_S: Final = 0.2  # after a doubt, before the next producer
# One attempt: an answer that a broker took with it when it died never comes, and the next attempt learns the outcome.
_ATTEMPT_S: Final = 8.0


class CheckpointWriter(Protocol):
    """Writes one checkpoint in two parts: what does not need the version's digest, and the manifest that does."""

    def vectors(self) -> None: ...

    def manifest(self, state_digest: str) -> Claim: ...


class Taken(NamedTuple):
    """A step that was computed and is not committed; `step=None` is a version without one: version 0, say."""

    version: int
    step: TrainStep | None  # its digest and time are filled in from the published version
    published: Future[WeightVersion]
    checkpoint: CheckpointWriter | None
    before: Mapping[TopicPartition, int]  # committed offsets before it, empty if there are none
    offsets: Mapping[TopicPartition, int]  # after it
    notices: tuple[Notice, ...] = ()  # what the step made known


class _Ready(NamedTuple):
    """A step whose objects stand: what its transaction writes, and until when it is tried."""

    version: WeightVersion
    step: TrainStep | None
    records: Sequence[Outgoing]
    deadline_s: float


class _Open:
    """How far an open step has come."""

    def __init__(self, taken: Taken, since_s: float) -> None:
        self.taken = taken
        self.entry = Entry(taken.version, taken.before, taken.offsets)
        self.since_s = since_s
        self.unwritten = taken.checkpoint  # whose vectors do not stand yet
        self.ready: _Ready | None = None
        self.not_before_s = since_s


class Committer:
    """Owns the transactional producer and one background task. `logged` asks the log for a version, None where it is
    not there; `books` begin empty.

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
        logged: Callable[[int], WeightVersion | None],
        books: Books | None = None,
        work: Work | None = None,
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
        self._logged = logged
        self._changed = threading.Condition()
        self._books = books or start()
        self._open: dict[int, _Open] = {}  # by version
        self._failure: RollwireError | None = None
        self._work = work or Threads()
        self._worker = self._work.start(
            Task("trainer-commit", self._changed, self._due, self._turn, self._unexpected)
        )

    def resume(self, version: int, position: Mapping[TopicPartition, int]) -> None:
        """`version` is the last one in the log, and the consumer group stands at `position`."""
        with self._changed:
            self._books = self._books.resume(version, position)

    def take(self, taken: Taken) -> None:
        """Raises what stopped the pipeline; `PlanViolation` for a version out of order or one too many, `OffsetLost` where
        its offsets do not join."""
        with self._changed:
            if self._failure is not None:
                raise self._failure
            step = _Open(taken, self._clock.monotonic_s())
            self._books = self._books.take(step.entry)
            self._open[taken.version] = step
            self._changed.notify_all()
        taken.published.add_done_callback(self._nudge)

    def check(self) -> None:
        """Raises what stopped the pipeline."""
        with self._changed:
            if self._failure is not None:
                raise self._failure

    def wait_below(self, uncommitted: int, timeout_s: float) -> bool:
        """Whether fewer than `uncommitted` steps are open, after at most `timeout_s`. Raises what stopped the pipeline."""
        with self._changed:
            done = self._work.wait(
                self._changed,
                lambda: self._books.below(uncommitted) or self._failure is not None,
                timeout_s,
            )
            if self._failure is not None:
                raise self._failure
            return done

    def close(self, timeout_s: float = 5.0) -> None:
        """Ends the background; what is not committed stays uncommitted and is replayed by the next start."""
        if self._worker.stop(timeout_s) and self._writer is not None:
            self._writer.close()
            self._writer = None

    def _nudge(self, _: Future[WeightVersion]) -> None:
        with self._changed:
            self._changed.notify_all()

    def _next(self) -> _Open | None:
        entry = self._books.first
        return None if entry is None else self._open[entry.version]

    def _due(self) -> float | None:
        """In how many seconds the first open step can be brought on, or has to be given up."""
        step = self._next()
        if step is None:
            return None
        now_s = self._clock.monotonic_s()
        if step.unwritten is not None or step.ready is not None or step.taken.published.done():
            return max(0.0, step.not_before_s - now_s)
        return max(0.0, step.since_s + self._publish_deadline_s - now_s)

    def _turn(self) -> None:
        """One piece of the first open step's way into the log."""
        with self._changed:
            step = self._next()
        if step is None:
            return
        try:
            if step.unwritten is not None:
                step.unwritten.vectors()
                step.unwritten = None
            elif step.ready is None:
                step.ready = self._prepare(step)
            else:
                self._transact(step, step.ready)
        except RollwireError as error:
            self._fail(error)
        except Exception as error:  # noqa: BLE001  the edge of the background: nothing may fail unseen
            self._unexpected(error)

    def _unexpected(self, error: BaseException) -> None:
        with self._changed:
            version = self._books.committed + 1
        unexpected = RollwireError(f"version {version} was not committed: {error!r}")
        unexpected.__cause__ = error
        self._fail(unexpected)

    def _fail(self, failure: RollwireError) -> None:
        with self._changed:
            self._failure = failure
            self._books = self._books.fail()
            self._open.clear()
            self._changed.notify_all()

    def _prepare(self, step: _Open) -> _Ready | None:
        """What the transaction writes, when the version's objects stand; the checkpoint's manifest stands then too."""
        taken = step.taken
        now_s = self._clock.monotonic_s()
        if not taken.published.done():
            if step.since_s + self._publish_deadline_s <= now_s:
                raise DeadlineExceeded(
                    f"version {taken.version} did not reach the object store within {self._publish_deadline_s:g} s"
                )
            return None
        version = taken.published.result()
        if taken.checkpoint is not None:
            claim = taken.checkpoint.manifest(version.state_digest)
            version = msgspec.structs.replace(version, checkpoint=claim)
        now_us = self._clock.now_us()
        made = taken.step
        if made is not None:
            made = msgspec.structs.replace(made, state_digest=version.state_digest, finished_us=now_us)
        events: tuple[Event, ...] = (version,) if made is None else (made, version)
        records = [
            outgoing(event, source=self._source, time_us=now_us) for event in (*events, *taken.notices)
        ]
        return _Ready(version, made, records, now_s + self._commit_deadline_s)

    def _transact(self, step: _Open, ready: _Ready) -> None:
        """One attempt, of `_ATTEMPT_S` at most. After a doubt the log is asked first, by a new producer."""
        try:
            if self._writer is None:
                # Its predecessor's transaction is finished when this returns: the outcome can be read.
                self._writer = self._log.transactional_writer(self._transactional_id, _ATTEMPT_S)
            if self._books.in_doubt and self._settle(step, ready):
                return
            age_us = self._clock.now_us() - ready.version.published_us
            if age_us > REFRESH_US:  # a machine that slept, say
                raise WeightError(
                    f"the objects of version {ready.version.version} were put {age_us / 3.6e9:.0f} h ago, and the collector "
                    "may have taken them: nothing is committed, the next start makes them again"
                )
            self._writer.begin()
            self._writer.write(ready.records)
            left_s = max(1.0, ready.deadline_s - self._clock.monotonic_s())
            self._writer.commit(self._group, step.taken.offsets, timeout_s=min(left_s, _ATTEMPT_S))
        except (Fenced, OffsetLost):
            raise
        except LogError as doubt:
            _log.warning("trainer.transaction_in_doubt", version=ready.version.version, error=str(doubt))
            if self._writer is not None:
                self._writer.close()
                self._writer = None
            if self._clock.monotonic_s() > ready.deadline_s:
                raise
            step.not_before_s = self._clock.monotonic_s() + _RETRY_S
            self._enter(lambda books: books if books.in_doubt else books.doubt())
            return
        self._on_committed(ready.version, ready.step)
        self._enter(lambda books: books.commit(ready.version.version))

    def _settle(self, step: _Open, ready: _Ready) -> bool:
        """Learns the outcome; whether the step is committed. Another trainer may have stepped in meanwhile: what it
        committed counts as ours only if it is the same to the bit."""
        made = ready.version
        there = self._logged(made.version)
        self._check_reverted(made, there)
        digest = None if there is None else there.state_digest
        offsets = self._log.committed(self._group, list(step.taken.offsets))
        if ready.step is None or dict(step.entry.before) == dict(step.entry.after):
            # Offsets that do not move tell nothing: the version does.
            found = digest is not None
            if found and dict(offsets) != dict(step.entry.after):
                raise OffsetLost(
                    f"version {made.version} is in the log, and the consumer group {self._group} went on from "
                    f"{dict(step.entry.after)} to {dict(offsets)}: another trainer has taken steps since"
                )
        else:
            found = landed(step.entry, offsets, group=self._group)
        if found and digest != made.state_digest:
            raise ReplayDiverged(
                f"version {made.version} is in the log with {digest}, here it is {made.state_digest}: another trainer has "
                "committed it"
            )
        if found:
            self._on_committed(ready.version, ready.step)
        self._enter(lambda books: books.settle(landed=found))
        return found

    def _check_reverted(self, made: WeightVersion, there: WeightVersion | None) -> None:
        """Raises `Fenced` where the lineage was taken back meanwhile, in place of this version or right after it."""
        after = self._logged(made.version + 1)
        taken_back = there is not None and there.reverts_to != made.reverts_to
        if taken_back or (after is not None and after.reverts_to is not None):
            raise Fenced(
                f"while version {made.version} was committed the lineage was taken back: start again, it goes on from there"
            )

    def _enter(self, change: Callable[[Books], Books]) -> None:
        with self._changed:
            self._books = change(self._books)
            kept = {entry.version for entry in self._books.open}
            self._open = {version: step for version, step in self._open.items() if version in kept}
            self._changed.notify_all()
