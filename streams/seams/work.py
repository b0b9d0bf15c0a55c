"""The seam of background work: who advances it, threads or whoever holds it.

A task is a pair of functions: `due` says in how many seconds there is something to do (0 = now, None = not before
something changes) and `turn` does one bounded piece of it. `Threads` gives each task a thread. `Inline` gives it none: a
simulation pumps tasks one turn at a time, in any order, on a clock of its own, and an exception of a turn, a `Died` too,
passes straight through to whoever pumps.

The task's state is guarded by its owner's condition; `due` is called with it held, `turn` without.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple, Protocol


class Task(NamedTuple):
    name: str
    changed: threading.Condition
    due: Callable[[], float | None]  # seconds; 0 = now, None = not before `changed` is notified
    turn: Callable[[], None]
    failed: Callable[
        [BaseException], None
    ]  # told what escaped a turn in a thread, where nobody else would hear of it


class Worker(Protocol):
    def stop(self, timeout_s: float) -> bool:
        """No turn begins after this; whether the running one has ended within `timeout_s`."""
        ...


class Work(Protocol):
    @property
    def patience_s(self) -> float:
        """How long one turn of an owner may wait for something to happen."""
        ...

    def start(self, task: Task) -> Worker: ...

    def wait(self, changed: threading.Condition, until: Callable[[], bool], timeout_s: float) -> bool:
        """`until()`, evaluated with `changed` held, after at most `timeout_s`."""
        ...


class Threads:
    """One daemon thread a task."""

    @property
    def patience_s(self) -> float:
        return 0.1

    def start(self, task: Task) -> Worker:
        return _Thread(task)

    def wait(self, changed: threading.Condition, until: Callable[[], bool], timeout_s: float) -> bool:
        with changed:
            return changed.wait_for(until, timeout_s)


class _Thread:
    def __init__(self, task: Task) -> None:
        self._task = task
        self._ended = False
        self._thread = threading.Thread(target=self._run, name=task.name, daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        with self._task.changed:
            self._ended = True
            self._task.changed.notify_all()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        task = self._task
        while True:
            with task.changed:
                while not self._ended and ((left_s := task.due()) is None or left_s > 0):
                    task.changed.wait(left_s)
                if self._ended:
                    return
            try:
                task.turn()
            except BaseException as error:  # noqa: BLE001  # a thread's edge: its owner tells whoever waits
                task.failed(error)


class Inline:
    """No thread: tasks advance only by `turn`. Not thread-safe."""

    @property
    def patience_s(self) -> float:
        return 0.0

    def __init__(self) -> None:
        self._tasks: list[Task] = []

    def start(self, task: Task) -> Worker:
        self._tasks.append(task)
        return _Registered(self._tasks, task)

    def wait(self, changed: threading.Condition, until: Callable[[], bool], timeout_s: float) -> bool:
        """What holds now: nothing happens while a single thread waits."""
        with changed:
            return until()

    def ready(self) -> list[str]:
        """Names of the tasks that have something to do now, in the order they were started."""
        return [task.name for task in self._tasks if _left_s(task) == 0]

    def turn(self, name: str | None = None) -> bool:
        """One turn of the task `name`, or of the first that is ready; whether there was something to do."""
        for task in self._tasks:
            if name in (None, task.name) and _left_s(task) == 0:
                task.turn()
                return True
        return False

    def next_s(self) -> float | None:
        """In how many seconds a task is due; None = not before something changes."""
        left_s = [left for task in self._tasks if (left := _left_s(task)) is not None]
        return min(left_s, default=None)


class _Registered:
    def __init__(self, tasks: list[Task], task: Task) -> None:
        self._tasks = tasks
        self._task = task

    def stop(self, timeout_s: float) -> bool:
        self._tasks[:] = [task for task in self._tasks if task is not self._task]
        return True


def _left_s(task: Task) -> float | None:
    with task.changed:
        left_s = task.due()
    return None if left_s is None else max(0.0, left_s)
