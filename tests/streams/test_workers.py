"""Processes that share partitions out: joins, leaves, a place that was lost, and somebody who uses the same ids."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any

import pytest
import structlog.testing

from rollwire.schemas.errors import Fenced, SplitPair, TransactionUnknown
from rollwire.streams.assemble_config import SAMPLED, AssembleConfig
from rollwire.streams.run_assemble import run_assemble, whole_pairs
from rollwire.streams.runtime import Drive, RuntimeConfig
from rollwire.streams.seams.clock import SystemClock
from rollwire.streams.seams.log import HeldBack, Outgoing, TopicPartition, TransactionalWriter
from rollwire.streams.seams.log_memory import MemoryLog
from rollwire.streams.seams.member_memory import MemoryMember
from rollwire.streams.seams.scan import scan
from rollwire.streams.step import Memory, Taken
from rollwire.streams.workers import run_shared

FAST = RuntimeConfig(
    linger_ms=0,
    idle_s=0.01,
    offsets_only_s=0,
    backoff_s=0.01,
    patience_s=5.0,
    max_records=10,
    held_back_s=0.1,
)
COUNT = 6


class Copy:
    """Copies one partition of `in` to `out`."""

    memories: tuple[Memory, ...] = ()

    def __init__(self, partition: int) -> None:
        self.inputs = (TopicPartition("in", partition),)
        self._next = 0

    def restore(self, taken: Taken) -> None:
        raise AssertionError("it has no memories")

    def start(self, committed: Mapping[TopicPartition, int], read: Mapping[TopicPartition, int]) -> None:
        self._next = committed[self.inputs[0]]

    def feed(self, taken: Sequence[Taken], clock_us: int) -> list[Outgoing]:
        self._next = taken[-1].record.offset + 1
        return [Outgoing("out", r.key, r.value) for r, _ in taken]

    def tick(self, clock_us: int, at_end: Collection[TopicPartition]) -> list[Outgoing]:
        return []

    def due_us(self) -> int | None:
        return None

    def paused(self) -> Collection[TopicPartition]:
        return ()

    def read(self) -> dict[TopicPartition, int]:
        return {self.inputs[0]: self._next}

    def committable(self) -> dict[TopicPartition, int]:
        return self.read()


def plan(held: frozenset[TopicPartition]) -> Mapping[str, Drive]:
    drives = [Drive(f"t.copy.{p.partition}", "t.copy", partial(Copy, p.partition)) for p in held]
    return {drive.transactional_id: drive for drive in drives}


class Process:
    """`run_shared` in a thread."""

    def __init__(self, log: MemoryLog) -> None:
        self.stop = threading.Event()
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(log,), daemon=True)
        self._thread.start()

    def _run(self, log: MemoryLog) -> None:
        try:
            run_shared(log, "t.copy", ["in"], plan, FAST, stop=self.stop, clock=SystemClock())
        except Exception as error:  # noqa: BLE001 - handed to the test
            self.error = error

    def end(self) -> None:
        self.stop.set()
        self.join()

    def join(self) -> None:
        self._thread.join(15)
        assert not self._thread.is_alive()


def until(holds: Callable[[], bool], seconds: float = 20) -> None:
    deadline, moment = time.monotonic() + seconds, threading.Event()
    while not holds():
        assert time.monotonic() < deadline, "the condition did not come true"
        moment.wait(0.005)  # lets the others run


def out(log: MemoryLog) -> Counter[bytes | None]:
    return Counter(r.value for r in scan(log, ["out"]))


def put(log: MemoryLog, numbers: range) -> None:
    log.writer().write([Outgoing("in", None, b"%d" % n, (), n % COUNT) for n in numbers])


def test_c39_processes_that_come_and_go_lose_and_repeat_nothing() -> None:
    log = MemoryLog({"in": COUNT, "out": 1})
    first = Process(log)
    others: list[Process] = []
    for turn in range(6):
        put(log, range(turn * 60, turn * 60 + 60))
        others.append(Process(log))
        until(lambda turn=turn: sum(out(log).values()) > turn * 60)  # type: ignore[misc]
        if turn % 2:
            others.pop(0).end()
    until(lambda: sum(out(log).values()) >= 360)
    for process in (first, *others):
        process.end()
        assert process.error is None
    assert out(log) == {b"%d" % n: 1 for n in range(360)}
    ends = log.end_offsets([TopicPartition("in", p) for p in range(COUNT)])
    assert log.committed("t.copy", list(ends)) == ends


def test_a_process_that_lost_its_place_is_fenced_and_takes_part_again() -> None:
    log = MemoryLog({"in": COUNT, "out": 1})
    one, two = Process(log), Process(log)
    put(log, range(60))
    until(lambda: sum(out(log).values()) == 60)
    group = log.groups["t.copy"]
    for turn in range(3):
        group.expire(group._members[0])
        put(log, range(60 + turn * 60, 120 + turn * 60))
        until(lambda turn=turn: sum(out(log).values()) >= 120 + turn * 60)  # type: ignore[misc]
    for process in (one, two):
        process.end()
        assert process.error is None
    assert out(log) == {b"%d" % n: 1 for n in range(240)}


class Standing(MemoryLog):
    """Its first member stands still while `gate` is shut, and then gets no answer to its commits."""

    def __init__(self) -> None:
        super().__init__({"in": 1, "out": 1})
        self.gate = threading.Event()
        self.gate.set()
        self.stands = threading.Event()
        self.doubted = threading.Event()
        self.taken = 0

    def member(
        self, group: str, topics: Sequence[str], revoke: Callable[[frozenset[TopicPartition]], None]
    ) -> MemoryMember:
        member = super().member(group, topics, revoke)
        if len(self.groups[group]._members) > 1 or self.stands.is_set():
            return member

        poll, make = member.poll, member.transactional_writer

        def standing(timeout_s: float) -> frozenset[TopicPartition]:
            if not self.gate.is_set():
                self.stands.set()
                assert self.gate.wait(30)
            return poll(timeout_s)

        def doubting(transactional_id: str, timeout_s: float = 60.0) -> TransactionalWriter:
            writer = make(transactional_id, timeout_s)
            commit = writer.commit

            def unanswered(*args: Any, **more: Any) -> None:
                if not self.gate.is_set():
                    self.doubted.set()
                    raise TransactionUnknown("no answer")
                commit(*args, **more)

            writer.commit = unanswered  # type: ignore[method-assign]
            return writer

        member.poll, member.transactional_writer = standing, doubting  # type: ignore[method-assign]
        return member

    def transactional_writer(self, transactional_id: str, timeout_s: float = 60.0) -> TransactionalWriter:
        self.taken += 1
        return super().transactional_writer(transactional_id, timeout_s)


def test_who_stood_still_asks_for_its_place_before_it_takes_over_again() -> None:
    log = Standing()
    zombie = Process(log)
    put(log, range(1))
    until(lambda: sum(out(log).values()) == 1)
    log.gate.clear()
    until(log.stands.is_set)
    # One batch on its way while it stands; nobody knows what became of it.
    put(log, range(COUNT, COUNT + 1))
    until(log.doubted.is_set)
    group = log.groups["t.copy"]
    group.expire(group._members[0])
    owner = Process(log)
    for number in range(2, 32):
        put(log, range(number * COUNT, number * COUNT + 1))
        until(lambda number=number: sum(out(log).values()) == number + 1)  # type: ignore[misc]
    assert log.taken == 2  # it did not fence the owner
    log.gate.set()
    for process in (zombie, owner):
        process.end()
        assert process.error is None
    assert out(log) == {b"%d" % (n * COUNT): 1 for n in range(32)}


def test_c38_somebody_outside_of_the_group_with_the_same_id_stops_it() -> None:
    """One more taking over is no reason to give up, three are: two that fence one another must not go on for ever."""
    log = MemoryLog({"in": 1, "out": 1})
    process = Process(log)
    for number in range(3):
        log.writer().write([Outgoing("in", None, b"%d" % number, (), 0)])
        until(lambda number=number: out(log)[b"%d" % number] == 1)  # type: ignore[misc]
        log.transactional_writer("t.copy.0").close()
    log.writer().write([Outgoing("in", None, b"last", (), 0)])
    process.join()
    assert isinstance(process.error, Fenced)
    assert "outside of its group" in str(process.error)


def test_c41_a_transaction_that_holds_readers_back_is_told_by_its_id() -> None:
    log = MemoryLog({"in": 1, "out": 1})
    writer = log.transactional_writer("somebody else's")
    writer.begin()
    writer.write([Outgoing("in", None, b"never", (), 0)])
    log.writer().write([Outgoing("in", None, b"behind", (), 0)])
    with structlog.testing.capture_logs() as lines:
        process = Process(log)
        told = partial(_told, lines)
        until(lambda: told() is not None)
        writer.abort()
        until(lambda: out(log) == {b"behind": 1})
        process.end()
    line = told()
    assert line is not None
    assert line["by"] == ("somebody else's",)
    assert (line["partition"], line["stable"], line["written"]) == ("in[0]", 0, 2)


class Silent(MemoryLog):
    """Does not answer who holds its partitions back, until it is told to."""

    def __init__(self) -> None:
        super().__init__({"in": COUNT, "out": 1})
        self.asked, self.answer = threading.Event(), threading.Event()

    def held_back(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, HeldBack]:
        self.asked.set()
        assert self.answer.wait(60.0)
        return super().held_back(partitions)


def test_a_question_without_an_answer_holds_up_neither_work_nor_a_stop() -> None:
    log = Silent()
    process = Process(log)
    assert log.asked.wait(10.0)
    second = Process(log)  # a rebalance while nobody answers
    put(log, range(COUNT))
    until(lambda: sum(out(log).values()) == COUNT, 8)
    process.end()
    second.end()
    log.answer.set()
    assert process.error is second.error is None


def _told(lines: Sequence[MutableMapping[str, Any]]) -> MutableMapping[str, Any] | None:
    return next((line for line in lines if line["event"] == "stable offset blocked"), None)


def test_pairs_that_are_split_are_refused() -> None:
    whole = frozenset(TopicPartition(topic, p) for topic in SAMPLED.joined for p in (1, 3))
    assert whole_pairs(whole, SAMPLED.joined) == [1, 3]
    assert whole_pairs(frozenset(), SAMPLED.joined) == []
    with pytest.raises(SplitPair, match="partition 3 was assigned without rewards"):
        whole_pairs(whole - {TopicPartition("rewards", 3)}, SAMPLED.joined)


def test_a_member_that_reads_other_topics_splits_the_pairs_and_is_noticed() -> None:
    counts = dict.fromkeys((*SAMPLED.joined, "groups-closed", "groups", "group-fates"), 2)
    log = MemoryLog({**counts, "dead-letters": 1})
    other = log.member("t.assemble", [SAMPLED.joined[0]], lambda held: None)
    done = threading.Event()

    def stay() -> None:
        while not done.is_set():
            other.poll(0.05)

    thread = threading.Thread(target=stay)
    thread.start()
    try:
        with pytest.raises(SplitPair):
            run_assemble(log, AssembleConfig(), prefix="t.", stop=threading.Event(), runtime=FAST)
    finally:
        done.set()
        thread.join(10)
