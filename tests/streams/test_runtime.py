"""The runtime's life: take-over order, doubt, fencing, a broker that is away, and stopping."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Self

import pytest

from rollwire.schemas.errors import (
    Fenced,
    LogUnavailable,
    OffsetLost,
    SplitPair,
    TopicMismatch,
    TransactionUnknown,
)
from rollwire.schemas.records import Event
from rollwire.streams import synthetic
from rollwire.streams.assemble_config import SAMPLED, AssembleConfig
from rollwire.streams.emit import outgoing
from rollwire.streams.run_assemble import co_partitions, run_assemble
from rollwire.streams.run_assemble import drive as assemble_drive
from rollwire.streams.runtime import Drive, RuntimeConfig, Session, read_group, run_step
from rollwire.streams.seams.clock import ManualClock, SystemClock
from rollwire.streams.seams.forwarding import ForwardingTransactions
from rollwire.streams.seams.log import Log, Outgoing, TopicPartition, TransactionalWriter
from rollwire.streams.seams.log_memory import MemoryLog
from rollwire.streams.seams.scan import scan
from rollwire.streams.step import Changelog, Taken

IN = TopicPartition("in", 0)
CHANGES = TopicPartition("changes", 0)
FAST = RuntimeConfig(linger_ms=0, idle_s=0.01, offsets_only_s=0, backoff_s=0.01, patience_s=0.5, deaths=0)


class Copy:
    """Copies each record to `out` and remembers what it was told."""

    inputs = (IN,)
    memories = (Changelog(CHANGES),)

    def __init__(self, told: list[str]) -> None:
        self.told = told
        self.next = 0

    def restore(self, taken: Taken) -> None:
        self.told.append(f"restore {taken.record.value!r}")

    def start(self, committed: Mapping[TopicPartition, int], read: Mapping[TopicPartition, int]) -> None:
        self.told.append(f"start {committed[IN]} {read.get(IN)}")
        self.next = committed[IN]

    def feed(self, taken: Sequence[Taken], clock_us: int) -> list[Outgoing]:
        self.next = taken[-1].record.offset + 1
        return [Outgoing("out", r.key, r.value) for r, _ in taken]

    def tick(self, clock_us: int, at_end: Collection[TopicPartition]) -> list[Outgoing]:
        return []

    def due_us(self) -> int | None:
        return None

    def paused(self) -> Collection[TopicPartition]:
        return ()

    def read(self) -> dict[TopicPartition, int]:
        return {IN: self.next}

    def committable(self) -> dict[TopicPartition, int]:
        return {IN: self.next}


class Flaky(MemoryLog):
    """A log whose transactional writers fail as they are told: one entry per commit, None = it holds."""

    def __init__(self) -> None:
        super().__init__({"in": 1, "out": 1, "changes": 1})
        self.faults: Iterator[Callable[[], None] | None] = iter(())
        self.made = 0

    def transactional_writer(self, transactional_id: str, timeout_s: float = 60.0) -> TransactionalWriter:
        self.made += 1
        return _FlakyWriter(self, super().transactional_writer(transactional_id, timeout_s))


class _FlakyWriter(ForwardingTransactions):
    def __init__(self, log: Flaky, inner: TransactionalWriter) -> None:
        super().__init__(inner)
        self._log = log

    def commit(
        self,
        group: str,
        offsets: Mapping[TopicPartition, int],
        timeout_s: float = 30.0,
        *,
        also: Mapping[str, Mapping[TopicPartition, int]] | None = None,
    ) -> None:
        fault = next(self._log.faults, None)
        if fault is not None:
            fault()
        self._inner.commit(group, offsets, timeout_s, also=also)


@pytest.fixture
def log() -> Flaky:
    return Flaky()


@pytest.fixture
def told() -> list[str]:
    return []


def drive(told: list[str]) -> Drive:
    return Drive("t.copy.0", "t.copy", lambda: Copy(told))


def put(log: Log, *values: bytes, topic: str = "in") -> None:
    log.writer().write([Outgoing(topic, b"k", v) for v in values])


def out(log: Log) -> list[bytes | None]:
    return [r.value for r in scan(log, ["out"])]


class Running:
    """`run_step` in a thread; leaving the block stops it within its deadline."""

    def __init__(self, log: Log, told: list[str], config: RuntimeConfig = FAST) -> None:
        self.stop = threading.Event()
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(log, told, config))

    def _run(self, log: Log, told: list[str], config: RuntimeConfig) -> None:
        try:
            run_step(log, drive(told), config, stop=self.stop, clock=SystemClock())
        except Exception as error:  # noqa: BLE001 - handed to the test
            self.error = error

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        self._thread.join(10)
        assert not self._thread.is_alive()

    def ended(self) -> Exception | None:
        self._thread.join(10)
        assert not self._thread.is_alive()
        return self.error


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < deadline, "the condition did not come true"


def test_the_take_over_reads_the_changelog_before_it_fetches_offsets(log: Flaky, told: list[str]) -> None:
    put(log, b"a", b"b", topic="changes")
    put(log, b"1", b"2", b"3")
    log.set_committed("t.copy", IN, 1)
    log.set_committed(read_group("t.copy"), IN, 2)
    session = Session(log, drive(told), FAST, SystemClock())
    assert told == ["restore b'a'", "restore b'b'", "start 1 2"]
    assert session.turn() == 2
    session.close()
    assert out(log) == [b"2", b"3"]
    assert log.committed("t.copy", [IN]) == {IN: 3}
    assert log.committed(read_group("t.copy"), [IN]) == {IN: 3}


def test_without_a_committed_offset_it_starts_at_the_beginning(log: Flaky, told: list[str]) -> None:
    put(log, b"1", b"2", b"3")
    log.trim(IN, 2)
    session = Session(log, drive(told), FAST, SystemClock())
    assert told == ["start 2 None"]
    session.turn()
    session.close()
    assert out(log) == [b"3"]


def test_c40_a_changelog_that_ends_in_control_records_is_read_to_its_end(log: Flaky, told: list[str]) -> None:
    writer = log.transactional_writer("other")
    writer.begin()
    writer.write([Outgoing("changes", b"k", b"a")])
    writer.commit("other", {})
    Session(log, drive(told), FAST, SystemClock()).close()
    assert told == ["restore b'a'", "start 0 None"]


def test_a_changelog_that_is_shortened_while_it_is_read_is_read_again(log: Flaky, told: list[str]) -> None:
    put(log, b"a", b"b", b"c", topic="changes")
    begins = log.beginning_offsets
    asked = 0

    def beginning_offsets(partitions: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
        nonlocal asked
        found = begins(partitions)
        asked += 1
        if asked == 1:
            log.trim(CHANGES, 2)
        return found

    log.beginning_offsets = beginning_offsets  # type: ignore[method-assign]
    put(log, b"1")
    with Running(log, told):
        until(lambda: out(log) == [b"1"])
    assert told == ["restore b'c'", "start 0 None"]


def test_a_doubt_costs_a_producer_and_nothing_else(log: Flaky, told: list[str]) -> None:
    def unknown() -> None:
        raise TransactionUnknown("no answer")

    log.faults = iter([None, unknown, unknown, None])
    with Running(log, told) as running:
        put(log, b"1")
        until(lambda: out(log) == [b"1"])
        put(log, b"2")
        until(lambda: out(log) == [b"1", b"2"])
        put(log, b"3")
        until(lambda: out(log) == [b"1", b"2", b"3"])
    assert running.error is None
    assert log.made == 3
    assert [t for t in told if t.startswith("start")] == ["start 0 None", "start 1 1", "start 1 1"]


def test_a_commit_that_held_without_an_answer_is_not_done_twice(log: Flaky, told: list[str]) -> None:
    inner = MemoryLog.transactional_writer

    class Lost(_FlakyWriter):
        def commit(
            self,
            group: str,
            offsets: Mapping[TopicPartition, int],
            timeout_s: float = 30.0,
            *,
            also: Mapping[str, Mapping[TopicPartition, int]] | None = None,
        ) -> None:
            super().commit(group, offsets, timeout_s, also=also)
            if log.made == 1:
                raise TransactionUnknown("the answer was lost")

    def lossy(transactional_id: str, timeout_s: float = 60.0) -> TransactionalWriter:
        log.made += 1
        return Lost(log, inner(log, transactional_id, timeout_s))

    log.transactional_writer = lossy  # type: ignore[method-assign]
    put(log, b"1")
    with Running(log, told):
        until(lambda: log.made == 2)
        put(log, b"2")
        until(lambda: out(log) == [b"1", b"2"])


def test_failures_without_end_are_raised_after_the_patience(log: Flaky, told: list[str]) -> None:
    def away() -> None:
        raise LogUnavailable("no broker")

    log.faults = iter([away] * 1_000)
    put(log, b"1")
    with Running(log, told) as running:
        error = running.ended()
    assert isinstance(error, LogUnavailable)
    assert "no broker" in str(error)
    assert out(log) == []


def test_c38_who_is_fenced_stops_at_once_and_leaves_nothing(log: Flaky, told: list[str]) -> None:
    """C38: the second process with the same id wins."""
    put(log, b"1")
    with Running(log, told) as running:
        until(lambda: out(log) == [b"1"])
        other = MemoryLog.transactional_writer(log, "t.copy.0")
        put(log, b"2")
        error = running.ended()
    assert isinstance(error, Fenced)
    assert out(log) == [b"1"]
    other.close()


def test_lost_offsets_stop_it(log: Flaky, told: list[str]) -> None:
    put(log, b"1", b"2", b"3")
    log.set_committed("t.copy", IN, 0)
    log.trim(IN, 2)
    with Running(log, told) as running:
        assert isinstance(running.ended(), OffsetLost)


def test_a_stop_commits_what_was_read(log: Flaky, told: list[str]) -> None:
    put(log, b"1")
    slow = FAST.model_copy(update={"offsets_only_s": 3_600.0})
    with Running(log, told, slow):
        until(lambda: out(log) == [b"1"])
    assert log.committed("t.copy", [IN]) == {IN: 1}


def test_an_idle_step_writes_no_transactions(log: Flaky, told: list[str]) -> None:
    put(log, b"1")
    with Running(log, told):
        until(lambda: out(log) == [b"1"])
        end = log.end_offsets([TopicPartition("out", 0)])
    assert log.end_offsets([TopicPartition("out", 0)]) == end


def test_a_batch_ends_with_the_poll_that_reaches_its_bytes(log: Flaky, told: list[str]) -> None:
    put(log, *[bytes(1_000)] * 200)
    session = Session(
        log, drive(told), FAST.model_copy(update={"max_bytes": 10_000, "max_records": 150}), SystemClock()
    )
    batches: list[int] = []
    while sum(batches) < 200:
        batches.append(session.turn())
    session.close()
    # What a record weighs is learnt from the first ones; then ten fill a batch, and never two polls' worth more.
    assert batches[0] <= 10
    assert max(batches) <= 20
    assert 10 <= len(batches) <= 40
    assert len(out(log)) == 200


def test_a_batch_ends_with_its_records(log: Flaky, told: list[str]) -> None:
    put(log, *[b"x"] * 200)
    session = Session(log, drive(told), FAST.model_copy(update={"max_records": 60}), SystemClock())
    assert [session.turn() for _ in range(4)] == [60, 60, 60, 20]
    session.close()


class Full(Copy):
    """Has room for two records until it is told otherwise."""

    room = 2

    def paused(self) -> Collection[TopicPartition]:
        return () if self.next < self.room else (IN,)


def test_an_input_for_which_there_is_no_room_is_not_read(log: Flaky, told: list[str]) -> None:
    step = Full(told)
    session = Session(
        log,
        Drive("t.copy.0", "t.copy", lambda: step),
        FAST.model_copy(update={"max_records": 1}),
        SystemClock(),
    )
    put(log, b"1", b"2", b"3", b"4")
    assert [session.turn() for _ in range(4)] == [1, 1, 0, 0]
    step.room = 3
    assert [session.turn() for _ in range(3)] == [1, 0, 0]
    step.room = 10
    assert session.turn() == 1
    session.close()
    assert out(log) == [b"1", b"2", b"3", b"4"]


JOIN = {"rollouts": 4, "rewards": 4, "routing-traces": 4, "groups-closed": 4}


def test_joined_topics_must_have_equal_partition_counts() -> None:
    with pytest.raises(TopicMismatch, match="rewards 2"):
        co_partitions(MemoryLog({**JOIN, "rewards": 2}), SAMPLED, None)
    assert co_partitions(MemoryLog(JOIN), SAMPLED, None) == [0, 1, 2, 3]
    assert co_partitions(MemoryLog(JOIN), SAMPLED, [2, 1, 2]) == [1, 2]


@pytest.mark.parametrize("asked", [[4], [-1], []])
def test_a_partition_without_its_other_half_is_refused(asked: list[int]) -> None:
    with pytest.raises(SplitPair):
        co_partitions(MemoryLog(JOIN), SAMPLED, asked)


def test_a_failure_of_one_partition_stops_the_others() -> None:
    log = MemoryLog({**JOIN, "groups": 4, "group-fates": 4, "dead-letters": 1})
    lost = TopicPartition("rollouts", 2)
    log.set_committed("t.assemble", lost, 5)
    with pytest.raises(OffsetLost):
        run_assemble(
            log, AssembleConfig(), prefix="t.", stop=threading.Event(), clock=SystemClock(), runtime=FAST
        )


def test_a_broker_that_is_away_at_the_start_is_waited_for() -> None:
    class Late(MemoryLog):
        asked = 0

        def partitions(self, topic: str) -> int:
            self.asked += 1
            if self.asked < 4:
                raise LogUnavailable("no broker yet")
            return super().partitions(topic)

    log = Late({**JOIN, "rewards": 2})
    with pytest.raises(TopicMismatch):
        run_assemble(
            log, AssembleConfig(), prefix="t.", stop=threading.Event(), clock=SystemClock(), runtime=FAST
        )
    assert log.asked > 4


def test_a_deadline_waits_for_what_an_open_transaction_hides() -> None:
    clock = ManualClock()
    topics = (*SAMPLED.joined, "groups", "group-fates", "groups-closed", "dead-letters")
    log, now_us = MemoryLog(dict.fromkeys(topics, 1), clock), clock.now_us()
    config = AssembleConfig(group_deadline_s=10, require_traces=False)
    session = Session(log, assemble_drive(config, "t.", 0), RuntimeConfig(idle_s=0, linger_ms=0), clock)
    group, other = synthetic.group_id(now_us, 1), synthetic.group_id(now_us, 2)
    hanging = log.transactional_writer("somebody else")
    hanging.begin()
    hanging.write([outgoing(synthetic.reward(other, 0, 1.0, at_us=now_us), source="test", time_us=now_us)])
    events: list[Event] = [synthetic.rollout(group, i, 2, at_us=now_us, top_k=0) for i in range(2)]
    events += [synthetic.reward(group, i, float(i), at_us=now_us) for i in range(2)]
    log.writer().write([outgoing(event, source="test", time_us=now_us) for event in events])
    for _ in range(3):
        session.turn()
        clock.advance(12)
    assert list(scan(log, ["group-fates"])) == []
    hanging.abort()
    session.turn()
    session.close()
    assert len(list(scan(log, ["groups"]))) == 1
    assert list(scan(log, ["dead-letters"])) == []
