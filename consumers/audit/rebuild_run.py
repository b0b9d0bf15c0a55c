"""A rebuild as an audit reports it: the versions that are asked for, by one of the two ways, and what came of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Literal, NamedTuple

from rollwire.consumers.audit.beginnings import versions_gone
from rollwire.consumers.audit.rebuild_deltas import DeltaRebuild
from rollwire.consumers.audit.rebuild_past import Past, ReadPast
from rollwire.consumers.audit.rebuild_training import ByTraining, TrainingRebuild
from rollwire.kernels.tensors import State
from rollwire.streams.findings import Finding, Kind, Report

Via = Literal["deltas", "training"]
Told = Callable[[int], None]
"""Of each version that is done."""


class Wanted(NamedTuple):
    past: Past | None
    versions: tuple[int, ...]  # of those that are asked for, what is published
    findings: tuple[Finding, ...]  # of the others, and of the history
    records: int


def wanted(read: ReadPast, version: int | None, lineage: str | None) -> Wanted:
    """`version` None: every one."""
    past, findings = read.past, list(read.findings)
    versions: tuple[int, ...] = ()
    if past is not None:
        versions = tuple(past.versions) if version is None else (version,) if version in past.versions else ()
    if not versions:
        what = "any version" if version is None else f"version {version}"
        of = lineage or (past.lineage if past is not None else "any lineage")
        known = "none" if past is None else f"{min(past.versions)} to {past.newest}"
        findings.append(
            Finding(
                kind=Kind.HISTORY_GAP if versions_gone(findings) else Kind.VERSION_UNKNOWN,
                where=what,
                detail=f"weight-versions has no such version of {of}; known are {known}",
            )
        )
    return Wanted(past, versions, tuple(findings), read.records)


class Outcome(NamedTuple):
    report: Report
    state: State | None  # of the last version, where it came out as published


def by_deltas(made: DeltaRebuild, asked: Wanted, told: Told) -> Outcome:
    """Raises `StoreUnavailable`."""
    findings, notes = list(asked.findings), list[str]()
    digests: dict[str, str] = {}
    state: State | None = None
    equal = 0
    for one in made.versions(asked.versions):
        findings += one.findings
        if one.digest is not None:
            digests[f"version {one.event.version}"] = one.digest
            equal += 1
        if one.findings and one.digest is not None:
            notes.append(
                f"version {one.event.version} came out as published all the same, by {_shown([str(s) for s in one.way])}"
            )
        told(one.event.version)
        state = made.state if one.digest is not None else None
    checked = {
        "records": asked.records,
        "versions": len(asked.versions),
        "versions equal": equal,
        "bytes read": made.read_bytes,
    }
    results = {"rebuild.deltas_equal": float(equal), "rebuild.versions": float(len(asked.versions))}
    return Outcome(_report(findings, checked, notes, digests, results), state)


def by_training(made: TrainingRebuild, asked: Wanted, told: Told) -> Outcome:
    """Raises as `TrainingRebuild.versions`."""
    findings, notes = list(asked.findings), list[str]()
    digests: dict[str, str] = {}
    past, reached = asked.past, list[ByTraining]()
    state: State | None = None
    for one in made.versions(asked.versions):
        findings += one.findings
        notes += one.notes
        reached.append(one)
        if one.equal and past is not None:
            digests[f"version {one.version}"] = past.versions[one.version].state_digest
        told(one.version)
    if reached and reached[-1].equal:
        state = made.state
    notes += _not_reached(reached)
    trained = sum(one.equal and one.trained for one in reached)
    checked = {
        "records": asked.records,
        "versions": len(asked.versions),
        "versions equal": sum(one.equal for one in reached),
        "trained again": trained,
    }
    results = {
        "rebuild.training_equal": float(trained),
        "rebuild.versions": float(sum(version > 0 for version in asked.versions)),
    }
    return Outcome(_report(findings, checked, notes, digests, results), state)


def _not_reached(reached: Sequence[ByTraining]) -> list[str]:
    notes: list[str] = []
    for behind, some in groupby(reached, key=lambda one: one.behind):
        numbers = [one.version for one in some]
        if behind is not None:
            notes.append(f"not reached, since they follow from version {behind}: {_spans(numbers)}")
    return notes


def _spans(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return str(numbers[0])
    return f"{numbers[0]} to {numbers[-1]}"


def _shown(steps: Sequence[str]) -> str:
    return ", ".join(steps if len(steps) < 8 else (*steps[:2], "...", *steps[-2:]))


def _report(
    findings: Iterable[Finding],
    checked: dict[str, int],
    notes: Sequence[str],
    digests: dict[str, str],
    results: dict[str, float],
) -> Report:
    return Report(
        command="rebuild",
        findings=tuple(findings),
        checked=checked,
        notes=tuple(notes),
        digests=digests,
        results=results,
    )
