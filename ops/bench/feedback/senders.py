"""Load generators as processes of their own: connected and prepared before the word to go, their outcomes behind it."""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection as Pipe
from multiprocessing.context import SpawnContext, SpawnProcess
from types import TracebackType
from typing import Final, Self

from rollwire.ops.bench.feedback.generator import Generator, Outcome, Plan
from rollwire.schemas.errors import DeadlineExceeded

CONTEXT: Final[SpawnContext] = multiprocessing.get_context("spawn")
_READY_S: Final = 60.0
_GRACE_S: Final = 60.0
_HELD_S: Final = 300.0
_STOP_S: Final = 5.0
_READY: Final = "ready"


def _process(plan: Plan, pipe: Pipe) -> None:
    import uvloop

    async def work() -> None:
        generator = Generator(plan)
        await generator.connect()
        pipe.send(_READY)
        if await asyncio.to_thread(pipe.poll, _HELD_S):
            pipe.recv()
            pipe.send(await generator.run())

    uvloop.run(work())


class Senders:
    """A context that leaves no process behind."""

    def __init__(self, plans: Sequence[Plan]) -> None:
        self._plans = plans
        self._running: list[tuple[SpawnProcess, Pipe]] = []

    def __enter__(self) -> Self:
        try:
            for plan in self._plans:
                ours, theirs = CONTEXT.Pipe()
                process = CONTEXT.Process(target=_process, args=(plan, theirs), daemon=True)
                process.start()
                theirs.close()
                self._running.append((process, ours))
            for _, pipe in self._running:
                self._receive(pipe, _READY_S)
        except BaseException:
            self._end()
            raise
        return self

    def go(self) -> None:
        for _, pipe in self._running:
            pipe.send("go")

    def outcomes(self) -> list[Outcome]:
        """Of all, in order. Raises `DeadlineExceeded` where one has died, or goes on long after its time."""
        found: list[Outcome] = []
        for (_, pipe), plan in zip(self._running, self._plans, strict=True):
            most_s = sum(rate.seconds for rate in plan.rates) + plan.patience_s + plan.answer_s + _GRACE_S
            got = self._receive(pipe, most_s)
            if isinstance(got, Outcome):
                found.append(got)
        return found

    def wait(self, seconds: float) -> bool:
        """Whether every outcome is there to be taken, after so long at most."""
        deadline_s = time.monotonic() + seconds
        return all(pipe.poll(max(0.0, deadline_s - time.monotonic())) for _, pipe in self._running)

    def _receive(self, pipe: Pipe, seconds: float) -> object:
        try:
            if pipe.poll(seconds):
                return pipe.recv()
        except EOFError:
            raise DeadlineExceeded("a load generator died: see what it wrote to standard error") from None
        raise DeadlineExceeded(f"a load generator said nothing for {seconds:g} s")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _end(self) -> None:
        for process, pipe in self._running:
            pipe.close()
            process.join(_STOP_S if not process.is_alive() else 0.5)
            if process.is_alive():
                process.kill()
                process.join(_STOP_S)


def send(plans: Sequence[Plan]) -> list[Outcome]:
    """Runs generators from start to end."""
    with Senders(plans) as senders:
        senders.go()
        return senders.outcomes()
