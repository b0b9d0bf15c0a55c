"""One life of the trainer: fence the one before, learn from the log where it stood, then a step per plan.

anchor    a lineage without versions: version 0 is published before anything else
replay    the newest checkpoint is restored and the steps since then are taken again, digest by digest; nothing is
          published again
train     read, assert, compute, hand to the publisher and the committer, and go on with the next plan
drain     stopped, paused or done: what is on its way is committed

`run` goes through it with threads in the background (`Threads`). The same code runs in one thread, by hand: with `Inline`
there is no thread at all, no call waits, and every effect (of the log, of the store) happens within one of

    work = Inline()
    session = Session(arithmetic_run(log, store, config, clock=clock, work=work, ...))    # fences, like any start
    session.turn()      # the trainer's own thread: "moved", "waiting" (for a plan, a commit or the clock) or "done"
    work.turn(name)     # the background, one piece: "snapshot-publisher" or "trainer-commit"; None = the first ready
    work.ready()        # which of them have something to do now; `work.next_s()`: in how many seconds one of them has
    session.result      # the last version committed, when `turn` said "done"
    session.close()

in any order the caller likes. A `RollwireError` of `turn` ends the session as it does with threads: `life.run_sessions`
says which ones are worth another session. A `BaseException` that is no `Exception`, raised by the log or the store, passes
through `turn` unswallowed: drop the session without `close`, as a process that died, and make a new one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final, Literal

import structlog

from rollwire.consumers.trainer.drift import START, judge, judge_all, notices, pause_text, pauses, rule_of
from rollwire.consumers.trainer.figures import train_step
from rollwire.consumers.trainer.history import (
    BATCHES,
    History,
    batch_partitions,
    plan_resume,
    range_ends,
    read_history,
)
from rollwire.consumers.trainer.learner import Head, Learner
from rollwire.consumers.trainer.pipeline import Pipeline, Run
from rollwire.consumers.trainer.plan import check_agreement
from rollwire.kernels.digest import StateDigest
from rollwire.schemas.errors import (
    DeadlineExceeded,
    Erased,
    Fenced,
    MismatchDrift,
    OffsetLost,
    ReplayDiverged,
)
from rollwire.schemas.records import Notice, OffsetRange, TrainStep, WeightVersion
from rollwire.streams.reverts import NO_REVERTS
from rollwire.streams.seams.log import TopicPartition

_log = structlog.get_logger()
_DRAIN_SHARE: Final = 0.6  # of the shutdown deadline; the rest is for the background's two tasks

Turn = Literal["moved", "waiting", "done"]


class Session:
    """Use once: `run` or `turn` until it is done, then `close`."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._config = run.config
        self._partitions = batch_partitions(run.config.ranks)
        self._offsets: tuple[int, ...] = ()  # by rank: the next plan
        self._version = 0
        self._known: WeightVersion | None = None  # the last version of the lives before
        self._rule = rule_of(run.config)
        self._drift = START
        self._paused = False
        self._reverts = NO_REVERTS
        self._phase: Callable[[], Turn] = self._begin
        self._heads: list[Head] | None = None  # a plan that was read and is not taken
        self._replaying: deque[TrainStep] = deque()
        self._resumed: WeightVersion | None = None
        self._restored = 0  # the version whose checkpoint this life began with
        self._deadline_s: float | None = None  # of what the phase waits for
        self._stopping = False
        self._made: Learner | None = None
        # First of all: when this returns, an older trainer is fenced and its last transaction is decided.
        self._pipeline = Pipeline(run, logged=lambda version: self._history().version(version))

    @property
    def progressed(self) -> bool:
        """Whether this life committed anything."""
        return self._pipeline.last is not None

    @property
    def result(self) -> WeightVersion | None:
        """The last version this lineage has committed, as far as this life knows."""
        return self._pipeline.last or self._known

    def run(self) -> WeightVersion | None:
        """Trains until stopped or `until_step`; returns the last version this lineage has committed.

        Raises `MismatchDrift` when a step's alarm pauses the trainer, that step being committed.
        """
        while self.turn() != "done":
            pass
        return self.result

    def turn(self) -> Turn:
        """One bounded piece: a plan read, a step replayed or taken. Waits for at most the patience of `Run.work`.

        Raises what ends this life.
        """
        return self._phase()

    def close(self) -> None:
        """Steps that are not committed are given up: the next session takes them again from the log."""
        try:
            self._pipeline.close(self._config.shutdown_s * (1 - _DRAIN_SHARE) / 2)
        finally:
            if self._made is not None:
                self._made.close()

    @property
    def _learner(self) -> Learner:
        if self._made is None:
            self._made = self._run.learner()
        return self._made

    # -- the phases -------------------------------------------------------------------------------------------------

    def _begin(self) -> Turn:
        history = self._history()
        if history.versions:
            self._known = history.versions[-1]
            self._restore(history)
            self._phase = self._replay
        else:
            self._anchor()
            self._phase = self._await_anchor
        return "moved"

    def _anchor(self) -> None:
        run, learner = self._run, self._learner
        learner.begin()
        # A group that an older lineage left behind goes on from there; a new one begins with the topic.
        start = {
            **run.log.beginning_offsets(self._partitions),
            **run.log.committed(run.name, self._partitions),
        }
        self._offsets = tuple(start[p] for p in self._partitions)
        self._hand_over(checkpoint=True, step=None, before={})

    def _await_anchor(self) -> Turn:
        if self._pipeline.wait_below(1, self._run.work.patience_s):
            self._learner.start(0, self._offsets, None)
            self._phase = self._train
            return "moved"
        if self._run.stopped() and self._is_late(self._config.shutdown_s * _DRAIN_SHARE):
            return "done"
        return "waiting"

    def _restore(self, history: History) -> None:
        run, learner = self._run, self._learner
        if self._rule is not None:
            self._drift = judge_all(history.line(history.versions[-1].version), self._rule)
            if pauses(self._drift, self._config):
                raise MismatchDrift(pause_text(self._drift, self._rule))
        committed = run.log.committed(run.name, self._partitions)
        beginnings = run.log.beginning_offsets(self._partitions)
        try:
            resume = plan_resume(history, committed, beginnings, self._config.ranks)
        except OffsetLost:
            # The offsets were read after the versions: whoever fenced this trainer in between has moved them.
            if len(self._history(running=True).versions) > len(history.versions):
                raise Fenced("another trainer or a revert went on while this one started") from None
            raise
        version = resume.checkpoint
        if version.checkpoint is None:
            raise OffsetLost("no checkpoint to resume from")
        next_offsets = learner.restore(version.checkpoint)
        if next_offsets != resume.offsets:
            raise OffsetLost(
                f"the checkpoint of version {version.version} goes on at {next_offsets}, the log at {resume.offsets}"
            )
        learner.start(
            version.version,
            resume.offsets,
            history.steps[version.step - 1].plan_digest if version.step else None,
            history.reverts.newest_at(version.version),
        )
        self._reverts = history.reverts
        self._offsets, self._version = resume.offsets, version.version
        self._restored = version.version
        digest = self._digest()
        if digest != version.state_digest:
            raise ReplayDiverged(
                f"the checkpoint of version {self._version} rounds to {digest}, published was {version.state_digest}"
            )
        self._replaying.extend(resume.steps)
        self._resumed = resume.last

    def _replay(self) -> Turn:
        """Takes a committed step again; the same bits or a halt."""
        if self._resumed is None or self._run.stopped():
            return "done"
        if not self._replaying:
            self._pipeline.resume(self._resumed, self._learner.published(), self._position())
            _log.info("trainer.resumed", version=self._version)
            self._phase = self._train
            return "moved"
        step = self._replaying[0]
        if self._reverts.newest_at(step.version) == step.version:
            self._go_over(step)
            return "moved"
        heads = self._learner.read(self._run.work.patience_s)
        if heads is None:
            if self._is_late(self._config.read_deadline_s):
                raise DeadlineExceeded(
                    f"the plan of step {step.step} did not come within {self._config.read_deadline_s:g} s"
                )
            return "waiting"
        self._deadline_s = None
        check_agreement([head.digest for head in heads], step.step)
        ends = tuple(head.end for head in heads)
        if ends != range_ends(step.consumed, self._config.ranks) or heads[0].digest != step.plan_digest:
            raise OffsetLost(
                f"step {step.step} was taken from other records than those now before the trainer: "
                f"{ends}, plan {heads[0].digest}"
            )
        figures = self._learner.compute()
        self._check_erased(step, sum(one.erased_sequences for one in figures))
        self._learner.apply()
        self._replayed(step, ends)
        return "moved"

    def _check_erased(self, step: TrainStep, found: int) -> None:
        """What was erased since a step was taken cannot be trained on again (`seals` says why a count is enough)."""
        if found > step.erased_sequences:
            raise Erased(
                f"step {step.step} was trained on {found - step.erased_sequences} sequences of people who were erased since: "
                f"versions {self._restored + 1} to {self._replaying[-1].version} can be rebuilt from their deltas, not by "
                f"training. To train on, go back to the checkpoint: `rollwire weights revert --to {self._restored}`"
            )

    def _go_over(self, revert: TrainStep) -> None:
        """The weights are those that the revert went back to: they count as its version, and reading goes on behind it."""
        ends = range_ends(revert.consumed, self._config.ranks)
        self._learner.move(revert.version, ends, revert.plan_digest, revert.version)
        self._replayed(revert, ends)

    def _replayed(self, step: TrainStep, ends: tuple[int, ...]) -> None:
        self._offsets, self._version = ends, step.version
        digest = self._digest()
        if digest != step.state_digest:
            raise ReplayDiverged(
                f"step {step.step} replayed gives {digest}, published was {step.state_digest}; "
                f"{self._differences(step)}"
            )
        self._replaying.popleft()

    def _train(self) -> Turn:
        run = self._run
        if self._paused or run.stopped() or (run.until_step is not None and self._version >= run.until_step):
            self._phase = self._drain
            return "moved"
        self._pipeline.check()
        if self._heads is None:
            self._heads = self._learner.read(run.work.patience_s)
            if self._heads is None:
                return "waiting"
        if not self._pipeline.wait_below(self._config.max_uncommitted, run.work.patience_s):
            return "waiting"
        if run.stopped():  # while it waited: the plan in hand stays untaken
            return "moved"
        heads, self._heads = self._heads, None
        self._take_step(heads)
        self._paused = pauses(self._drift, self._config)
        return "moved"

    def _drain(self) -> Turn:
        if self._pipeline.wait_below(1, self._run.work.patience_s):
            if self._paused and self._rule is not None:
                raise MismatchDrift(pause_text(self._drift, self._rule))
            return "done"
        config = self._config
        if self._run.stopped() and not self._stopping:  # before or while it drains
            self._stopping, self._deadline_s = True, None
        if self._stopping:
            if self._is_late(config.shutdown_s * _DRAIN_SHARE):
                _log.warning(
                    "trainer.left_uncommitted", version=self._version, note="the next start replays them"
                )
                return "done"
        # Each of the open steps may take its own time to be committed; the pipeline itself gives up before this.
        elif self._is_late(config.publish_deadline_s + config.max_uncommitted * config.commit_deadline_s):
            raise DeadlineExceeded(
                f"version {self._version} was taken and is not committed: the next start takes it again"
            )
        return "waiting"

    # -- a step -----------------------------------------------------------------------------------------------------

    def _take_step(self, heads: list[Head]) -> None:
        learner, clock = self._learner, self._run.clock
        plan = learner.plan
        if plan is None:
            raise OffsetLost("a plan was announced and is gone")
        check_agreement([head.digest for head in heads], plan.step)
        began_s = clock.monotonic_s()
        figures = learner.compute()
        norm = learner.apply()
        duration_s = max(clock.monotonic_s() - began_s, 1e-6)
        before = self._position()
        consumed = tuple(
            OffsetRange(topic=BATCHES, partition=rank, start=start, end=head.end)
            for rank, (start, head) in enumerate(zip(self._offsets, heads, strict=True))
        )
        event = train_step(
            plan,
            figures,
            consumed,
            grad_norm=norm,
            learning_rate=learner.rate(plan.step),
            duration_s=duration_s,
            settings=learner.settings,
        )
        self._offsets = tuple(head.end for head in heads)
        self._version = plan.base_version + 1
        self._hand_over(
            checkpoint=plan.step % self._config.checkpoint_every == 0,
            step=event,
            before=before,
            made_known=self._watch(event),
        )

    def _watch(self, step: TrainStep) -> tuple[Notice, ...]:
        """Judges the step's mismatch; the notices go into its transaction."""
        run, rule = self._run, self._rule
        if rule is None:
            return ()
        self._drift = judge(self._drift, step, rule)
        made = notices(self._drift, rule, model=run.model, lineage=run.lineage, at_us=run.clock.now_us())
        for notice in made:
            _log.warning("trainer." + notice.name, text=notice.text)
        return made

    def _hand_over(
        self,
        *,
        checkpoint: bool,
        step: TrainStep | None,
        before: dict[TopicPartition, int],
        made_known: tuple[Notice, ...] = (),
    ) -> None:
        learner = self._learner
        self._pipeline.hand_over(
            self._version,
            learner.published(),
            step=step,
            checkpoint=learner.checkpoint(self._version, self._offsets) if checkpoint else None,
            before=before,
            after=self._position(),
            notices=made_known,
        )

    # -- small questions ----------------------------------------------------------------------------------------------

    def _is_late(self, allowed_s: float) -> bool:
        """Whether what is waited for has taken longer than `allowed_s`, counted from the first time this was asked."""
        now_s = self._run.clock.monotonic_s()
        if self._deadline_s is None:
            self._deadline_s = now_s + allowed_s
        return now_s >= self._deadline_s

    def _position(self) -> dict[TopicPartition, int]:
        return dict(zip(self._partitions, self._offsets, strict=True))

    def _history(self, *, running: bool = False) -> History:
        run = self._run
        return read_history(
            run.log,
            run.model,
            run.lineage,
            deadline_s=self._config.read_deadline_s,
            clock=run.clock,
            running=running,
        )

    def _digest(self) -> str:
        return StateDigest.of(self._learner.published()).hex

    def _differences(self, step: TrainStep) -> str:
        mine = self._learner.settings
        names = sorted(set(step.settings) | set(mine))
        changed = [
            f"{name}: {step.settings.get(name)} -> {mine.get(name)}"
            for name in names
            if step.settings.get(name) != mine.get(name)
        ]
        return "changed settings: " + "; ".join(changed) if changed else "the settings are the same"
