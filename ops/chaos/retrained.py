"""The weights recomputed from the plans that a reader saw: they prove what was trained, how often and in which order. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from rollwire.consumers.trainer.sums import NOTHING, fold, state_of
from rollwire.kernels.digest import StateDigest
from rollwire.ops.chaos.verdict import Finding, SeenVersion, Sighting
from rollwire.schemas.records import PackedBatch


def judge_weights(sightings: Iterable[Sighting], *, lineage: str, ranks: int) -> tuple[Finding, ...]:
    """The first version whose digest is not that of an arithmetic trainer which took every plan up to it once."""
    plans: dict[tuple[int, int], PackedBatch] = {}
    versions: dict[int, str] = {}
    for sighting in sightings:
        fact = sighting.fact
        if isinstance(fact, PackedBatch) and fact.lineage == lineage:
            plans.setdefault((fact.step, fact.rank), fact)
        elif isinstance(fact, SeenVersion) and fact.lineage == lineage:
            versions.setdefault(fact.version, fact.state_digest)
    sums = NOTHING
    for version, digest in sorted(versions.items()):
        if version > 0:
            parts = [plans[version, rank] for rank in range(ranks) if (version, rank) in plans]
            if len(parts) < ranks:
                return (Finding("torn", f"version {version} was made of a plan that is not there"),)
            sums = fold(sums, parts)
        expected = StateDigest.of(state_of(sums)).hex
        if digest != expected:
            return (
                Finding("wrong", f"version {version} has the digest {digest}, its plans make {expected}"),
            )
    return ()
