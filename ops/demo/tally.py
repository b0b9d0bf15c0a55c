"""Folds the events of a run into the facts that the demo is judged by. Reads the topics alone, trusts no process."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from rollwire.schemas.records import (
    Evaluation,
    Event,
    FleetStatus,
    GroupFate,
    PackedBatch,
    Rollout,
    TrainStep,
    WeightVersion,
)

HELD_OUT = "heldout"  # tasks as they are drawn
DISTINCT = "distinct"  # every task once
ACCURACY = "accuracy"


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What a run came to. `None` = the topics do not say."""

    heldout: Mapping[int, float]  # version -> accuracy over full evaluations
    distinct: Mapping[int, float]
    heldout_tasks: int
    distinct_tasks: int
    heldout_overlap: int  # training rollouts on a held-out task
    final_version: int
    versions: int
    version_holes: int  # versions missing below the final one, plus versions that came twice
    trained_lag_max: int
    rollouts: int
    mixed_version_share: float
    sampled_tokens: int
    tool_tokens: int  # in rollouts
    tool_tokens_trained: int  # with a loss, in rollouts or in step plans
    replicas_equal: bool
    replicas: Mapping[str, int]  # replica -> version served last
    mismatch_p99: float | None  # median over the steps that measured both settings
    mismatch_p99_no_replay: float | None
    routes_differing: float | None
    delta_pct: float | None
    pause_ms_p50: float | None
    learning_rate: float | None
    train_tokens_per_s: float | None
    train_seconds: float | None  # from the first to the last step
    fates: Mapping[tuple[str, str], int]

    def gain(self, suite: Mapping[int, float]) -> float | None:
        before, after = suite.get(0), suite.get(self.final_version)
        return None if before is None or after is None else after - before


@dataclass(slots=True)
class Tally:
    """Feed it every event of the run's topics, in any order across topics but step plans last, then ask for the facts."""

    held_out_ids: frozenset[str] = frozenset()
    lineage: str = ""
    fleet: str = "fleet"  # whose swaps are timed; the evaluator has nothing open when it swaps
    steps: dict[int, TrainStep] = field(default_factory=dict)
    versions: dict[int, WeightVersion] = field(default_factory=dict)
    repeats: int = 0
    served: dict[str, FleetStatus] = field(default_factory=dict)
    pauses: list[float] = field(default_factory=list)
    full: dict[tuple[str, int], Evaluation] = field(default_factory=dict)
    fates: Counter[tuple[str, str]] = field(default_factory=Counter)
    rollouts: int = 0
    mixed: int = 0
    sampled_tokens: int = 0
    overlap: int = 0
    tool_tokens: int = 0
    tool_tokens_trained: int = 0
    tools: dict[str, tuple[tuple[int, int], ...]] = field(
        default_factory=dict
    )  # of rollouts with tool results

    def add(self, event: Event) -> None:
        match event:
            case Rollout():
                self.rollouts += 1
                self.mixed += len({span.version for span in event.spans}) > 1
                self.sampled_tokens += len(event.logprobs) // 4
                self.overlap += event.task_id in self.held_out_ids
                tools = tuple((s.start, s.end) for s in event.segments if s.kind == "tool")
                if tools:
                    self.tools[event.rollout_id] = tools
                    self.tool_tokens += sum(end - start for start, end in tools)
                    self.tool_tokens_trained += sum(event.loss_mask.count(1, *tool) for tool in tools)
            case PackedBatch():
                for micro in event.microbatches:
                    starts = memoryview(micro.cu_seqlens).cast("i")
                    for rollout_id, start in zip(micro.rollout_ids, starts, strict=False):
                        for tool in self.tools.get(rollout_id, ()):
                            trained = micro.loss_mask.count(1, start + tool[0], start + tool[1])
                            self.tool_tokens_trained += trained
            case TrainStep() if event.lineage == self.lineage:
                self.repeats += event.step in self.steps
                self.steps[event.step] = event
            case WeightVersion() if event.lineage == self.lineage:
                self.repeats += event.version in self.versions
                self.versions[event.version] = event
            case FleetStatus():
                if event.state in ("swapped", "stopped"):
                    self.served[event.replica] = event
                if event.state == "swapped" and event.version > 0 and event.fleet == self.fleet:
                    self.pauses.append(event.pause_ms)
            case Evaluation() if event.lineage == self.lineage and event.promotion is None:
                self.full[(event.suite, event.version)] = event
            case GroupFate():
                self.fates[(event.fate, event.reason)] += 1
            case _:
                pass

    def facts(self, environment: str) -> RunFacts:
        final = max(self.versions, default=-1)
        final_digest = self.versions[final].state_digest if final >= 0 else None
        steps = [step for _, step in sorted(self.steps.items()) if step.groups]  # a revert measured nothing
        heldout, distinct = self._suite(environment, HELD_OUT), self._suite(environment, DISTINCT)
        both = [s for s in steps if s.mismatch_no_replay is not None]
        deltas = [v for v in self.versions.values() if v.kind == "delta"]
        seconds = (steps[-1].finished_us - steps[0].finished_us) / 1e6 if len(steps) > 1 else None
        return RunFacts(
            heldout={v: accuracy(e) for v, e in heldout.items()},
            distinct={v: accuracy(e) for v, e in distinct.items()},
            heldout_tasks=min((e.tasks for e in heldout.values()), default=0),
            distinct_tasks=min((e.tasks for e in distinct.values()), default=0),
            heldout_overlap=self.overlap,
            final_version=final,
            versions=len(self.versions),
            version_holes=final + 1 - len(self.versions) + self.repeats,
            trained_lag_max=max((s.max_lag for s in steps), default=0),
            rollouts=self.rollouts,
            mixed_version_share=self.mixed / self.rollouts if self.rollouts else 0.0,
            sampled_tokens=self.sampled_tokens,
            tool_tokens=self.tool_tokens,
            tool_tokens_trained=self.tool_tokens_trained,
            replicas_equal=bool(self.served)
            and all(s.version == final and s.state_digest == final_digest for s in self.served.values()),
            replicas={replica: s.version for replica, s in sorted(self.served.items())},
            mismatch_p99=_median(s.mismatch.p99 for s in both),
            mismatch_p99_no_replay=_median(s.mismatch_no_replay.p99 for s in both if s.mismatch_no_replay),
            routes_differing=_mean(s.routes_differing for s in steps if s.routes_differing is not None),
            delta_pct=_mean(100 * v.stored_bytes / v.full_bytes for v in deltas),
            pause_ms_p50=_median(self.pauses),
            learning_rate=steps[-1].learning_rate if steps else None,
            train_tokens_per_s=sum(s.tokens for s in steps[1:]) / seconds if seconds else None,
            train_seconds=seconds,
            fates=dict(self.fates),
        )

    def _suite(self, environment: str, suite: str) -> dict[int, Evaluation]:
        return {v: e for (name, v), e in self.full.items() if name == f"{environment}.{suite}"}


def accuracy(evaluation: Evaluation) -> float:
    """Share of sampled answers that were right, 0 to 1."""
    return next(score.value for score in evaluation.scores if score.name == ACCURACY)


def _median(values: Iterable[float]) -> float | None:
    listed = list(values)
    return statistics.median(listed) if listed else None


def _mean(values: Iterable[float]) -> float | None:
    listed = list(values)
    return statistics.fmean(listed) if listed else None
