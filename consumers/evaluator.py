"""Measures held-out accuracy on *served* versions and writes `evaluations`.

A replica of its own: it follows the weights like a sampling replica, but swaps only between two evaluations, so that a
score belongs to exactly one version. Version 0 and the final version are measured on all tasks; in between the newest
version is measured now and then on a small part of them (suites `*.quick`), since processors are shared with training.
Tasks and samples are fixed by the seed: scores of two versions differ by the weights alone.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

import numpy as np
import structlog
from pydantic import BaseModel, ConfigDict, Field

from rollwire.schemas.errors import ConfigError, DeadlineExceeded, LogUnavailable
from rollwire.schemas.records import Evaluation, Score
from rollwire.streams.emit import outgoing
from rollwire.streams.seams.clock import Clock, SystemClock
from rollwire.streams.seams.engine import Engine, Sampled, SampleRequest
from rollwire.streams.seams.environment import Environment, Task, Verdict
from rollwire.streams.seams.log import Log
from rollwire.streams.seams.turns import after_stretch
from rollwire.streams.seams.weights import Staged, WeightSource

_log = structlog.get_logger()

SOURCE: Final = "rollwire/evaluator"


class HeldOutEnvironment(Environment, Protocol):
    """An environment that can name its held-out tasks."""

    def held_out_draws(self, n: int, seed: int) -> list[Task]:
        """As they are drawn: frequent problems repeat."""
        ...

    def distinct_held_out(self, n: int, seed: int) -> list[Task]:
        """All different, equally likely."""
        ...


class EvaluatorConfig(BaseModel):
    """What is measured, and how often."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    fleet: str = Field(default="evaluator", description="name of the evaluator's fleet")
    replica: str = Field(default="evaluator-0", description="name of this replica")
    draw_tasks: int = Field(default=512, ge=1, description="held-out tasks as drawn, in a full evaluation")
    distinct_tasks: int = Field(
        default=400, ge=1, description="distinct held-out tasks, in a full evaluation"
    )
    samples_per_task: int = Field(default=4, ge=1, description="samples of each task")
    quick_tasks: int = Field(default=128, ge=1, description="tasks of a quick evaluation")
    quick_samples: int = Field(default=4, ge=1, description="samples of each task in a quick evaluation")
    every_versions: int = Field(default=25, ge=1, description="versions between two quick evaluations")
    final_version: int | None = Field(
        default=None, ge=0, description="measured fully as soon as it is served; then the evaluator ends"
    )
    temperature: float = Field(default=1.0, gt=0, description="sampling temperature")
    seed: int = Field(default=20_260_101, ge=0, description="of the choice of tasks and of the samples")
    start_s: float = Field(default=300.0, gt=0, description="seconds to wait for the first version")
    patience_s: float = Field(default=120.0, gt=0, description="seconds without the broker before giving up")


class Suite(NamedTuple):
    name: str
    tasks: Sequence[Task]
    samples_per_task: int


class SuiteScores(NamedTuple):
    accuracy: float  # mean reward over all scored samples
    accuracy_stderr: float  # of the mean over tasks
    pass_any: float  # share of tasks that at least one sample solves
    finished: float  # share of samples that ended themselves
    mean_tokens: float
    unscorable: float  # share of samples without a reward; they are in no mean


def is_due(version: int, last_measured: int | None, config: EvaluatorConfig) -> str | None:
    """What is owed to a served version: "full", "quick" or nothing. Pure.

    The first version that is seen is measured fully: on a fresh lineage it is version 0.
    """
    if last_measured is None or version == config.final_version:
        return "full"
    return "quick" if version >= last_measured + config.every_versions else None


def full_suites(environment: HeldOutEnvironment, config: EvaluatorConfig) -> tuple[Suite, Suite]:
    return (
        Suite(
            f"{environment.name}.heldout",
            environment.held_out_draws(config.draw_tasks, config.seed),
            config.samples_per_task,
        ),
        Suite(
            f"{environment.name}.distinct",
            environment.distinct_held_out(config.distinct_tasks, config.seed),
            config.samples_per_task,
        ),
    )


def quick_suite(suite: Suite, config: EvaluatorConfig) -> Suite:
    """The first tasks of a full suite; both are in random order."""
    return Suite(f"{suite.name}.quick", suite.tasks[: config.quick_tasks], config.quick_samples)


def summarise(verdicts: Sequence[Sequence[Verdict]], sampled: Sequence[Sampled]) -> SuiteScores:
    """Scores of one suite: verdicts by task, and all samples. A missing reward is in no mean (C09)."""
    by_task = [[v.reward for v in task if v.reward is not None] for task in verdicts]
    rewards = [reward for task in by_task for reward in task]
    means = [math.fsum(task) / len(task) for task in by_task if task]
    total = sum(len(task) for task in verdicts)
    if not rewards:
        raise ConfigError(f"none of {total} samples could be scored: is the environment the policy's own?")
    mean = math.fsum(means) / len(means)
    variance = math.fsum((m - mean) ** 2 for m in means) / max(len(means) - 1, 1)
    return SuiteScores(
        accuracy=math.fsum(rewards) / len(rewards),
        accuracy_stderr=math.sqrt(variance / len(means)),
        pass_any=sum(max(task) >= 1.0 for task in by_task if task) / len(means),
        finished=sum(s.finish_reason == "stop" for s in sampled) / len(sampled),
        mean_tokens=sum(s.token_ids.size for s in sampled) / len(sampled),
        unscorable=1.0 - len(rewards) / total,
    )


def sample_seed(seed: int, suite: str, task: int, sample: int, tokens_used: int = 0) -> int:
    """63 bits for one stretch of one sample: the first one, or the one behind `tokens_used` tokens."""
    parts = (seed, suite, task, sample, *((tokens_used,) if tokens_used else ()))
    digest = hashlib.blake2b(":".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class _Sample:
    """One sample being made: all its tokens, and the stretches of them that were sampled."""

    def __init__(self, task: Task, suite: str, index: int, sample: int) -> None:
        self.task = task
        self.request_id = f"{suite}/{index}/{sample}"
        self.finish_reason: str | None = None
        self._origin = (suite, index, sample)
        self._tokens_T = task.prompt_ids
        self._stretches: list[Sampled] = []

    def request(self, max_new_tokens: int, config: EvaluatorConfig) -> SampleRequest:
        return SampleRequest(
            request_id=self.request_id,
            prompt_ids=self._tokens_T,
            max_new_tokens=max_new_tokens,
            seed=sample_seed(config.seed, *self._origin, self._tokens_used),
            temperature=config.temperature,
            record_routes=False,
            stop_ids=self.task.stop_ids,
        )

    def add(self, stretch: Sampled, environment: Environment) -> int | None:
        """How many tokens may be sampled next; None = the sample has ended."""
        self._stretches.append(stretch)
        self._tokens_T = np.concatenate([self._tokens_T, stretch.token_ids])
        follows = after_stretch(
            environment, self.task.task, self.whole().token_ids, self._tokens_used, stretch.finish_reason
        )
        self.finish_reason = follows.finish_reason
        if follows.finish_reason is not None:
            return None
        self._tokens_T = np.concatenate([self._tokens_T, follows.tool_ids])
        return follows.max_new_tokens

    def whole(self) -> Sampled:
        """Its sampled tokens end to end, as if they were one stretch."""
        return Sampled(
            self.request_id,
            np.concatenate([stretch.token_ids for stretch in self._stretches]),
            np.concatenate([stretch.logprobs for stretch in self._stretches]),
            np.concatenate([stretch.versions for stretch in self._stretches]),
            None,
            self.finish_reason or self._stretches[-1].finish_reason,
        )

    @property
    def _tokens_used(self) -> int:
        return self._tokens_T.size - self.task.prompt_ids.size


def run_suite(
    engine: Engine, environment: Environment, suite: Suite, config: EvaluatorConfig, stop: threading.Event
) -> SuiteScores | None:
    """Samples and scores one suite under the version that the engine serves; None where `stop` came first.

    Raises `ConfigError` where a sample carries another version: then the score would belong to none.
    """
    version = engine.version
    by_task = [
        [_Sample(task, suite.name, index, sample) for sample in range(suite.samples_per_task)]
        for index, task in enumerate(suite.tasks)
    ]
    samples = {sample.request_id: sample for task in by_task for sample in task}
    engine.submit([sample.request(environment.max_new_tokens, config) for sample in samples.values()])
    while engine.running:
        if stop.is_set():
            engine.abort()
            return None
        for stretch in engine.step():
            if (stretch.versions != version).any():
                raise ConfigError(f"{stretch.request_id} was not sampled by version {version} alone")
            sample = samples[stretch.request_id]
            left = sample.add(stretch, environment)
            if left is not None:
                engine.submit([sample.request(left, config)])
    verdicts = [
        [
            environment.score(sample.task.task, whole.token_ids, whole.finish_reason)
            for sample in task
            for whole in (sample.whole(),)
        ]
        for task in by_task
    ]
    return summarise(verdicts, [sample.whole() for sample in samples.values()])


def run_evaluator(
    log: Log,
    engine: Engine,
    environment: HeldOutEnvironment,
    weights: WeightSource,
    config: EvaluatorConfig | None = None,
    *,
    model: str,
    lineage: str,
    prefix: str,
    stop: threading.Event,
    clock: Clock | None = None,
) -> int:
    """Evaluates until `stop`, or until `final_version` is measured; the number of events written.

    The environment scores in this process: the text is the policy's, the evaluator exact and without `eval`. Raises
    `DeadlineExceeded` where no version comes within `start_s`, `LogUnavailable` when the broker stays away.
    """
    config = config or EvaluatorConfig()
    return _Evaluator(log, engine, environment, weights, config, model, lineage, clock or SystemClock()).run(
        stop
    )


class _Evaluator:
    def __init__(
        self,
        log: Log,
        engine: Engine,
        environment: HeldOutEnvironment,
        weights: WeightSource,
        config: EvaluatorConfig,
        model: str,
        lineage: str,
        clock: Clock,
    ) -> None:
        self._log = log
        self._engine = engine
        self._environment = environment
        self._weights = weights
        self._config = config
        self._model = model
        self._lineage = lineage
        self._clock = clock
        self._full = full_suites(environment, config)
        self._quick = tuple(quick_suite(suite, config) for suite in self._full)
        self._written = 0

    def run(self, stop: threading.Event) -> int:
        config = self._config
        deadline = self._clock.monotonic_s() + config.start_s
        last_measured: int | None = None
        while not stop.is_set():
            staged = self._next_version()
            if staged is None:
                if last_measured is None and self._clock.monotonic_s() > deadline:
                    raise DeadlineExceeded(f"no version to evaluate came within {config.start_s:g} s")
                continue
            self._swap(staged)
            version = self._engine.version
            due = is_due(version, last_measured, config)
            if due is None:
                continue
            last_measured = version
            for suite in self._full if due == "full" else self._quick:
                scores = run_suite(self._engine, self._environment, suite, config, stop)
                if scores is None:
                    break
                self._write(self._event(suite, version, scores), stop)
            else:
                if version == config.final_version:
                    break
        self._weights.stopped(0)
        return self._written

    def _next_version(self) -> Staged | None:
        staged = self._weights.staged()
        if staged is not None:
            return staged
        try:
            return self._weights.wait(0.25)
        except DeadlineExceeded:
            return None

    def _swap(self, staged: Staged) -> None:
        began = self._clock.monotonic_s()
        self._engine.swap(staged.event.version, staged.state)
        self._weights.swapped(staged, (self._clock.monotonic_s() - began) * 1e3, 0)

    def _event(self, suite: Suite, version: int, scores: SuiteScores) -> Evaluation:
        return Evaluation(
            model=self._model,
            lineage=self._lineage,
            suite=suite.name,
            version=version,
            scores=tuple(Score(name=name, value=value) for name, value in scores._asdict().items()),
            tasks=len(suite.tasks),
            samples_per_task=suite.samples_per_task,
            replica=self._config.replica,
            at_us=self._clock.now_us(),
        )

    def _write(self, event: Evaluation, stop: threading.Event) -> None:
        """Until it is durable. A repeat has the same id: readers drop it."""
        record = outgoing(event, source=SOURCE, time_us=event.at_us)
        began = self._clock.monotonic_s()
        while True:
            writer = self._log.writer()
            try:
                writer.write([record], timeout_s=10.0)
            except LogUnavailable as error:
                if self._clock.monotonic_s() - began > self._config.patience_s or stop.wait(0.5):
                    raise
                _log.warning("evaluator_retries", error=str(error))
            else:
                self._written += 1
                return
            finally:
                writer.close()
