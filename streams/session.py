"""One producer's life: takes over, then batch by batch: read, decide, commit.

Take-over order: `init_transactions` (when it returns, the old owner is fenced and its transaction finished) -> the
memories to their ends -> the committed offsets -> the inputs from there. No committed offset = from the beginning.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Final, NamedTuple

import structlog

from rollwire.schemas.errors import CircuitOpen, ConfigError, LogError, LogUnavailable, PlanViolation
from rollwire.streams.breakers import Circuit, CrashLoop
from rollwire.streams.drive import Drive, RuntimeConfig
from rollwire.streams.restore import restore
from rollwire.streams.seams.clock import Clock
from rollwire.streams.seams.log import (
    Log,
    Member,
    Noted,
    Outgoing,
    Reader,
    Record,
    TopicPartition,
    TransactionalWriter,
)
from rollwire.streams.step import Marked, Taken

_logger = structlog.get_logger("rollwire.runtime")

_RESTORE_IDLE_S: Final = 0.2  # somebody else's transaction may have to be waited for, so time has to pass
_FIRST_BYTES: Final = 64 * 1024  # what a record is taken to be before the first one came


class _Later(NamedTuple):
    """Marks that hold once the committed offsets have reached what was needed of everything written below them."""

    marks: Mapping[TopicPartition, int]
    needed: Mapping[TopicPartition, int]


def _reached(offsets: Mapping[TopicPartition, int], needed: Mapping[TopicPartition, int]) -> bool:
    return all(offsets[partition] >= at for partition, at in needed.items())


class Session:
    """One producer's life: takes over when made, then `turn` by `turn`.

    Single-threaded. Its I/O goes through the log's readers and writers, its timing through `clock`: a simulation drives it
    turn by turn, with `idle_s=0` and `linger_ms=0` where its log has nothing to wait for.
    """

    def __init__(
        self,
        log: Log,
        drive: Drive,
        config: RuntimeConfig,
        clock: Clock,
        *,
        member: Member | None = None,
        life: str = "",
    ) -> None:
        """`member`: the place in the group by which this process has the partitions; None = they were given by hand.
        `life`: names the process; a session after one of the same life is no restart after a death.
        """
        self._log = log
        self._drive = drive
        self._config = config
        self._clock = clock
        self._last_commit = self._last_check = clock.monotonic_s()
        self._mean_bytes: float = _FIRST_BYTES
        self._paused: frozenset[TopicPartition] = frozenset()
        self._life = life
        self._pending: list[Record] = []  # gathered, not taken yet
        # The offsets of the last transaction: committed and read.
        self._committed: tuple[Mapping[TopicPartition, int], Mapping[TopicPartition, int]] = {}, {}
        self._marks: Mapping[TopicPartition, int] = {}
        self._later: _Later | None = None
        self.healthy = False  # something was committed, or nothing needed to be for a while
        self._reader: Reader | None = None
        # This finishes the old owner's transaction, so it comes before anything is read.
        self._writer: TransactionalWriter = (log if member is None else member).transactional_writer(
            drive.transactional_id, config.transaction_s
        )
        try:
            self.step = drive.make()
            self._marked = [memory for memory in self.step.memories if isinstance(memory, Marked)]
            self._reader = log.reader()
            self._start()
        except BaseException:
            self.close()
            raise

    def turn(self) -> int:
        """One batch: read, decide, commit. Returns the number of records read."""
        self._backpressure()
        # Asked before the step writes what follows from this batch.
        needed = self._needed()
        records = self._next()
        careful = self._crash.active and self._note(records)
        try:
            outputs = self._decide(records)
        except (ConfigError, PlanViolation):
            self._excuse()
            raise
        self._check_circuit(records, outputs)
        self._commit(outputs, 0.0 if careful else self._config.offsets_only_s, needed=needed)
        if self._crash.active and not self._pending:
            self._crash.passed(self._reading().positions())
        return len(records)

    def settle(self) -> None:
        """Commits offsets that moved since the last transaction: the next owner re-reads less."""
        self._commit([], 0.0, needed=self._needed())

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
        self._writer.close()

    def _reading(self) -> Reader:
        if self._reader is None:
            raise LogUnavailable("the session is closed")
        return self._reader

    def _decide(self, records: list[Record]) -> list[Outgoing]:
        now_us = self._clock.now_us()
        outputs = self.step.feed([self._take(record) for record in records], now_us) if records else []
        due_us = self.step.due_us()
        if not self._pending and due_us is not None and due_us <= now_us and self._may_check():
            # The clock was read before the ends: what is not below them was written later than `now_us`.
            ends = self._ends()
            positions = self._reading().positions()
            outputs += self.step.tick(now_us, {p for p, end in ends.items() if positions[p] >= end})
        return outputs

    def _ends(self) -> dict[TopicPartition, int]:
        """Where each input ends. The stable end does not say it: behind a transaction that hangs there may be anything. Of
        an input that is a memory too, what others go by is what they can see: there it is enough, and nobody waits."""
        inputs = self.step.inputs
        memories = {memory.partition for memory in self.step.memories}
        ends = self._log.written_offsets([p for p in inputs if p not in memories])
        if stable := [p for p in inputs if p in memories]:
            ends |= self._log.end_offsets(stable)
        return ends

    def _backpressure(self) -> None:
        paused = frozenset(self.step.paused())
        if paused == self._paused:
            return
        reader = self._reading()
        if stopped := paused - self._paused:
            reader.pause(sorted(stopped))
        if released := self._paused - paused:
            reader.resume(sorted(released))
        self._paused = paused

    def _next(self) -> list[Record]:
        """What is taken together now: a whole batch, but less where a record may be deadly."""
        gathered = self._pending or self._gather()
        length = self._crash.length(gathered) if self._crash.active else len(gathered)
        records, self._pending = gathered[:length], gathered[length:]
        return records

    def _note(self, records: list[Record]) -> bool:
        """Says in the log what is tried now, unless that stands there; whether progress has to be told as well."""
        notes = self._crash.before(records)
        if notes:
            read = self._committed[1]
            self._write_read({p: Noted(read.get(p, note.first), note.text()) for p, note in notes.items()})
        return any(self._crash.watched(record) for record in records)

    def _excuse(self) -> None:
        """Takes back what was noted: an error that people are told of is no death, and says nothing against the records
        that were tried."""
        if self._crash.active:
            committed, read = self._committed
            kept = self._crash.opened(read) if self._crash.was_open else self._crash.marked(read, committed)
            with suppress(LogError):  # the one that is raised says more
                self._write_read(kept)

    def _write_read(self, read: Mapping[TopicPartition, int]) -> None:
        self._writer.begin()
        self._writer.write([])
        self._writer.commit(
            self._drive.group, {}, self._config.transaction_s, also={read_group(self._drive.group): read}
        )

    def _take(self, record: Record) -> Taken:
        refused = self._crash.refusal(record)
        return self._drive.take(record) if refused is None else Taken(record, refused)

    def _check_circuit(self, records: list[Record], outputs: list[Outgoing]) -> None:
        try:
            self._circuit.check(records, outputs)
        except CircuitOpen:
            self._write_read(self._crash.opened(self._committed[1]))
            raise

    def _gather(self) -> list[Record]:
        """One batch, up to its records, bytes and time."""
        reader, config, clock = self._reading(), self._config, self._clock
        records: list[Record] = []
        size, deadline, wait_s = 0, 0.0, config.idle_s
        while True:
            # As many as will fit by what the last ones measured.
            room = max(1, round((config.max_bytes - size) / self._mean_bytes))
            asked = min(config.max_records - len(records), room)
            polled = reader.poll(asked, wait_s)
            if not records:
                if not polled:
                    return records
                deadline = clock.monotonic_s() + config.linger_ms / 1e3
            if polled:
                records += polled
                # What a record has beside its value is small, and adding it up costs as much as a step's look-ups.
                added = sum(len(record.value or b"") for record in polled)
                size += added
                self._mean_bytes = max(1.0, (self._mean_bytes + added / len(polled)) / 2)
            if len(records) >= config.max_records or size >= config.max_bytes:
                return records
            # What is there already is taken without waiting, whatever time is left.
            wait_s = max(0.0, deadline - clock.monotonic_s())
            if wait_s == 0 and len(polled) < asked:
                return records

    def _may_check(self) -> bool:
        now = self._clock.monotonic_s()
        if now - self._last_check < self._config.end_check_s:
            return False
        self._last_check = now
        return True

    def _commit(
        self, outputs: list[Outgoing], offsets_only_s: float, *, needed: Mapping[TopicPartition, int]
    ) -> None:
        offsets, read = self.step.committable(), self.step.read()
        now = self._clock.monotonic_s()
        if not outputs and ((offsets, read) == self._committed or now - self._last_commit < offsets_only_s):
            self.healthy = self.healthy or now - self._last_commit > self._config.patience_s
            return
        self._move_marks(outputs, needed, offsets)
        group = self._drive.group
        self._writer.begin()
        self._writer.write(outputs)
        self._writer.commit(
            group,
            offsets,
            self._config.transaction_s,
            also={
                read_group(group): self._crash.marked(read, offsets),
                marks_group(group): self._marks,
            },
        )
        self._committed = offsets, read
        self._last_commit = self._clock.monotonic_s()
        self.healthy = True

    def _needed(self) -> dict[TopicPartition, int]:
        """The committed offsets from which on nothing is needed that stands in the marked memories."""
        needed: dict[TopicPartition, int] = {}
        for memory in self._marked:
            for partition, at in memory.needed().items():
                needed[partition] = max(at, needed.get(partition, 0))
        return needed

    def _move_marks(
        self,
        outputs: list[Outgoing],
        needed: Mapping[TopicPartition, int],
        offsets: Mapping[TopicPartition, int],
    ) -> None:
        """Before the transaction is begun: whatever it writes will stand at or above the marks.

        `needed`: of what was written before it. `offsets`: what it commits. Where something is always needed, the marks
        move up to where the memories ended when that which was needed then had not been written yet.
        """
        partitions = [memory.partition for memory in self._marked]
        topics = {partition.topic for partition in partitions}
        if not any(output.topic in topics for output in outputs):
            return
        if len(self._marks) < len(partitions) or _reached(offsets, needed):
            self._marks, self._later = self._log.end_offsets(partitions), None
            return
        if self._later is not None and _reached(offsets, self._later.needed):
            self._marks, self._later = self._later.marks, None
        if self._later is None:
            self._later = _Later(self._log.end_offsets(partitions), needed)

    def _start(self) -> None:
        config, group, step = self._config, self._drive.group, self.step
        self._marks = self._log.committed(marks_group(group), [memory.partition for memory in self._marked])
        restored = restore(
            self._log,
            self._reading(),
            step,
            self._drive.take,
            self._marks,
            idle_s=config.idle_s or _RESTORE_IDLE_S,
            stall_s=config.transaction_s,
            clock=self._clock,
        )
        inputs = step.inputs
        committed = self._log.committed(group, inputs)
        read = self._log.committed(read_group(group), inputs)
        start = {**self._log.beginning_offsets(inputs), **committed}
        start |= {p: at for p, at in restored.items() if p in start}
        step.start(start, read)
        self._reading().assign(start)
        # What is noted of a partition stands with its read position, so from here on each has one.
        read_at = {p: read.get(p, start[p]) for p in step.read()}
        self._committed = committed, {p: int(at) for p, at in read_at.items()}
        self._guard(read_at)
        _logger.info(
            "step.start",
            id=self._drive.transactional_id,
            positions={f"{p.topic}[{p.partition}]": at for p, at in start.items()},
        )

    def _guard(self, read: Mapping[TopicPartition, int]) -> None:
        config = self._config
        ends = self._log.end_offsets(list(read)) if config.deaths and read else {}
        # The last owner may have been as far as a batch; control records and aborted ones lie between.
        reach = 4 * config.max_records
        self._crash = CrashLoop(
            life=self._life,
            deaths=config.deaths,
            read=read,
            guarded_to={p: min(end, read[p] + reach) for p, end in ends.items()},
        )
        self._circuit = Circuit(
            run=config.max_refused_run,
            share=config.max_refused_share,
            window=config.refused_window,
            half_open=self._crash.was_open,
        )


def read_group(group: str) -> str:
    """Where a group's read positions are kept (see `Step`)."""
    return f"{group}.read"


def marks_group(group: str) -> str:
    """Where a group's marks are kept (see `Marked`)."""
    return f"{group}.marks"
