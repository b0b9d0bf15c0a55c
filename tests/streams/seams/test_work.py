"""Background work by threads and by hand: the same tasks, advanced by one or the other."""

from __future__ import annotations

import threading

import pytest

from rollwire.streams.seams.clock import ManualClock
from rollwire.streams.seams.work import Inline, Task, Threads, Work

WAIT_S = 10.0


class Died(BaseException):
    pass


class Counter:
    """Counts down from what it was given; one turn each, the last one fails if it is told to."""

    def __init__(self, work: Work, name: str = "count", fail: BaseException | None = None) -> None:
        self.left = 0
        self.turns: list[str] = []
        self.escaped: list[BaseException] = []
        self.changed = threading.Condition()
        self._fail = fail
        self.work = work
        self.worker = work.start(Task(name, self.changed, self._due, self._turn, self._failed))

    def add(self, count: int) -> None:
        with self.changed:
            self.left += count
            self.changed.notify_all()

    def wait(self, timeout_s: float = WAIT_S) -> bool:
        return self.work.wait(self.changed, lambda: self.left == 0, timeout_s)

    def _due(self) -> float | None:
        return 0.0 if self.left else None

    def _turn(self) -> None:
        with self.changed:
            self.left -= 1
            self.turns.append(threading.current_thread().name)
            last = self.left == 0
            self.changed.notify_all()
        if last and self._fail is not None:
            raise self._fail

    def _failed(self, error: BaseException) -> None:
        with self.changed:
            self.escaped.append(error)
            self.changed.notify_all()


def test_a_thread_does_what_is_due_and_ends_when_told() -> None:
    counter = Counter(Threads())
    counter.add(3)
    assert counter.wait()
    counter.add(2)
    assert counter.wait()
    assert counter.turns == ["count"] * 5
    assert counter.worker.stop(WAIT_S)
    counter.add(1)
    assert not counter.wait(0.05)


def test_what_escapes_a_thread_is_told_and_the_task_goes_on() -> None:
    counter = Counter(Threads(), fail=Died("down"))
    counter.add(2)
    assert counter.work.wait(counter.changed, lambda: bool(counter.escaped), WAIT_S)
    counter.add(1)
    assert counter.work.wait(counter.changed, lambda: len(counter.escaped) == 2, WAIT_S)
    assert counter.worker.stop(WAIT_S)


def test_by_hand_nothing_happens_until_it_is_turned_and_anything_passes_through() -> None:
    inline = Inline()
    one, two = Counter(inline, "one"), Counter(inline, "two", Died("down"))
    assert not inline.turn()
    one.add(1)
    two.add(2)
    assert not one.wait()
    assert inline.ready() == ["one", "two"]
    assert inline.turn("two")
    assert inline.turn()
    assert one.wait()
    assert inline.ready() == ["two"]
    with pytest.raises(Died):
        inline.turn()
    assert two.escaped == []
    assert two.worker.stop(WAIT_S)
    two.add(1)
    assert not inline.turn()
    assert {*one.turns, *two.turns} == {threading.current_thread().name}


def test_the_next_turn_can_be_a_matter_of_time() -> None:
    clock, inline = ManualClock(), Inline()
    done: list[float] = []
    at_s = clock.monotonic_s() + 5.0

    def due() -> float | None:
        return None if done else at_s - clock.monotonic_s()

    inline.start(Task("later", threading.Condition(), due, lambda: done.append(at_s), lambda error: None))
    assert inline.next_s() == pytest.approx(5.0)
    assert not inline.turn()
    clock.advance(6.0)
    assert inline.next_s() == 0.0
    assert inline.turn()
    assert inline.next_s() is None
