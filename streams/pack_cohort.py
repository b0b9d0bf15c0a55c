"""The cohort of a step: its answers of live traffic, compared with one another. Pure.

One answer a prompt has nobody of its own to be compared with, so the baseline is the mean of the *others* of its cohort that were
scored (leave-one-out; RLOO, Ahmadian et al. 2024). What nobody said anything about is part of the cohort, but not trained on; and
how much of each outcome class that is, is judged first. A class that earns no signal teaches by its absence: real deployments
learnt to end in one (C78). Below the floor nothing is trained on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from rollwire.kernels.advantages import group_advantages
from rollwire.schemas.errors import Refused
from rollwire.schemas.records import Coverage, Group, Notice


class CohortConfig(BaseModel):
    """Live traffic in step plans: how much of it, how fresh, and how well covered by feedback."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    production_share: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="share of groups_per_step that are answers of live traffic, rounded to whole groups; 0: none, 1: only",
    )
    max_age_s: float = Field(
        default=14_400.0,
        gt=0,
        description="how old an answer may be when its step is planned, since its group was opened; more than the window of "
        "its feedback, and besides max_lag_versions",
    )
    coverage_floor: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description="share of a cohort's answers that must have a signal, or a stated rule for silence: of each outcome class "
        "and of all together; below it nothing of the cohort is trained on",
    )
    coverage_min_rollouts: int = Field(
        default=3,
        ge=1,
        description="outcome classes of fewer answers in a cohort are judged together, and if they are still fewer, only among all",
    )
    equal_rewards: Literal["filter", "keep"] = Field(
        default="filter",
        description="a cohort whose rewards are all equal teaches nothing: filter it, or keep it with advantages of 0",
    )
    max_waiting: int = Field(
        default=512,
        ge=1,
        description="answers that wait at most: live traffic cannot be held back, so beyond it the oldest give way",
    )
    max_wait_s: float = Field(
        default=300.0,
        ge=0,
        description="in a mix: how long a whole plan of one kind waits for the other kind before it is made alone",
    )

    def live_of(self, groups_per_step: int) -> int:
        """Answers of live traffic in one plan; halves are rounded up."""
        return math.floor(self.production_share * groups_per_step + 0.5)


class Cohort(NamedTuple):
    """`groups` with their advantages; `mean` over the scored ones."""

    groups: tuple[Group, ...]
    coverage: tuple[Coverage, ...]
    mean: float
    max_age_ms: int

    @property
    def size(self) -> int:
        return sum(row.rollouts for row in self.coverage)


class Spoilt(NamedTuple):
    """Why nothing of a cohort is trained on."""

    fate: Literal["filtered", "dropped"]
    reason: Literal["coverage", "equal_rewards", "unscorable", "not_finite"]
    detail: str
    coverage: tuple[Coverage, ...]
    bare: str  # the outcome classes below the floor


def judge_cohort(groups: Sequence[Group], config: CohortConfig) -> Cohort | Spoilt:
    """Advantages of production groups that are planned together: reward minus the mean of the other scored rewards."""
    members = [member for group in groups for member in group.members]
    coverage = coverage_of(groups)
    bare = below_floor(coverage, config.coverage_floor, config.coverage_min_rollouts)
    if bare:
        return Spoilt(
            "dropped",
            "coverage",
            f"too few have a signal, demanded is {config.coverage_floor:g}: {'; '.join(bare)}",
            coverage,
            "; ".join(bare),
        )
    try:
        result = group_advantages([member.reward for member in members], "leave_one_out")
    except Refused as refused:
        return Spoilt("dropped", "not_finite", refused.detail, coverage, "")
    scored = f"{result.scored} of {len(members)} answers of the cohort scored"
    if result.scored < 2 or result.mean is None:
        return Spoilt("dropped", "unscorable", scored, coverage, "")
    if result.no_signal is not None and config.equal_rewards == "filter":
        return Spoilt("filtered", "equal_rewards", scored, coverage, "")
    advantages = iter(result.advantages)
    judged = tuple(
        msgspec.structs.replace(
            group,
            members=tuple(msgspec.structs.replace(m, advantage=next(advantages)) for m in group.members),
        )
        for group in groups
    )
    return Cohort(judged, coverage, result.mean, round(config.max_age_s * 1e3))


def coverage_notice(
    spoilt: Spoilt, *, model: str, for_version: int, config: CohortConfig, at_us: int
) -> Notice:
    """Says why a cohort is not trained on: which outcome classes lack signals, and how many."""
    attributes = {
        "below_floor": spoilt.bare,
        "coverage_floor": f"{config.coverage_floor:g}",
        "for_version": str(for_version),
        "rollouts": str(sum(row.rollouts for row in spoilt.coverage)),
        "signalled": str(sum(row.signalled for row in spoilt.coverage)),
    }
    for row in spoilt.coverage:
        name = row.outcome or "not said"
        attributes[f"outcome.{name}"] = (
            f"{row.signalled} of {row.rollouts} with a signal, {row.scored} scored"
        )
    return Notice(
        model=model,
        name="coverage",
        severity="alarm",
        text=f"A cohort for version {for_version} is not trained on: {spoilt.detail}",
        attributes=attributes,
        at_us=at_us,
    )


def coverage_of(groups: Sequence[Group]) -> tuple[Coverage, ...]:
    """By outcome class, ascending. Silence is a counted state of each."""
    counts: dict[str, list[int]] = {}
    for group in groups:
        for member in group.members:
            row = counts.setdefault(member.rollout.outcome, [0, 0, 0])
            row[0] += 1
            row[1] += member.signals > 0
            row[2] += member.reward is not None
    return tuple(
        Coverage(outcome=outcome, rollouts=rollouts, signalled=signalled, scored=scored)
        for outcome, (rollouts, signalled, scored) in sorted(counts.items())
    )


def below_floor(coverage: Sequence[Coverage], floor: float, least: int) -> list[str]:
    """What is covered too little, in words; none = nothing is. Covered is a class as far as its answers have signals, or
    rewards: where a rule scores silence, somebody has said what it is worth."""
    large = [row for row in coverage if row.rollouts >= least]
    small = [row for row in coverage if row.rollouts < least]
    judged: list[tuple[str, tuple[Coverage, ...]]] = [(row.outcome or "not said", (row,)) for row in large]
    if sum(row.rollouts for row in small) >= least:
        judged.append((" and ".join(row.outcome or "not said" for row in small), tuple(small)))
    judged.append(("all", tuple(coverage)))
    found = []
    for name, rows in judged:
        rollouts = sum(row.rollouts for row in rows)
        covered = sum(max(row.signalled, row.scored) for row in rows)
        if covered / rollouts < floor:
            found.append(f"{name} {covered}/{rollouts}")
    return found
