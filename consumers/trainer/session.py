"""One life of the trainer: fence the one before, learn from the log where it stood, then a step per plan.

anchor    a lineage without versions: version 0 is published before anything else
resume    the newest checkpoint is restored and the steps since then are replayed, digest by digest; nothing is
          published again
train     read, assert, compute, hand to the publisher and the committer, and go on with the next plan
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

import structlog
import torch

from rollwire.consumers.trainer.checkpoint import DueCheckpoint, load_checkpoint, parameter_layout
from rollwire.consumers.trainer.commit import Committer, Taken
from rollwire.consumers.trainer.config import TrainerConfig
from rollwire.consumers.trainer.drift import START, judge, judge_all, notices, pause_text, pauses, rule_of
from rollwire.consumers.trainer.figures import train_step
from rollwire.consumers.trainer.history import (
    BATCHES,
    History,
    Resume,
    batch_partitions,
    plan_resume,
    range_ends,
    read_history,
)
from rollwire.consumers.trainer.plan import check_agreement
from rollwire.consumers.trainer.rank import Head
from rollwire.consumers.trainer.ranks import Connect, RankGroup
from rollwire.consumers.trainer.weights import Snapshot
from rollwire.consumers.weights.publisher import PublisherConfig, SnapshotPublisher
from rollwire.kernels.digest import StateDigest
from rollwire.kernels.policy.config import PolicyConfig, hf_config
from rollwire.kernels.tensors import State
from rollwire.schemas.errors import ConfigError, DeadlineExceeded, MismatchDrift, OffsetLost, ReplayDiverged
from rollwire.schemas.records import Notice, OffsetRange, TrainStep, WeightVersion
from rollwire.streams.seams.clock import Clock
from rollwire.streams.seams.log import Log, TopicPartition
from rollwire.streams.seams.store import ObjectStore

_log = structlog.get_logger()
_POLL_S = 0.1
_DRAIN_SHARE = 0.6  # of the shutdown deadline; the rest is for the two background threads


class Run(NamedTuple):
    """What a trainer is started with."""

    log: Log
    store: ObjectStore
    policy_config: PolicyConfig
    config: TrainerConfig
    publisher_config: PublisherConfig | None
    prefix: str
    model: str
    lineage: str
    initial: State | None
    stop: threading.Event
    until_step: int | None
    clock: Clock
    connect: Connect | None


class Session:
    """Use once: `run`, then `close`."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._config = run.config
        self._partitions = batch_partitions(run.config.ranks)
        self._settings = run.config.settings(
            torch_version=str(torch.__version__), policy=run.policy_config.model_dump_json()
        )
        self._parameters = parameter_layout(run.policy_config)
        self._offsets: tuple[int, ...] = ()  # by rank: the next plan
        self._version = 0
        self._last: WeightVersion | None = None
        self._committed_version = -1
        self._rule = rule_of(run.config)
        self._drift = START
        name = f"{run.prefix}trainer"
        # First of all: when this returns, an older trainer is fenced and its last transaction is decided.
        writer = run.log.transactional_writer(name)
        self._committer = Committer(
            run.log,
            writer,
            transactional_id=name,
            group=name,
            source=f"rollwire/trainer/{run.model}",
            clock=run.clock,
            publish_deadline_s=run.config.publish_deadline_s,
            commit_deadline_s=run.config.commit_deadline_s,
            committed=self._on_committed,
            anchored=lambda: bool(self._history().versions),
        )
        self._group_id = name
        self._publisher = SnapshotPublisher(
            run.store,
            model=run.model,
            lineage=run.lineage,
            config=run.publisher_config,
            hf_config=hf_config(run.policy_config),
            clock=run.clock,
        )
        self._ranks: RankGroup | None = None

    @property
    def progressed(self) -> bool:
        """Whether this life committed anything."""
        return self._last is not None

    def run(self) -> WeightVersion | None:
        """Trains until the stop event or `until_step`; returns the last version this lineage has committed.

        Raises `MismatchDrift` when a step's alarm pauses the trainer, that step being committed.
        """
        run = self._run
        history = self._history()
        ranks = self._ranks = RankGroup(
            run.log,
            run.store,
            run.policy_config,
            run.config,
            model=run.model,
            lineage=run.lineage,
            clock=run.clock,
            connect=run.connect,
        )
        last: WeightVersion | None = None
        if history.versions:
            last = history.versions[-1]
            if not self._resume(ranks, history):
                return last
        elif not self._anchor(ranks):
            return None
        paused = False
        while not (paused or run.stop.is_set()) and (
            run.until_step is None or self._version < run.until_step
        ):
            self._committer.check()
            heads = ranks.read(_POLL_S)
            if heads is not None and self._wait_for_room():
                self._take_step(ranks, heads)
                paused = pauses(self._drift, self._config)
        drained = self._committer.wait_below(
            1,
            self._config.shutdown_s * _DRAIN_SHARE
            if run.stop.is_set()
            else self._config.publish_deadline_s + self._config.commit_deadline_s,
        )
        if not drained:
            _log.warning(
                "trainer.left_uncommitted", version=self._version, note="the next start replays them"
            )
        elif paused and self._rule is not None:
            raise MismatchDrift(pause_text(self._drift, self._rule))
        return self._last or last

    def close(self) -> None:
        """Steps that are not committed are given up: the next session takes them again from the log."""
        try:
            left_s = self._config.shutdown_s * (1 - _DRAIN_SHARE) / 2
            self._committer.close(left_s)
            self._publisher.discard_from(self._committed_version + 1)
            self._publisher.close(left_s)
        finally:
            if self._ranks is not None:
                self._ranks.close()

    def _anchor(self, ranks: RankGroup) -> bool:
        run = self._run
        if run.initial is None:
            raise ConfigError(f"lineage {run.lineage} has no version yet and no initial weights were given")
        ranks.local.weights.load(run.initial)
        snapshot = ranks.local.weights.snapshot()
        # A group that an older lineage left behind goes on from there; a new one begins with the topic.
        start = {
            **run.log.beginning_offsets(self._partitions),
            **run.log.committed(self._group_id, self._partitions),
        }
        self._offsets = tuple(start[p] for p in self._partitions)
        self._hand_over(ranks, snapshot, step=None, before={})
        if not self._wait_committed():
            return False
        ranks.start(snapshot, 0, self._offsets, None)
        return True

    def _resume(self, ranks: RankGroup, history: History) -> bool:
        run = self._run
        if self._rule is not None:
            self._drift = judge_all(history.steps, self._rule)
            if pauses(self._drift, self._config):
                raise MismatchDrift(pause_text(self._drift, self._rule))
        resume = plan_resume(
            history,
            run.log.committed(self._group_id, self._partitions),
            run.log.beginning_offsets(self._partitions),
            self._config.ranks,
        )
        claim = resume.checkpoint.checkpoint
        if claim is None:
            raise OffsetLost("no checkpoint to resume from")
        checkpoint, snapshot = load_checkpoint(
            run.store, claim, lineage=run.lineage, parameters=self._parameters
        )
        if checkpoint.next_offsets != resume.offsets:
            raise OffsetLost(
                f"the checkpoint of version {checkpoint.version} goes on at {checkpoint.next_offsets}, the log at "
                f"{resume.offsets}"
            )
        step = resume.checkpoint.step
        ranks.start(
            snapshot,
            resume.checkpoint.version,
            resume.offsets,
            history.steps[step - 1].plan_digest if step else None,
        )
        self._offsets = resume.offsets
        self._version = resume.checkpoint.version
        digest = self._digest(ranks)
        if digest != resume.checkpoint.state_digest:
            raise ReplayDiverged(
                f"the checkpoint of version {self._version} rounds to {digest}, published was "
                f"{resume.checkpoint.state_digest}"
            )
        if not self._replay(ranks, resume):
            return False
        self._committed_version = resume.last.version
        self._publisher.resume(resume.last, ranks.local.weights.published())
        self._committer.resume(resume.last.version, self._position())
        return True

    def _replay(self, ranks: RankGroup, resume: Resume) -> bool:
        """Takes the committed steps again; the same bits or a halt."""
        for step in resume.steps:
            heads = self._read_again(ranks, step)
            if heads is None:
                return False
            ends = tuple(head.end for head in heads)
            if ends != range_ends(step.consumed, self._config.ranks) or heads[0].digest != step.plan_digest:
                raise OffsetLost(
                    f"step {step.step} was taken from other records than those now before the trainer: "
                    f"{ends}, plan {heads[0].digest}"
                )
            ranks.compute()
            ranks.apply()
            self._offsets, self._version = ends, step.version
            digest = self._digest(ranks)
            if digest != step.state_digest:
                raise ReplayDiverged(
                    f"step {step.step} replayed gives {digest}, published was {step.state_digest}; "
                    f"{self._differences(step)}"
                )
        _log.info("trainer.resumed", version=self._version, replayed=len(resume.steps))
        return True

    def _read_again(self, ranks: RankGroup, step: TrainStep) -> list[Head] | None:
        deadline_s = self._run.clock.monotonic_s() + self._config.read_deadline_s
        while not self._run.stop.is_set():
            heads = ranks.read(_POLL_S)
            if heads is not None:
                check_agreement([head.digest for head in heads], step.step)
                return heads
            if self._run.clock.monotonic_s() > deadline_s:
                raise DeadlineExceeded(
                    f"the plan of step {step.step} did not come within {self._config.read_deadline_s:g} s"
                )
        return None

    def _take_step(self, ranks: RankGroup, heads: Sequence[Head]) -> None:
        clock = self._run.clock
        plan = ranks.local.plan
        if plan is None:
            raise OffsetLost("a plan was announced and is gone")
        check_agreement([head.digest for head in heads], plan.step)
        began_s = clock.monotonic_s()
        figures = ranks.compute()
        norm = ranks.apply()
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
            learning_rate=self._config.rate(plan.step),
            duration_s=duration_s,
            settings=self._settings,
        )
        self._offsets = tuple(head.end for head in heads)
        self._version = plan.base_version + 1
        due = plan.step % self._config.checkpoint_every == 0
        self._hand_over(
            ranks,
            ranks.local.weights.snapshot() if due else None,
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
        ranks: RankGroup,
        snapshot: Snapshot | None,
        *,
        step: TrainStep | None,
        before: dict[TopicPartition, int],
        made_known: tuple[Notice, ...] = (),
    ) -> None:
        """Positions and weights as they are now go to the background; the next step may begin."""
        run = self._run
        checkpoint = None
        if snapshot is not None:
            checkpoint = DueCheckpoint(
                run.store,
                snapshot,
                model=run.model,
                lineage=run.lineage,
                step=self._version,
                next_offsets=self._offsets,
                parameters=self._parameters,
                settings=self._settings,
            )
        published = self._publisher.submit(self._version, self._version, ranks.local.weights.published())
        self._committer.take(
            Taken(self._version, step, published, checkpoint, before, self._position(), made_known)
        )

    def _wait_for_room(self) -> bool:
        """False when stopped meanwhile: the plan just read stays untaken."""
        while not self._committer.wait_below(self._config.max_uncommitted, _POLL_S):
            if self._run.stop.is_set():
                return False
        return True

    def _wait_committed(self) -> bool:
        while not self._committer.wait_below(1, _POLL_S):
            if self._run.stop.is_set():
                return self._committer.wait_below(1, self._config.shutdown_s * _DRAIN_SHARE)
        return True

    def _on_committed(self, version: WeightVersion, step: TrainStep | None) -> None:
        self._last, self._committed_version = version, version.version
        self._publisher.committed(version.version)
        _log.info(
            "trainer.committed",
            version=version.version,
            kind=version.kind,
            loss=None if step is None else step.loss,
            checkpoint=version.checkpoint is not None,
        )

    def _position(self) -> dict[TopicPartition, int]:
        return dict(zip(self._partitions, self._offsets, strict=True))

    def _history(self) -> History:
        run = self._run
        return read_history(
            run.log, run.model, run.lineage, deadline_s=self._config.read_deadline_s, clock=run.clock
        )

    def _digest(self, ranks: RankGroup) -> str:
        return StateDigest.of(ranks.local.weights.published()).hex

    def _differences(self, step: TrainStep) -> str:
        names = sorted(set(step.settings) | set(self._settings))
        changed = [
            f"{name}: {step.settings.get(name)} -> {self._settings.get(name)}"
            for name in names
            if step.settings.get(name) != self._settings.get(name)
        ]
        return "changed settings: " + "; ".join(changed) if changed else "the settings are the same"
