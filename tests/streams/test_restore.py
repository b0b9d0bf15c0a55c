"""What a step must find again although others write into the same topic."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import pytest

from rollwire.schemas.errors import DeadlineExceeded
from rollwire.streams.restore import restore
from rollwire.streams.seams.clock import ManualClock
from rollwire.streams.seams.log import Outgoing, Record, TopicPartition
from rollwire.streams.seams.log_memory import MemoryLog
from rollwire.streams.step import Marked, Memory, Taken

FATES = TopicPartition("group-fates", 0)


class Remembering:
    """A step that only restores."""

    inputs: Sequence[TopicPartition] = ()
    memories: Sequence[Memory] = (Marked(FATES, dict),)

    def __init__(self) -> None:
        self.found: list[bytes | None] = []

    def restore(self, taken: Taken) -> None:
        self.found.append(taken.record.value)

    def start(self, committed: Mapping[TopicPartition, int], read: Mapping[TopicPartition, int]) -> None:
        raise NotImplementedError

    def feed(self, taken: Sequence[Taken], clock_us: int) -> list[Outgoing]:
        raise NotImplementedError

    def tick(self, clock_us: int, at_end: Collection[TopicPartition]) -> list[Outgoing]:
        raise NotImplementedError

    def due_us(self) -> int | None:
        return None

    def paused(self) -> Collection[TopicPartition]:
        return ()

    def read(self) -> dict[TopicPartition, int]:
        return {}

    def committable(self) -> dict[TopicPartition, int]:
        return {}


class WaitingLog(MemoryLog):
    """Time passes where something waits; somebody else's transaction ends meanwhile, if it ends at all."""

    def __init__(self, clock: ManualClock, *, ends: bool) -> None:
        super().__init__({"group-fates": 1}, clock)
        self._own_clock = clock
        self._ends = ends
        self.other = self.take_over("somebody else", 1.0)
        self.other.begin()
        self.other.write([Outgoing("group-fates", None, b"theirs")])
        own = self.transactional_writer("mine")
        own.begin()
        own.write([Outgoing("group-fates", None, b"mine")])
        own.commit("g", {})

    def monotonic_s(self) -> float:
        return self._own_clock.monotonic_s()

    def wait(self, seconds: float) -> None:
        self._own_clock.advance(seconds)
        if self._ends:
            self._ends = False
            self.other.commit("h", {})


def restored(log: WaitingLog, clock: ManualClock) -> list[bytes | None]:
    step = Remembering()

    def take(record: Record) -> Taken:
        return Taken(record, None)

    restore(log, log.reader(), step, take, {FATES: 0}, idle_s=0.5, stall_s=8.0, clock=clock)
    return step.found


def test_what_stands_behind_a_transaction_of_somebody_else_is_waited_for() -> None:
    clock = ManualClock()
    log = WaitingLog(clock, ends=True)
    assert log.end_offsets([FATES]) == {FATES: 0}
    assert restored(log, clock) == [b"theirs", b"mine"]


def test_a_transaction_that_does_not_end_is_not_waited_for_for_ever() -> None:
    clock = ManualClock()
    with pytest.raises(DeadlineExceeded, match="group-fates"):
        restored(WaitingLog(clock, ends=False), clock)
