"""The decode loop of live traffic: takes questions, samples one answer each, follows the weights, records what it said.

One thread decodes without a pause; between two decode steps it swaps in a staged version, so that running answers carry
several version spans. A second thread seals and writes (`recorder`). Questions come from any thread.
"""

from __future__ import annotations

import secrets
import threading
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple, Protocol

import structlog

from rollwire.producers.fleet import derive_seed
from rollwire.producers.serving.answer import (
    Answer,
    Classify,
    Question,
    SealTokens,
    answer_of,
    by_finish,
    rollout_of,
    trajectory_of,
)
from rollwire.producers.serving.config import ServingConfig
from rollwire.producers.serving.recorder import Recorder, Unsealed
from rollwire.producers.trajectory import Origin, Trajectory
from rollwire.schemas.errors import DeadlineExceeded, TargetFailed
from rollwire.schemas.ids import new_group_id
from rollwire.streams.seams.clock import Clock, SystemClock
from rollwire.streams.seams.engine import Engine, Sampled, SampleRequest
from rollwire.streams.seams.keys import KeyStore
from rollwire.streams.seams.log import Log
from rollwire.streams.seams.sealing import seal_field
from rollwire.streams.seams.weights import Staged, WeightSource

_log = structlog.get_logger()
_IDLE_S: Final = 0.02  # between looks for a new version while nobody asks


class Reply(Protocol):
    """Whoever asked. Called by other threads than the one that asked; each at most once."""

    def answered(self, answer: Answer | None) -> None:
        """None: the replica stopped before the question was taken up."""
        ...

    def recorded(self, durable: bool) -> None:
        """After `answered`, when the answer is in the log, or will not be."""
        ...


class ServingReport(NamedTuple):
    """What one life of the replica did."""

    answered: int
    written: int  # durable
    refused: int  # by the codec
    broken_off: int  # by the stop
    tokens: int  # sampled
    swaps: int
    version: int


class _Running(NamedTuple):
    question: Question
    trajectory: Trajectory
    reply: Reply


class Serving:
    """`ask` from any thread; `run` in one. `random_bits` makes ids unique (74 bits)."""

    def __init__(
        self,
        log: Log,
        engine: Engine,
        weights: WeightSource,
        keys: KeyStore,
        config: ServingConfig,
        *,
        model: str,
        lineage: str,
        end_id: int,
        classify: Classify = by_finish,
        clock: Clock | None = None,
        random_bits: Callable[[], int] | None = None,
    ) -> None:
        self._log = log
        self._engine = engine
        self._weights = weights
        self._config = config
        self._end_id = end_id
        self._classify = classify
        self._clock = clock or SystemClock()
        self._random_bits = random_bits or (lambda: secrets.randbits(74))
        self._seal: SealTokens = lambda subject, rollout_id, tokens: seal_field(
            keys, subject, rollout_id, "token_ids", tokens
        )
        self._origin = Origin(
            model=model,
            lineage=lineage,
            environment=config.environment,
            fleet=config.fleet,
            replica=config.replica,
            token_dtype="u4",
            temperature=config.temperature,
            num_experts=0,
            moe_layers=None,
        )
        self._asked: deque[tuple[Question, Reply]] = deque()
        self._changed = threading.Condition()
        self._open = 0  # asked and neither recorded nor given up
        self._closed = False
        self._running: dict[str, _Running] = {}
        self._answered = self._broken_off = self._tokens = self._swaps = self._count = 0
        self._next_swap = 0.0

    @property
    def version(self) -> int:
        """What it answers with; -1 before the first version."""
        return self._engine.version

    def ask(self, question: Question, reply: Reply) -> bool:
        """False where too much is open, or the replica stops: nothing was taken."""
        with self._changed:
            if self._closed or self._open >= self._config.max_open:
                return False
            self._open += 1
            self._asked.append((question, reply))
            self._changed.notify_all()
            return True

    def run(self, stop: threading.Event) -> ServingReport:
        """Answers until `stop`, then finishes or breaks off what is open within `drain_s`.

        Raises `DeadlineExceeded` where no version comes within `start_s`, `LogUnavailable` and `StoreUnavailable` when the
        broker or the keys stay away for `patience_s`.
        """
        recorder = Recorder(self._log, clock=self._clock, patience_s=self._config.patience_s)
        try:
            if self._first_version(stop):
                while not stop.is_set():
                    self._swap(self._weights.staged())
                    self._take_up()
                    self._finish(self._engine.step(), recorder)
                    recorder.check()
            self._drain(recorder)
        finally:
            recorder.close()
        report = ServingReport(
            self._answered,
            recorder.written,
            recorder.refused,
            self._broken_off,
            self._tokens,
            self._swaps,
            self._engine.version,
        )
        self._weights.stopped(self._broken_off)
        _log.info("serving_stopped", **report._asdict())
        return report

    def _first_version(self, stop: threading.Event) -> bool:
        deadline = self._clock.monotonic_s() + self._config.start_s
        while not stop.is_set():
            try:
                self._swap(self._weights.wait(0.5))
                return True
            except (DeadlineExceeded, TargetFailed):  # no version, or no server to take it, yet
                if self._clock.monotonic_s() > deadline:
                    raise
                stop.wait(0.1)
        return False

    def _swap(self, staged: Staged | None) -> None:
        began = self._clock.monotonic_s()
        if staged is None or began < self._next_swap:
            return
        try:
            self._engine.swap(staged.event.version, staged.state)
        except TargetFailed as error:  # a server of its own; the version before serves
            if self._engine.version < 0:
                raise
            _log.warning("swap_failed", version=staged.event.version, error=str(error))
            self._next_swap = self._clock.monotonic_s() + self._config.swap_retry_s
            return
        self._swaps += 1
        self._weights.swapped(staged, (self._clock.monotonic_s() - began) * 1e3, len(self._running))

    def _take_up(self) -> None:
        """Hands what was asked to the engine; waits a moment for a question where nothing else is to do."""
        with self._changed:
            if not self._asked and not self._running:
                self._changed.wait(_IDLE_S)
            asked, self._asked = list(self._asked), deque()
        now_us = self._clock.now_us()
        for question, reply in asked:
            group_id = new_group_id(now_us, self._random_bits())
            seed = derive_seed("answer", self._config.seed, self._config.replica, group_id)
            trajectory = trajectory_of(question, group_id, seed, now_us)
            self._running[trajectory.rollout_id] = _Running(question, trajectory, reply)
            self._engine.submit(
                [
                    SampleRequest(
                        request_id=trajectory.rollout_id,
                        prompt_ids=question.prompt_ids,
                        max_new_tokens=self._config.max_new_tokens,
                        seed=seed,
                        temperature=self._config.temperature,
                        record_routes=False,
                    )
                ]
            )

    def _finish(self, sampled: list[Sampled], recorder: Recorder) -> None:
        now_us = self._clock.now_us()
        for each in sampled:
            running = self._running.pop(each.request_id)
            running.trajectory.add_sampled(each)
            self._answered += 1
            self._tokens += each.token_ids.size
            running.reply.answered(answer_of(running.trajectory, each, self._end_id))
            recorder.put(self._unsealed(running, each, now_us))

    def _unsealed(self, running: _Running, sampled: Sampled, now_us: int) -> Unsealed:
        reason = sampled.finish_reason
        outcome = self._classify(sampled.token_ids, reason)

        def done(durable: bool) -> None:
            with self._changed:
                self._open -= 1
            running.reply.recorded(durable)

        return Unsealed(
            running.trajectory.rollout_id,
            lambda: rollout_of(
                running.trajectory,
                reason,
                self._origin,
                subject=running.question.subject,
                tenant=self._config.tenant,
                outcome=outcome,
                seal=self._seal,
                now_us=now_us,
            ),
            done,
        )

    def _drain(self, recorder: Recorder) -> None:
        """Finishes what runs, or breaks it off with what it has; what was not taken up is told so."""
        config, began = self._config, self._clock.monotonic_s()
        with self._changed:
            self._closed = True
            left, self._asked = list(self._asked), deque()
        for _, reply in left:
            reply.answered(None)
        while self._running and self._clock.monotonic_s() - began < config.drain_s * 0.6:
            self._finish(self._engine.step(), recorder)
        if self._running:
            handed_back = self._engine.abort()
            self._broken_off = len(handed_back)
            self._finish(handed_back, recorder)
        recorder.flush(max(config.drain_s - (self._clock.monotonic_s() - began), 0.5))
