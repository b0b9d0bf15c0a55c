"""Rebuilding what the simulation trained: crashes, lost answers, reverts and live traffic on the way, and its plans forgotten."""

from __future__ import annotations

from contextlib import closing

import pytest

from rollwire.consumers.audit.rebuild_deltas import DeltaRebuild
from rollwire.consumers.audit.rebuild_past import Past, read_past
from rollwire.consumers.audit.rebuild_run import by_deltas, by_training, wanted
from rollwire.consumers.audit.rebuild_training import TrainingRebuild
from rollwire.ops.rebuilding import deriving, learner_of
from rollwire.ops.replay.simulated import simulated, spoken_of
from rollwire.ops.simulate.run import Simulation
from rollwire.ops.simulate.workload import LINEAGE
from rollwire.streams.findings import Kind, Report
from rollwire.streams.replay.settings import Spoken
from rollwire.streams.seams.log import Log, TopicPartition
from rollwire.streams.seams.log_memory import MemoryLog
from rollwire.streams.synthetic import PeoplesKeys

# Of seeds 0 to 60 among those with the most plans: two ranks (48), live traffic (19), reverts and two ranks (2).
SEEDS = (48, 19, 2)


def forgotten(log: MemoryLog) -> MemoryLog:
    """The log as retention leaves it: without groups and plans."""
    made = MemoryLog({p.topic: log.partitions(p.topic) for p in log._partitions})
    for place, at in log._partitions.items():
        into = made._at(place)
        into.begin, into.entries = at.begin, list(at.entries)
        if place.topic in ("groups", "packed-batches"):
            made.trim(place, at.end)
    return made


def trained_again(simulation: Simulation, log: Log, spoken: Spoken | None) -> Report:
    asked = wanted(read_past(log, LINEAGE), None, LINEAGE)
    past = asked.past
    assert past is not None
    over = deriving(log, past, spoken)
    training = TrainingRebuild(
        over,
        past,
        lambda recipe: learner_of(recipe, over, simulation.store, past, connect=None, keys=PeoplesKeys),
        lambda _: None,
    )
    with closing(training):
        return by_training(training, asked, lambda _: None).report


@pytest.mark.parametrize("seed", SEEDS)
def test_every_version_comes_out_whatever_happened_on_the_way(seed: int) -> None:
    simulation = simulated(seed)
    asked = wanted(read_past(simulation.log, LINEAGE), None, LINEAGE)
    past = asked.past
    assert past is not None
    assert past.newest > 2
    with closing(DeltaRebuild(simulation.store, past)) as made:
        deltas = by_deltas(made, asked, lambda _: None).report
    training = trained_again(simulation, simulation.log, None)
    assert (deltas.findings, training.findings) == ((), ())
    assert (
        deltas.digests
        == training.digests
        == {f"version {v}": e.state_digest for v, e in past.versions.items()}
    )

    log = forgotten(simulation.log)
    assert needs(log, past)
    derived = trained_again(simulation, log, spoken_of(simulation.settings))
    assert (derived.findings, derived.digests) == ((), training.digests)
    # Where nothing says by which settings the processors decided, no plan is made up.
    unsaid = trained_again(simulation, log, None)
    to_first = sum(event.reverts_to == 0 for event in past.versions.values())  # by no step that trains
    assert unsaid.results["rebuild.training_equal"] <= to_first
    assert {finding.kind for finding in unsaid.findings} <= {Kind.HISTORY_GAP, Kind.OUTCOME_DIFFERS}
    assert unsaid.findings


def needs(log: MemoryLog, past: Past) -> bool:
    at = TopicPartition("packed-batches", 0)
    return log.beginning_offsets([at])[at] > 0 and deriving(log, past).derives()
