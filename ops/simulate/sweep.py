"""Many seeds on several processes: how many fail, which first, and whether every place to die was died at."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing import get_context
from typing import Final, NamedTuple

from rollwire.ops.figures import Figure
from rollwire.ops.simulate.points import POINTS
from rollwire.ops.simulate.run import REAL, Bench, Outcome, run_seed
from rollwire.ops.simulate.world import Point

_SLICE: Final = 20  # seeds of one task


class Tally(NamedTuple):
    """What many seeds came to."""

    seeds: int
    failures: tuple[Outcome, ...]  # by seed
    effects_min: int
    effects: int
    deaths: Counter[Point]
    versions: int

    @property
    def missed(self) -> list[Point]:
        """Known places where no process died."""
        return [point for point in POINTS if not self.deaths[point]]

    @property
    def unknown(self) -> list[Point]:
        """Places that the list of known ones lacks."""
        return sorted(self.deaths.keys() - set(POINTS))

    def figures(self) -> list[Figure]:
        return [
            Figure(name="simulate.seeds", value=self.seeds, unit="seeds"),
            Figure(name="simulate.failures", value=len(self.failures), unit="seeds"),
            Figure(name="simulate.effects_min", value=self.effects_min, unit="effects"),
            Figure(
                name="simulate.crash_points",
                value=len(POINTS) - len(self.missed),
                unit="points",
                baseline=len(POINTS),
            ),
        ]


def sweep(first: int, seeds: int, *, jobs: int, told: Callable[[int, list[Outcome]], None]) -> Tally:
    """Runs seeds `first` to `first + seeds - 1`; `told` hears now and then how many are done and which failed since."""
    # The first one here: what is compiled when it is first used is then found on disk by all.
    outcomes = _run(range(first, first + 1))
    told(1, [outcome for outcome in outcomes if outcome.failure])
    with ProcessPoolExecutor(
        jobs, mp_context=get_context("spawn"), initializer=_end_with, initargs=(os.getpid(),)
    ) as pool:
        running: set[Future[list[Outcome]]] = set()
        for span in _slices(first + 1, seeds - 1):
            running.add(pool.submit(_run, span))
            if len(running) == 2 * jobs:
                running = _collect(running, outcomes, told)
        while running:
            running = _collect(running, outcomes, told)
    return tally(outcomes)


def search(first: int, seeds: int, bench: Bench = REAL) -> Iterator[Outcome]:
    """The same in this process, seed by seed."""
    for seed in range(first, first + seeds):
        yield run_seed(seed, bench)


def tally(outcomes: list[Outcome]) -> Tally:
    deaths: Counter[Point] = Counter()
    for outcome in outcomes:
        deaths.update(outcome.deaths)
    return Tally(
        seeds=len(outcomes),
        failures=tuple(sorted((o for o in outcomes if o.failure is not None), key=lambda o: o.seed)),
        effects_min=min((o.effects for o in outcomes), default=0),
        effects=sum(o.effects for o in outcomes),
        deaths=deaths,
        versions=sum(o.versions for o in outcomes),
    )


def _slices(first: int, seeds: int) -> Iterator[range]:
    for at in range(first, first + seeds, _SLICE):
        yield range(at, min(at + _SLICE, first + seeds))


def _end_with(parent: int) -> None:
    """A process of the pool ends with the one that started it, also where that one was killed."""
    poll = threading.Event()

    def watch() -> None:
        while os.getppid() == parent:
            poll.wait(1.0)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def _run(seeds: range) -> list[Outcome]:
    return [run_seed(seed) for seed in seeds]


def _collect(
    running: set[Future[list[Outcome]]], outcomes: list[Outcome], told: Callable[[int, list[Outcome]], None]
) -> set[Future[list[Outcome]]]:
    """Waits for a task at least; those that still run."""
    done, left = wait(running, return_when=FIRST_COMPLETED)
    came = [outcome for future in done for outcome in future.result()]
    # A seed that passed is told in short: ten thousand histories are of no use.
    outcomes += [outcome if outcome.failure else outcome._replace(last=()) for outcome in came]
    told(len(outcomes), [outcome for outcome in came if outcome.failure])
    return left
