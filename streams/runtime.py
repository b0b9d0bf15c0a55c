"""The transactional runtime: drives one step over a log so that its outputs and its offsets appear together or not at all.

Take-over order: `init_transactions` (when it returns, the old owner is fenced and its transaction finished) -> the
changelogs to their end -> the committed offsets -> the inputs from there. No committed offset = from the beginning.

One transaction = outputs + refusals + offsets. After any doubt the producer, the reader and the step are thrown away and
built anew (law 4): the committed offsets tell what happened. A broker that is away is waited for, with backoff, until
`patience_s`; then the last error is raised. `Fenced` and `OffsetLost` are raised at once: waiting mends neither.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import NamedTuple

import structlog
from pydantic import BaseModel, ConfigDict, Field

from rollwire.schemas.errors import DeadlineExceeded, LogUnavailable, RegistryUnavailable, TransactionUnknown
from rollwire.streams.emit import take
from rollwire.streams.seams.clock import Clock
from rollwire.streams.seams.log import Log, Outgoing, Reader, Record, TopicPartition, TransactionalWriter
from rollwire.streams.step import Step, Taken

_logger = structlog.get_logger("rollwire.runtime")


class RuntimeConfig(BaseModel):
    """How the runtime batches and how long it waits."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    linger_ms: float = Field(
        default=50.0, ge=0, description="How long a batch is gathered after its first record."
    )
    max_records: int = Field(default=2_000, ge=1, description="Records of one batch at most.")
    idle_s: float = Field(default=0.2, ge=0, le=1, description="How long one wait for a first record may be.")
    offsets_only_s: float = Field(
        default=1.0, ge=0, description="Offsets without outputs are committed this often."
    )
    end_check_s: float = Field(
        default=0.2, ge=0, description="The log's ends are asked for no more often than this."
    )
    transaction_s: float = Field(
        default=8.0, gt=0, description="Deadline of a commit, of a take-over and of a restore's stall."
    )
    patience_s: float = Field(
        default=60.0, gt=0, description="How long failures may go on before the last one is raised."
    )
    backoff_s: float = Field(default=0.2, gt=0, description="First wait after a failure; doubles up to 5 s.")


class Drive(NamedTuple):
    """What to drive: `make` builds an empty step, `take` decodes its records."""

    transactional_id: str
    group: str
    make: Callable[[], Step]
    take: Callable[[Record], Taken] = take


def run_step(log: Log, drive: Drive, config: RuntimeConfig, *, stop: threading.Event, clock: Clock) -> None:
    """Drives a step until `stop` is set: what was read by then is decided and committed.

    Raises `Fenced`, `OffsetLost` and `TopicMismatch` at once, `LogUnavailable` or `TransactionUnknown` when failures
    went on for `patience_s` without one committed transaction between them.
    """
    failing_since: float | None = None
    backoff_s = config.backoff_s
    while not stop.is_set():
        session: Session | None = None
        try:
            session = Session(log, drive, config, clock)
            while not stop.is_set():
                session.turn()
            session.settle()
            return
        except (TransactionUnknown, LogUnavailable, DeadlineExceeded, RegistryUnavailable) as error:
            now = clock.monotonic_s()
            if session is not None and session.healthy:
                failing_since, backoff_s = None, config.backoff_s
            failing_since = now if failing_since is None else failing_since
            _logger.warning(
                "step.rebuild", id=drive.transactional_id, error=str(error), kind=type(error).__name__
            )
            if now - failing_since > config.patience_s:
                raise LogUnavailable(
                    f"{drive.transactional_id}: no transaction for {now - failing_since:.0f} s; the last error was: {error}"
                ) from error
        finally:
            if session is not None:
                session.close()
        stop.wait(backoff_s)
        backoff_s = min(backoff_s * 2, 5.0)


class Session:
    """One producer's life: takes over when made, then `turn` by `turn`.

    Single-threaded. Its I/O goes through the log's readers and writers, its timing through `clock`: a simulation drives it
    turn by turn, with `idle_s=0` and `linger_ms=0` where its log has nothing to wait for.
    """

    def __init__(self, log: Log, drive: Drive, config: RuntimeConfig, clock: Clock) -> None:
        self._log = log
        self._drive = drive
        self._config = config
        self._clock = clock
        self._last_commit = self._last_check = self._clock.monotonic_s()
        self.healthy = False  # something was committed, or nothing needed to be for a while
        self._reader: Reader | None = None
        self._writer: TransactionalWriter = log.transactional_writer(
            drive.transactional_id, config.transaction_s
        )
        try:
            self.step = drive.make()
            self._reader = log.reader()
            self._restore()
            self._committed = self._start()
        except BaseException:
            self.close()
            raise

    def turn(self) -> int:
        """One batch: read, decide, commit. Returns the number of records read."""
        records, take = self._gather(), self._drive.take
        now_us = self._clock.now_us()
        outputs = self.step.feed([take(r) for r in records], now_us) if records else []
        due_us = self.step.due_us()
        if due_us is not None and due_us <= now_us and self._may_check():
            # The clock was read before the ends: what is not below them was written later than `now_us`.
            ends = self._log.end_offsets(self.step.inputs)
            positions = self._reading().positions()
            outputs += self.step.tick(now_us, {p for p, end in ends.items() if positions[p] >= end})
        self._commit(outputs, self._config.offsets_only_s)
        return len(records)

    def settle(self) -> None:
        """Commits offsets that moved since the last transaction: the next owner re-reads less."""
        self._commit([], 0.0)

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
        self._writer.close()

    def _reading(self) -> Reader:
        if self._reader is None:
            raise LogUnavailable("the session is closed")
        return self._reader

    def _gather(self) -> list[Record]:
        reader, config = self._reading(), self._config
        records = reader.poll(config.max_records, config.idle_s)
        if not records:
            return records
        deadline = self._clock.monotonic_s() + config.linger_ms / 1e3
        while len(records) < config.max_records and (left := deadline - self._clock.monotonic_s()) > 0:
            records += reader.poll(config.max_records - len(records), left)
        return records

    def _may_check(self) -> bool:
        now = self._clock.monotonic_s()
        if now - self._last_check < self._config.end_check_s:
            return False
        self._last_check = now
        return True

    def _commit(self, outputs: list[Outgoing], offsets_only_s: float) -> None:
        offsets = self.step.committable()
        now = self._clock.monotonic_s()
        if not outputs and (offsets == self._committed or now - self._last_commit < offsets_only_s):
            self.healthy = self.healthy or now - self._last_commit > self._config.patience_s
            return
        self._writer.begin()
        self._writer.write(outputs)
        self._writer.commit(
            self._drive.group,
            offsets,
            self._config.transaction_s,
            also={read_group(self._drive.group): self.step.read()},
        )
        self._committed = offsets
        self._last_commit = self._clock.monotonic_s()
        self.healthy = True

    def _restore(self) -> None:
        changelogs = self.step.changelogs
        ends = self._log.end_offsets(changelogs)
        left = {p: at for p, at in self._log.beginning_offsets(changelogs).items() if at < ends[p]}
        if not left:
            return
        reader = self._reading()
        reader.assign(left)
        deadline = self._clock.monotonic_s() + self._config.transaction_s
        while any(at < ends[p] for p, at in left.items()):
            for record in reader.poll(5_000, self._config.idle_s):
                self.step.restore(self._drive.take(record))
            before, left = left, reader.positions()  # stands behind control records too (C40)
            if left != before:
                deadline = self._clock.monotonic_s() + self._config.transaction_s
            elif self._clock.monotonic_s() > deadline:
                where = ", ".join(f"{p.topic}[{p.partition}] at {at} of {ends[p]}" for p, at in left.items())
                raise DeadlineExceeded(
                    f"no progress for {self._config.transaction_s:g} s while reading {where}"
                )

    def _start(self) -> Mapping[TopicPartition, int]:
        inputs = self.step.inputs
        committed = self._log.committed(self._drive.group, inputs)
        read = self._log.committed(read_group(self._drive.group), inputs)
        start = {**self._log.beginning_offsets(inputs), **committed}
        self.step.start(start, read)
        self._reading().assign(start)
        _logger.info(
            "step.start",
            id=self._drive.transactional_id,
            positions={f"{p.topic}[{p.partition}]": at for p, at in start.items()},
        )
        return committed


def read_group(group: str) -> str:
    """Where a group's read positions are kept (see `Step`)."""
    return f"{group}.read"
