"""The evaluator on the in-memory engine: one score, one version; deterministic; a missing reward is in no mean."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from rollwire.consumers.evaluator import (
    EvaluatorConfig,
    Suite,
    is_due,
    quick_suite,
    run_evaluator,
    run_suite,
    summarise,
)
from rollwire.schemas.errors import ConfigError, DeadlineExceeded
from rollwire.schemas.records import Evaluation
from rollwire.streams.emit import decode_record
from rollwire.streams.seams.engine import Sampled, SampleRequest
from rollwire.streams.seams.engine_memory import MemoryEngine
from rollwire.streams.seams.environment import Task, Turn, Verdict
from rollwire.streams.seams.log import TopicPartition
from rollwire.streams.seams.log_memory import MemoryLog
from rollwire.streams.seams.weights import Staged
from rollwire.streams.seams.weights_memory import MemoryWeights

LINEAGE = "0197a1b2-0000-7000-8000-0000000000aa"


class Parity:
    """Right where the first sampled token has the task's parity. A task is its own number."""

    def __init__(self) -> None:
        self.name, self.vocab_size, self.end_id, self.max_new_tokens = "parity", 10, 1, 6

    def reset(self, seed: int, *, held_out: bool = False) -> Task:
        return Task(f"t{seed}", str(seed), np.array([2 + seed % 8], dtype=np.int64))

    def step(self, task: str, sampled_ids: NDArray[np.int64]) -> Turn:
        return Turn(True, np.empty(0, dtype=np.int64))

    def score(self, task: str, sampled_ids: NDArray[np.int64], finish_reason: str) -> Verdict:
        if int(task) % 50 == 49:
            return Verdict(None, (), "unscorable")
        return Verdict(float(sampled_ids[0] % 2 == int(task) % 2), (), "scored")

    def decode(self, token_ids: NDArray[np.int64]) -> str:
        return " ".join(map(str, token_ids.tolist()))

    def held_out_draws(self, n: int, seed: int) -> list[Task]:
        return [self.reset((seed + i * 7) % 60, held_out=True) for i in range(n)]

    def distinct_held_out(self, n: int, seed: int) -> list[Task]:
        return [self.reset(i, held_out=True) for i in range(n)]


SMALL = EvaluatorConfig(
    draw_tasks=40, distinct_tasks=30, quick_tasks=10, quick_samples=2, every_versions=3, start_s=5.0
)


def engine() -> MemoryEngine:
    return MemoryEngine(vocab_size=10, end_id=1, max_running=64)


def evaluations(log: MemoryLog) -> list[Evaluation]:
    reader = log.reader()
    reader.assign({TopicPartition("evaluations", 0): 0})
    events = [decode_record(record) for record in reader.poll(10_000, 0.0)]
    return [event for event in events if isinstance(event, Evaluation)]


class Marching(MemoryWeights):
    """Offers the next version as soon as one is served, up to `last`."""

    def __init__(self, last: int) -> None:
        super().__init__()
        self._last = last
        self.offer(0, {})

    def swapped(self, staged: Staged, pause_ms: float, open_rollouts: int) -> None:
        super().swapped(staged, pause_ms, open_rollouts)
        if staged.event.version < self._last:
            self.offer(staged.event.version + 1, {})


def run(
    log: MemoryLog, weights: MemoryWeights, config: EvaluatorConfig, stop: threading.Event | None = None
) -> int:
    return run_evaluator(
        log,
        engine(),
        Parity(),
        weights,
        config,
        model="policy",
        lineage=LINEAGE,
        prefix="t.",
        stop=stop or threading.Event(),
    )


def test_first_and_final_version_fully_and_some_between_quickly() -> None:
    log = MemoryLog({"evaluations": 1})
    weights = Marching(last=8)
    config = SMALL.model_copy(update={"final_version": 8})
    assert run(log, weights, config) == 8
    assert [(e.suite, e.version) for e in evaluations(log)] == [
        ("parity.heldout", 0),
        ("parity.distinct", 0),
        ("parity.heldout.quick", 3),
        ("parity.distinct.quick", 3),
        ("parity.heldout.quick", 6),
        ("parity.distinct.quick", 6),
        ("parity.heldout", 8),
        ("parity.distinct", 8),
    ]
    full, quick = evaluations(log)[0], evaluations(log)[2]
    assert (full.tasks, full.samples_per_task) == (40, 4)
    assert (quick.tasks, quick.samples_per_task) == (10, 2)
    assert weights.stopped_with == 0
    assert [swap.version for swap in weights.swaps] == list(range(9))


def test_scores_are_those_of_the_version_and_repeat_exactly() -> None:
    config = SMALL.model_copy(update={"final_version": 0})
    first, second = MemoryLog({"evaluations": 1}), MemoryLog({"evaluations": 1})
    run(first, Marching(0), config)
    run(second, Marching(0), config)
    assert [e.scores for e in evaluations(first)] == [e.scores for e in evaluations(second)]
    # Counted again from the distribution itself: the expected accuracy of one sample of each task.
    subject = engine()
    parity = Parity()
    expected = []
    for task in parity.distinct_held_out(30, SMALL.seed):
        p_V = np.exp(subject.log_probabilities(0, int(task.prompt_ids[-1])))
        expected.append(p_V[int(task.task) % 2 :: 2].sum())
    scores = {score.name: score.value for score in evaluations(first)[1].scores}
    spread = math.sqrt(sum(p * (1 - p) for p in expected)) / (30 * math.sqrt(SMALL.samples_per_task))
    assert abs(scores["accuracy"] - float(np.mean(expected))) < 4 * spread
    assert 0 < scores["accuracy_stderr"] < 0.2
    assert scores["accuracy"] <= scores["pass_any"] <= 1


def test_a_missing_reward_is_in_no_mean() -> None:
    def sampled(n: int) -> list[Sampled]:
        ids = np.array([1], dtype=np.int64)
        return [Sampled(str(i), ids, np.zeros(1, np.float32), ids, None, "stop") for i in range(n)]

    right, wrong, missing = (Verdict(reward, (), "") for reward in (1.0, 0.0, None))
    scores = summarise([[right, missing], [wrong, wrong], [missing, missing]], sampled(6))
    assert scores.accuracy == pytest.approx(1 / 3)
    assert scores.pass_any == 0.5
    assert scores.unscorable == 0.5
    assert scores.accuracy_stderr == pytest.approx(0.5)
    with pytest.raises(ConfigError, match="none of 2 samples"):
        summarise([[missing, missing]], sampled(2))


def test_a_swap_during_a_suite_is_an_error_not_a_mixed_score() -> None:
    class Restless(MemoryEngine):
        def step(self) -> list[Sampled]:
            finished = super().step()
            self.swap(self.version + 1, {})
            return finished

    restless = Restless(vocab_size=10, end_id=1)
    restless.swap(0, {})
    suite = Suite("parity.heldout", Parity().held_out_draws(20, 0), 2)
    with pytest.raises(ConfigError, match="version 0 alone"):
        run_suite(restless, Parity(), suite, SMALL, threading.Event())


def test_a_stop_ends_a_suite_without_a_score() -> None:
    stop = threading.Event()
    stop.set()
    subject = engine()
    subject.swap(0, {})
    suite = Suite("parity.heldout", Parity().held_out_draws(20, 0), 2)
    assert run_suite(subject, Parity(), suite, SMALL, stop) is None
    assert subject.running == 0


class Relay(Parity):
    """A sampled 3 asks for the tool, which says 4 and 5; three questions end it. Right where the sampled tokens end in 1."""

    def __init__(self) -> None:
        super().__init__()
        self.max_new_tokens = 12

    def reset(self, seed: int, *, held_out: bool = False) -> Task:
        return super().reset(seed, held_out=held_out)._replace(stop_ids=(3,))

    def step(self, task: str, sampled_ids: NDArray[np.int64]) -> Turn:
        asks = sampled_ids[-1] == 3 and np.count_nonzero(sampled_ids == 3) < 3
        return Turn(not asks, np.array([4, 5] if asks else [], dtype=np.int64))

    def score(self, task: str, sampled_ids: NDArray[np.int64], finish_reason: str) -> Verdict:
        return Verdict(float(sampled_ids[-1] == 1), (), finish_reason)


class Recording(MemoryEngine):
    """Keeps what it was asked and what it returned, by request."""

    def __init__(self) -> None:
        super().__init__(vocab_size=10, end_id=1, max_running=64)
        self.asked: dict[str, list[SampleRequest]] = {}
        self.returned: dict[str, list[Sampled]] = {}

    def submit(self, requests: Sequence[SampleRequest]) -> None:
        for request in requests:
            self.asked.setdefault(request.request_id, []).append(request)
        super().submit(requests)

    def step(self) -> list[Sampled]:
        finished = super().step()
        for each in finished:
            self.returned.setdefault(each.request_id, []).append(each)
        return finished


def test_the_evaluator_takes_the_turns_that_the_fleet_takes() -> None:
    relay, subject = Relay(), Recording()
    subject.swap(0, {})
    suite = Suite("relay.heldout", relay.distinct_held_out(60, 0), 4)
    again = Recording()
    again.swap(0, {})
    scores = run_suite(subject, relay, suite, SMALL, threading.Event())
    assert scores is not None
    right, sampled_tokens, turns = 0, 0, []
    for request_id, asked in subject.asked.items():
        returned = subject.returned[request_id]
        assert len(asked) == len(returned) == len({request.seed for request in asked})
        turns.append(len(asked))
        start = asked[0].prompt_ids
        for request, before, after in zip(asked, returned, asked[1:], strict=False):
            said = [*request.prompt_ids, *before.token_ids, 4, 5]
            assert after.prompt_ids.tolist() == said
            assert after.max_new_tokens == relay.max_new_tokens - (len(said) - start.size)
        sampled_tokens += sum(each.token_ids.size for each in returned)
        right += int(returned[-1].token_ids[-1]) == 1
    assert set(turns) == {1, 2, 3}
    assert scores.accuracy == right / 240
    assert scores.mean_tokens == sampled_tokens / 240
    assert run_suite(again, relay, suite, SMALL, threading.Event()) == scores


@pytest.mark.parametrize(
    ("version", "last", "due"),
    [
        (0, None, "full"),
        (7, None, "full"),
        (2, 0, None),
        (3, 0, "quick"),
        (5, 0, "quick"),
        (9, 8, "full"),
        (8, 6, None),
    ],
)
def test_what_is_due(version: int, last: int | None, due: str | None) -> None:
    assert is_due(version, last, SMALL.model_copy(update={"final_version": 9})) == due


def test_quick_is_a_part_of_full() -> None:
    full = Suite("parity.heldout", Parity().held_out_draws(40, 0), 4)
    quick = quick_suite(full, SMALL)
    assert quick.name == "parity.heldout.quick"
    assert list(quick.tasks) == list(full.tasks[:10])


def test_no_version_is_an_error_with_a_deadline() -> None:
    with pytest.raises(DeadlineExceeded):
        run(MemoryLog({"evaluations": 1}), MemoryWeights(), SMALL.model_copy(update={"start_s": 0.3}))
