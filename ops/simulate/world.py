"""The simulated world: one seed, one thread, one clock. It decides at every call of a seam what goes wrong.

Before and after each call (an *effect*) the calling process may die, be held up while others run (its copies that replaced
it among them), lose the request or lose the answer; time jumps past deadlines; decided transactions reach topics marker by
marker. All of it is drawn from the seed, so a seed replays the run.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable
from typing import Final, Literal, NamedTuple, TypeVar

import blake3

from rollwire.streams.seams.clock import ManualClock

T = TypeVar("T")
Side = Literal["before", "after"]
SHOWN: Final = 40  # effects that a failure is told with
_DEPTH: Final = 3  # processes that may be held up inside one another
_PAUSES_S: Final = (0.02, 0.1, 0.3, 1.0, 2.0, 9.0, 20.0)


class Point(NamedTuple):
    """A place where a process may die."""

    role: str
    call: str
    side: Side

    def __str__(self) -> str:
        return f"{self.role}.{self.call}.{self.side}"


class Died(BaseException):
    """The process is gone: no handler of it runs on, and what its `finally` blocks ask of a seam does not happen."""


class Violated(BaseException):
    """A law does not hold."""

    def __init__(self, law: str, text: str) -> None:
        super().__init__(f"law {law}: {text}")
        self.law = law
        self.text = text


class Faults(NamedTuple):
    """Probabilities at each point, drawn anew for each seed: some seeds kill a lot, others only delay."""

    die: float
    lose: float
    pause: float
    jump: float
    hold: float  # that a marker on its way stays there for another turn
    target: Point | None  # where a process dies for sure, or stands still for long,
    target_hit: int  # the n-th time that it comes by
    target_pauses: bool

    @classmethod
    def drawn(cls, rng: random.Random, points: tuple[Point, ...]) -> Faults:
        return cls(
            die=rng.choice((0.0, 0.002, 0.006, 0.015)),
            lose=rng.choice((0.0, 0.003, 0.01)),
            pause=rng.choice((0.0, 0.005, 0.02)),
            jump=rng.choice((0.0, 0.0005, 0.002)),
            hold=rng.choice((0.0, 0.4, 0.8)),
            target=rng.choice(points) if points else None,
            target_hit=rng.randrange(4),
            target_pauses=rng.random() < 0.4,
        )


class Process:
    """One life of a role. What it holds in memory dies with it; its calls of seams come with it as the caller."""

    __slots__ = ("alive", "busy", "name", "role")

    def __init__(self, role: str, name: str) -> None:
        self.role = role
        self.name = name
        self.alive = True
        self.busy = False  # inside one of its turns

    def __str__(self) -> str:
        return self.name


class World:
    def __init__(self, seed: int, points: tuple[Point, ...]) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.clock = ManualClock()
        self.faults = Faults.drawn(self.rng, points)
        self.healed = False
        self.effects = 0
        self.deaths: Counter[Point] = Counter()
        self.passed: Counter[Point] = Counter()
        self.last: deque[str] = deque(maxlen=SHOWN)
        self.trace: Callable[[str], None] | None = None  # every effect, for a replay
        self.others: Callable[[Process, int], None] = lambda _process, _turns: None  # runs other processes
        self.current: Process | None = None
        self._depth = 0
        self._hasher = blake3.blake3()

    # -- a call of a seam ---------------------------------------------------------------------------------------

    def effect(
        self,
        process: Process,
        call: str,
        act: Callable[[], T],
        lost: Callable[[str], Exception],
        *,
        late: Callable[[], None] | None = None,
    ) -> T:
        """Makes the call of `process`, or not, or makes it and loses the answer: then `lost` says what is raised.

        `late`: called where the request was lost, in case that it only was on its way for long.
        """
        self.effects += 1
        if self.point(process, call, "before"):
            if late is not None:
                late()
            raise lost(f"{call}: the request was lost")
        before, self.current = self.current, process
        try:
            result = act()
        finally:
            self.current = before
        if self.point(process, call, "after"):
            raise lost(f"{call}: the answer was lost")
        return result

    def point(self, process: Process, call: str, side: Side) -> bool:
        """A place where `process` may die or be held up; True = the message that is due here is lost."""
        if not process.alive:
            raise Died
        point = Point(process.role, call, side)
        self.note(f"{process.name} {call} {side}")
        self.passed[point] += 1
        if self.healed:
            return False
        faults, draw = self.faults, self.rng.random()
        self.clock.advance(0.0002 + draw / 500)
        hit = point == faults.target and self._hit()
        if hit and faults.target_pauses:
            self._pause(process, self.rng.randint(20, 60))
            return False
        if hit or draw < faults.die:
            self._die(process, point)
        draw -= faults.die
        if draw < faults.lose:
            self.note("  lost")
            return True
        draw -= faults.lose
        if draw < faults.pause:
            self._pause(process, self.rng.randint(1, 8))
        elif draw - faults.pause < faults.jump:
            self.clock.advance(self.rng.choice((3.0, 12.0, 70.0)))
            self.note(f"  time jumps to {self.clock.now_us()}")
        return False

    def note(self, text: str) -> None:
        """Into the history, whose digest tells whether two runs of a seed were the same."""
        self._hasher.update(text.encode())
        self.last.append(text)
        if self.trace is not None:
            self.trace(text)

    @property
    def digest(self) -> str:
        return self._hasher.hexdigest()

    def kill(self, process: Process) -> None:
        """From outside, between two of its calls."""
        process.alive = False
        self.note(f"{process.name} is killed")

    # -- inside -------------------------------------------------------------------------------------------------

    def _hit(self) -> bool:
        left = self.faults.target_hit
        self.faults = self.faults._replace(
            target_hit=left - 1, target=None if left == 0 else self.faults.target
        )
        return left == 0

    def _die(self, process: Process, point: Point) -> None:
        self.deaths[point] += 1
        process.alive = False
        self.note(f"  {process.name} dies")
        raise Died

    def _pause(self, process: Process, turns: int) -> None:
        """The process stands still while time passes and others go on; it may find itself replaced."""
        if self._depth >= _DEPTH:
            return
        self._depth += 1
        self.clock.advance(self.rng.choice(_PAUSES_S))
        self.note(f"  {process.name} stands still")
        before, self.current = self.current, None
        try:
            self.others(process, turns)
        finally:
            self.current = before
            self._depth -= 1
        self.note(f"  {process.name} goes on")
        if not process.alive:
            raise Died
