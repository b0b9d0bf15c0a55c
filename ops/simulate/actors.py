"""The processes of the simulation: each is made anew after its death, and may be replaced while it still goes on.

An actor is what a supervisor keeps running. A life is one process of it: the real session of the role over the seams of
this process. A copy that was replaced (its machine only stood still) goes on with its old session until it is fenced.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Final, Protocol

from rollwire.ops.simulate.log import ProcessLog, SimulatedLog
from rollwire.ops.simulate.store import ProcessStore
from rollwire.ops.simulate.workload import Planned
from rollwire.ops.simulate.world import Died, Process, Violated, World
from rollwire.schemas.errors import (
    DeadlineExceeded,
    Fenced,
    LogUnavailable,
    RollwireError,
    StoreUnavailable,
    TransactionUnknown,
)
from rollwire.streams.seams.log import Log
from rollwire.streams.seams.store import ObjectStore

_MENDED: Final = (TransactionUnknown, LogUnavailable, DeadlineExceeded, StoreUnavailable)
_COPIES: Final = 2  # replaced lives that go on
ENDED: Final = object()  # what the turn of a life returns that has done its work


class Life(Protocol):
    """One process: made = it took over."""

    def turn(self) -> object: ...

    def close(self) -> None: ...


Make = Callable[[Log, ObjectStore, str], Life]  # the last: the process's name


class _Running:
    """One session. `name`: of the operating system's process, which may go on with another session after an error."""

    def __init__(self, process: Process, name: str) -> None:
        self.process = process
        self.name = name
        self.life: Life | None = None


class Actor:
    """Keeps one role running. `turn` runs the current life one turn, or starts one."""

    def __init__(
        self, world: World, log: SimulatedLog, store: ObjectStore, role: str, name: str, make: Make
    ) -> None:
        self.world = world
        self.role = role
        self.name = name
        self._log = log
        self._store = store
        self._make = make
        self._lives = 0
        self._goes_on: str | None = None  # the process that makes the next session
        self._current: _Running | None = None
        self._copies: list[_Running] = []

    @property
    def busy(self) -> bool:
        return self._current is not None and self._current.process.busy

    @property
    def life(self) -> Life | None:
        return None if self._current is None else self._current.life

    @property
    def copies(self) -> int:
        return len(self._copies)

    def turn(self) -> None:
        """What the supervisor's process does next; where it stands still in a call, nothing."""
        running = self._current
        if running is None:
            self._lives += 1
            process = Process(self.role, f"{self.name}#{self._lives}")
            running = self._current = _Running(process, self._goes_on or process.name)
            self._goes_on = None
        if not running.process.busy and not self._run(running) and self._current is running:
            self._current = None

    def turn_copy(self, which: int) -> None:
        """A replaced life goes on."""
        running = self._copies[which % len(self._copies)]
        if not running.process.busy and not self._run(running) and running in self._copies:
            self._copies.remove(running)

    def replace(self) -> None:
        """The supervisor takes the life for dead and starts another one; the old one knows nothing of it."""
        running = self._current
        if running is not None and len(self._copies) < _COPIES:
            self.world.note(f"{running.process.name} is replaced")
            self._copies.append(running)
            self._current = None

    def kill(self) -> None:
        running = self._current
        if running is not None:
            self.world.kill(running.process)
            self._current = None

    def _run(self, running: _Running) -> bool:
        """Whether the life goes on."""
        process = running.process
        process.busy = True
        try:
            if running.life is None:
                log = ProcessLog(self.world, self._log, process)
                running.life = self._make(log, ProcessStore(self.world, self._store, process), running.name)
            elif running.life.turn() is ENDED:
                self.world.note(f"{process.name} has done its work")
                running.life.close()
                process.alive = False
                return False
        except Died:
            return False
        except _MENDED as failure:
            self.world.note(f"{process.name} gives up: {type(failure).__name__}")
            if self._current is running:
                self._goes_on = running.name
        except Fenced:
            self.world.note(f"{process.name} is fenced")
        except RollwireError as failure:
            if self._current is running:
                raise Violated(
                    "7", f"{process.name} halted: {type(failure).__name__}: {failure}"
                ) from failure
            self.world.note(
                f"{process.name} halts: {type(failure).__name__}"
            )  # it was replaced, and may be out of date
        else:
            return True
        finally:
            process.busy = False
        try:
            if running.life is not None:
                running.life.close()
        except Died:
            pass
        process.alive = False
        return False


class Errand(Actor):
    """A command that somebody runs now and then: one life a time, which ends with its work or with whatever stops it."""

    asked = False

    def ask(self) -> None:
        self.asked = True

    def turn(self) -> None:
        if self._current is None:
            if not self.asked:
                return
            self.asked = False
        super().turn()


class Producers:
    """What writes the first events: whatever is due, again and again until it was acknowledged (so: sometimes twice)."""

    def __init__(self, world: World, log: SimulatedLog) -> None:
        self.world = world
        self._log = log
        self._due: list[Planned] = []
        self._lives = 0
        self._process = Process("producer", "producer#0")

    @property
    def left(self) -> int:
        return len(self._due)

    @property
    def next_us(self) -> int | None:
        return self._due[0].at_us if self._due else None

    def add(self, planned: list[Planned]) -> None:
        for one in planned:
            heapq.heappush(self._due, one)

    def turn(self) -> None:
        """Writes what is due, as one request or several."""
        if self._process.busy:
            return
        now_us, rng = self.world.clock.now_us(), self.world.rng
        batch: list[Planned] = []
        while self._due and self._due[0].at_us <= now_us and len(batch) < 16:
            batch.append(heapq.heappop(self._due))
        if not batch:
            return
        rng.shuffle(batch)
        if not self._process.alive:
            self._lives += 1
            self._process = Process("producer", f"producer#{self._lives}")
        self._process.busy = True
        try:
            writer = ProcessLog(self.world, self._log, self._process).writer()
            writer.write([planned.record for planned in batch])
        except (Died, LogUnavailable):
            self.add(
                [one._replace(at_us=now_us) for one in batch]
            )  # whoever samples keeps it until it is acknowledged
        finally:
            self._process.busy = False
