"""Folds the events of a feedback run into what it is judged by. Reads the topics alone; the crowd's likes are told by nobody,
so they are found by opening what was answered and asking the preference again."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np

from rollwire.ops.demo.feedback.preference import likes
from rollwire.producers.environments.countdown import END_ID, Countdown
from rollwire.schemas.errors import Erased
from rollwire.schemas.records import (
    Coverage,
    DeadLetter,
    Event,
    Feedback,
    FleetStatus,
    GroupFate,
    PackedBatch,
    ProductionRollout,
    Reward,
    TrainStep,
    WeightVersion,
)
from rollwire.streams.seams.keys import KeyStore
from rollwire.streams.seams.sealing import open_field

TOPICS: Final = (
    "production-rollouts",
    "user-feedback",
    "rewards",
    "packed-batches",
    "train-steps",
    "weight-versions",
    "fleet-status",
    "group-fates",
    "dead-letters",
)
_COUNTDOWN: Final = Countdown()


class Answered(NamedTuple):
    """One answer that was given."""

    started_us: int
    version: int  # the oldest that sampled it
    liked: bool
    outcome: str


@dataclass(frozen=True, slots=True)
class FeedbackFacts:
    """What a run came to. `None` = the topics do not say."""

    answers: int
    likes_before: float | None  # share of the first answers
    likes_after: float | None  # of the last ones
    likes_of: int  # how many answers are each of the two
    before_versions: tuple[int, int]  # that gave them, from and to
    after_versions: tuple[int, int]
    clicks: int  # distinct feedback events
    clicked: int  # answers with at least one
    unrewarded: int  # answers without their reward
    rewarded_twice: int
    cycle_s: tuple[float, ...]  # of each click that was trained on, ascending
    coverage: Mapping[
        str, tuple[int, int]
    ]  # outcome class -> (answers, those with a signal), of what was trained on
    final_version: int
    versions: int
    version_holes: int
    served_versions: int  # that answered people
    serving_digest_equal: bool
    trained_lag_max: int
    trained: int  # answers
    fates: Mapping[tuple[str, str], int]
    unaccounted: int  # feedback that is neither behind a reward nor refused
    refused: Mapping[str, int]  # feedback that attribution refused, by reason

    @property
    def gain(self) -> float | None:
        if self.likes_before is None or self.likes_after is None:
            return None
        return self.likes_after - self.likes_before

    @property
    def covered(self) -> float | None:
        """Share of the answers trained on, or left out for want of a reward, that somebody said something about."""
        rollouts = sum(n for n, _ in self.coverage.values())
        return sum(signalled for _, signalled in self.coverage.values()) / rollouts if rollouts else None

    def cycle(self, quantile: float) -> float | None:
        """Seconds from a click to a served version that was trained on it."""
        if not self.cycle_s:
            return None
        return self.cycle_s[min(len(self.cycle_s) - 1, int(quantile * len(self.cycle_s)))]


@dataclass(slots=True)
class FeedbackTally:
    """Feed it the run's events, in any order; ask at any time."""

    keys: KeyStore
    lineage: str
    replica: str
    answers: dict[str, Answered] = field(default_factory=dict)
    clicks: set[tuple[str, str]] = field(default_factory=set)
    first_click_us: dict[str, int] = field(default_factory=dict)
    rewards: Counter[str] = field(default_factory=Counter)
    steps: dict[int, TrainStep] = field(default_factory=dict)
    versions: dict[int, WeightVersion] = field(default_factory=dict)
    repeats: int = 0
    trained_at: dict[str, int] = field(default_factory=dict)  # answer -> step
    swaps: list[tuple[int, int]] = field(default_factory=list)  # (when, version) of the replica
    served: FleetStatus | None = None
    fates: Counter[tuple[str, str]] = field(default_factory=Counter)
    evidence: set[tuple[str, str]] = field(default_factory=set)  # (answer, feedback id) behind rewards
    refused: dict[tuple[int, int], str] = field(default_factory=dict)  # feedback in dead letters: its reason

    def add(self, event: Event) -> None:
        match event:
            case ProductionRollout():
                self._answer(event)
            case Feedback():
                self.clicks.add((event.tenant, event.feedback_id))
                first = self.first_click_us.get(event.rollout_id, event.received_us)
                self.first_click_us[event.rollout_id] = min(first, event.received_us)
            case Reward() if event.source == "user":
                self.rewards[event.rollout_id] += 1
                self.evidence.update((event.rollout_id, one) for one in event.evidence)
            case PackedBatch() if event.lineage == self.lineage:
                for micro in event.microbatches:
                    self.trained_at.update(dict.fromkeys(micro.rollout_ids, event.step))
            case TrainStep() if event.lineage == self.lineage:
                self.repeats += event.step in self.steps
                self.steps[event.step] = event
            case WeightVersion() if event.lineage == self.lineage:
                self.repeats += event.version in self.versions
                self.versions[event.version] = event
            case FleetStatus() if event.replica == self.replica and event.state in ("swapped", "stopped"):
                self.served = event
                if event.state == "swapped":
                    self.swaps.append((event.at_us, event.version))
            case DeadLetter() if event.source.topic == "user-feedback":
                self.refused[(event.source.partition, event.source.offset)] = event.reason
            case GroupFate():
                self.fates[(event.fate, event.reason)] += 1
            case _:
                pass

    def _answer(self, event: ProductionRollout) -> None:
        if event.rollout_id in self.answers or event.sealed is None:
            return
        try:
            plain = open_field(self.keys, event.sealed, event.rollout_id, "token_ids", event.token_ids)
        except Erased:
            return  # nobody can tell any more whether it was liked
        tokens_T = np.frombuffer(plain, "<u4").astype(np.int64)
        asked = event.segments[0].end
        numbers = [int(n) for n in _COUNTDOWN.decode(tokens_T[:asked]).partition("=")[0].split()]
        said = tokens_T[asked:]
        complete = said.size > 0 and int(said[-1]) == END_ID
        liked = complete and likes(numbers, _COUNTDOWN.decode(said[:-1]))
        self.answers[event.rollout_id] = Answered(
            event.started_us, event.spans[0].version, liked, event.outcome
        )

    def recent_likes(self, count: int) -> float | None:
        """Share among the last answers that were read."""
        last = list(self.answers.values())[-count:]
        return share(last) if last else None

    def coverage(self) -> dict[str, tuple[int, int]]:
        found: dict[str, tuple[int, int]] = {}
        for step in self.steps.values():
            for one in step.coverage:
                found[one.outcome] = _sum(found.get(one.outcome, (0, 0)), one)
        return dict(sorted(found.items()))

    def cycles_s(self) -> list[float]:
        """From the first click on an answer (as the gateway's clock says) to the swap to a version trained on it, ascending."""
        swaps = sorted(self.swaps)
        served_us: dict[int, int] = {}  # step -> when a version of it or a later one was served
        cycles: list[float] = []
        for rollout_id, step in self.trained_at.items():
            clicked_us = self.first_click_us.get(rollout_id)
            if clicked_us is None or step not in self.steps:
                continue
            if step not in served_us:
                served_us[step] = next((at for at, version in swaps if version >= step), -1)
            if served_us[step] >= 0:
                cycles.append((served_us[step] - clicked_us) / 1e6)
        return sorted(cycles)

    def facts(self, likes_of: int) -> FeedbackFacts:
        """`likes_of`: how many of the first and of the last answers are compared; at most half of all."""
        ordered = sorted(self.answers.values())
        count = min(likes_of, len(ordered) // 2)
        first, last = ordered[:count], ordered[len(ordered) - count :]
        final = max(self.versions, default=-1)
        served = self.served
        return FeedbackFacts(
            answers=len(ordered),
            likes_before=share(first) if first else None,
            likes_after=share(last) if last else None,
            likes_of=count,
            before_versions=_range(first),
            after_versions=_range(last),
            clicks=len(self.clicks),
            clicked=len(self.first_click_us),
            unrewarded=sum(rollout_id not in self.rewards for rollout_id in self.answers),
            rewarded_twice=sum(n > 1 for n in self.rewards.values()),
            cycle_s=tuple(self.cycles_s()),
            coverage=self.coverage(),
            final_version=final,
            versions=len(self.versions),
            version_holes=final + 1 - len(self.versions) + self.repeats,
            served_versions=len({answer.version for answer in ordered}),
            serving_digest_equal=served is not None
            and served.version == final
            and served.state_digest == self.versions[final].state_digest,
            trained_lag_max=max((step.max_lag for step in self.steps.values()), default=0),
            trained=sum(step in self.steps for step in self.trained_at.values()),
            fates=dict(self.fates),
            unaccounted=len(self.clicks) - len(self.evidence) - len(self.refused),
            refused=Counter(self.refused.values()),
        )


def share(answers: Iterable[Answered]) -> float:
    """Of answers that people like; at least one must be given."""
    return statistics.fmean(answer.liked for answer in answers)


def _sum(sum_: tuple[int, int], one: Coverage) -> tuple[int, int]:
    return sum_[0] + one.rollouts, sum_[1] + one.signalled


def _range(answers: list[Answered]) -> tuple[int, int]:
    versions = [answer.version for answer in answers]
    return min(versions, default=-1), max(versions, default=-1)
