"""Histories that the simulation writes, for replays: full of crashes and reverts, made from a seed alone, in any process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import BaseModel

from rollwire.ops.simulate.rest import topics
from rollwire.ops.simulate.run import Settings, Simulation
from rollwire.ops.simulate.workload import LINEAGE, MODEL
from rollwire.streams.replay.settings import Spoken
from rollwire.streams.replay.shares import Logs
from rollwire.streams.seams.log_memory import MemoryLog
from rollwire.streams.settings_notice import told_of


@cache
def simulated(seed: int) -> Simulation:
    """A seed, run to its end."""
    simulation = Simulation(seed)
    simulation.run()
    return simulation


def spoken_of(settings: Settings, changes: Mapping[str, Any] | None = None) -> Spoken:
    """What the processors of a seed decided by, as they would say it in a log, and what of it a replay changes."""
    said: list[tuple[str, str, BaseModel | None]] = [
        ("assemble", "assemble", settings.assemble),
        ("assemble-production", "production", settings.production),
        ("pack", "pack", settings.pack),
    ]
    told = [
        told_of(name, {section: config}, lineage=LINEAGE, code="", at_us=0)
        for name, section, config in said
        if config is not None
    ]
    return Spoken([(one, MODEL) for one in told], changes)


def empty_like(settings: Settings) -> MemoryLog:
    """A log with the topics of a seed."""
    return MemoryLog(topics(settings.joined, settings.limits.ranks))


@cache
def _shadow(seed: int, run: int) -> MemoryLog:
    return empty_like(simulated(seed).settings)


@dataclass(frozen=True, slots=True)
class SimulatedLogs:
    """A history and its shadow, which each process has for itself: one stage of a replay reads no other's here."""

    seed: int
    run: int = 0  # a replay begins with an empty shadow: each has its own number

    @contextmanager
    def __call__(self) -> Iterator[Logs]:
        yield Logs(simulated(self.seed).log, _shadow(self.seed, self.run))
