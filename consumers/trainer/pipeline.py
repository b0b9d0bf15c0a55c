"""From a step that was taken to a committed version: the snapshot publisher and the committer, joined. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import structlog

from rollwire.consumers.trainer.books import Books, start
from rollwire.consumers.trainer.commit import CheckpointWriter, Committer, Taken
from rollwire.consumers.trainer.config import TrainerConfig
from rollwire.consumers.trainer.learner import Learner
from rollwire.consumers.weights.link_builder import link_builder
from rollwire.consumers.weights.manifest import MadeFrom
from rollwire.consumers.weights.publisher import PublisherConfig, SnapshotPublisher
from rollwire.kernels.tensors import State
from rollwire.schemas.records import Notice, TrainStep, WeightVersion
from rollwire.streams.seams.clock import Clock
from rollwire.streams.seams.log import Log, TopicPartition
from rollwire.streams.seams.store import ObjectStore
from rollwire.streams.seams.work import Work

_log = structlog.get_logger()


class Run(NamedTuple):
    """What a trainer is started with."""

    log: Log
    store: ObjectStore
    learner: Callable[[], Learner]  # a new one for each session
    config: TrainerConfig
    publisher_config: PublisherConfig | None
    hf_config: Mapping[str, Any] | None  # goes into anchors
    prefix: str
    model: str
    lineage: str
    until_step: int | None
    stopped: Callable[[], bool]
    clock: Clock
    work: Work
    books: Books = start()  # empty ones

    @property
    def name(self) -> str:
        """The transactional id, and the consumer group."""
        return f"{self.prefix}trainer"


class Pipeline:
    """When it is made, an older trainer is fenced and its last transaction is decided."""

    def __init__(self, run: Run, *, logged: Callable[[int], WeightVersion | None]) -> None:
        config = run.config
        self._last: WeightVersion | None = None
        self._committed_version = -1
        writer = run.log.transactional_writer(run.name)
        self._committer = Committer(
            run.log,
            writer,
            transactional_id=run.name,
            group=run.name,
            source=f"rollwire/trainer/{run.model}",
            clock=run.clock,
            publish_deadline_s=config.publish_deadline_s,
            commit_deadline_s=config.commit_deadline_s,
            committed=self._on_committed,
            logged=logged,
            books=run.books._replace(limit=config.max_uncommitted),
            work=run.work,
        )
        self._publisher = SnapshotPublisher(
            run.store,
            model=run.model,
            lineage=run.lineage,
            config=run.publisher_config,
            hf_config=run.hf_config,
            clock=run.clock,
            work=run.work,
            links=link_builder(
                run.log,
                run.store,
                run.publisher_config or PublisherConfig(),
                model=run.model,
                lineage=run.lineage,
                clock=run.clock,
                work=run.work,
            ),
        )

    @property
    def last(self) -> WeightVersion | None:
        """The last version that this life committed."""
        return self._last

    def resume(self, last: WeightVersion, state: State, position: Mapping[TopicPartition, int]) -> None:
        """`last` is the newest version in the log, `state` its weights. Raises `DigestMismatch`."""
        self._committed_version = last.version
        self._publisher.resume(last, state)
        self._committer.resume(last.version, position)

    def hand_over(
        self,
        version: int,
        state: State,
        *,
        step: TrainStep | None,
        checkpoint: CheckpointWriter | None,
        before: Mapping[TopicPartition, int],
        after: Mapping[TopicPartition, int],
        notices: tuple[Notice, ...] = (),
    ) -> None:
        """Positions and weights as they are now go to the background; the next step may begin."""
        made_from = None if step is None else MadeFrom(step.consumed, step.plan_digest)
        published = self._publisher.submit(version, version, state, made_from)
        self._committer.take(Taken(version, step, published, checkpoint, before, after, notices))

    def check(self) -> None:
        """Raises what stopped the pipeline."""
        self._committer.check()

    def wait_below(self, uncommitted: int, timeout_s: float) -> bool:
        """Whether fewer than `uncommitted` steps are open, after at most `timeout_s`. Raises what stopped the pipeline."""
        return self._committer.wait_below(uncommitted, timeout_s)

    def close(self, timeout_s: float) -> None:
        """What is not committed is given up: the next session takes it again from the log."""
        self._committer.close(timeout_s)
        self._publisher.discard_from(self._committed_version + 1)
        self._publisher.close(timeout_s)

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
