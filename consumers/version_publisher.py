"""Weight versions of a trainer of any kind: what it consumed, its step and its version are one transaction (law 3).

    publisher = VersionPublisher(log, store, model="policy", lineage=lineage, ranks=1)
    held = publisher.start(initial)            # an older trainer is fenced; a new lineage begins as version 0
    publisher.publish(state, step)             # `step` of `step_of`; objects first, then the transaction
    publisher.close()                          # waits for what is on its way

The work is done by `SnapshotPublisher` (deltas, anchors, digests) and the built-in trainer's commit pipeline. A trainer
that makes its own rollouts has no plans: with `ranks=0` a version is published by `publish_alone`, without `train-steps`
and offsets. Needs no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollwire.consumers.packed_batches import Plan
from rollwire.consumers.trainer import books
from rollwire.consumers.trainer.commit import Committer, Taken
from rollwire.consumers.trainer.figures import figures_of, train_step
from rollwire.consumers.trainer.history import (
    STEPS,
    VERSIONS,
    History,
    batch_partitions,
    decoded,
    order_history,
    range_ends,
)
from rollwire.consumers.weights.link_builder import link_builder
from rollwire.consumers.weights.links import read_links
from rollwire.consumers.weights.manifest import MadeFrom
from rollwire.consumers.weights.paths import plan_path
from rollwire.consumers.weights.publisher import PublisherConfig, SnapshotPublisher
from rollwire.consumers.weights.reader import load_version
from rollwire.consumers.weights.sources import NamedTensors, as_state, copy_state
from rollwire.kernels.tensors import State, Tensor
from rollwire.schemas.errors import ConfigError, DeadlineExceeded, OffsetLost, PlanViolation
from rollwire.schemas.records import TrainStep, WeightVersion
from rollwire.streams.seams.clock import Clock, SystemClock
from rollwire.streams.seams.log import Log, TopicPartition
from rollwire.streams.seams.scan import scan
from rollwire.streams.seams.store import ObjectStore


class Started(NamedTuple):
    """What the lineage holds."""

    version: int
    step: int  # the trainer's step of that version
    state: State  # its weights; not to be written to
    offsets: tuple[int, ...]  # by rank: where to read `packed-batches` on
    plan_digest: str | None  # of the last step taken
    newest_revert: int | None = (
        None  # the last version that was a revert: its weights are those of an older one
    )


class VersionPublisher:
    """`ranks` partitions of `packed-batches` are consumed; `prefix` and `name` give the transactional id and the consumer
    group, so that one trainer fences another. Used by one thread; its work is done in the background."""

    def __init__(
        self,
        log: Log,
        store: ObjectStore,
        *,
        model: str,
        lineage: str,
        ranks: int,
        prefix: str = "rollwire.",
        name: str = "trainer",
        hf_config: Mapping[str, Any] | None = None,
        config: PublisherConfig | None = None,
        publish_deadline_s: float = 120.0,
        commit_deadline_s: float = 60.0,
        clock: Clock | None = None,
        snapshots: SnapshotPublisher | None = None,
    ) -> None:
        self._log = log
        self._store = store
        self._model = model
        self._lineage = lineage
        self._group = f"{prefix}{name}"
        self._partitions = batch_partitions(ranks)
        self._config = config or PublisherConfig()
        self._deadline_s = publish_deadline_s + commit_deadline_s
        self._clock = clock or SystemClock()
        self._version = -1
        self._committed = -1
        self._last: WeightVersion | None = None
        self._offsets: dict[TopicPartition, int] = {}
        writer = log.transactional_writer(self._group)  # when this returns, an older trainer is fenced
        self._committer = Committer(
            log,
            writer,
            transactional_id=self._group,
            group=self._group,
            source=f"rollwire/{name}/{model}",
            clock=self._clock,
            publish_deadline_s=publish_deadline_s,
            commit_deadline_s=commit_deadline_s,
            committed=self._on_committed,
            logged=lambda number: self._history().version(number),
            books=books.start(self._config.max_uncommitted),
        )
        self._publisher = snapshots or SnapshotPublisher(
            store,
            model=model,
            lineage=lineage,
            config=config,
            hf_config=hf_config,
            clock=self._clock,
            links=link_builder(log, store, self._config, model=model, lineage=lineage, clock=self._clock),
        )

    @property
    def last(self) -> WeightVersion | None:
        """The last version known to be committed."""
        return self._last

    def start(self, initial: NamedTensors | None) -> Started:
        """Publishes `initial` as version 0 of a new lineage, and waits for it; else reads the last version's weights.
        A `State` belongs to the publisher from then on, other tensors are copied.

        The weights are all that is held of a trainer's state here: moments and schedule are its own to keep. Raises
        `StoreUnfit`, `ConfigError` for a new lineage without `initial`, `OffsetLost` where the consumer group does not stand at the
        end of the last step, `PlanViolation` for a history with holes, and what reading weights raises.
        """
        self._store.probe()  # before a byte is written to a store that cannot hold weights
        history = self._history()
        committed = self._log.committed(self._group, self._partitions)
        if not history.versions:
            if initial is None:
                raise ConfigError(
                    f"lineage {self._lineage} has no version yet and no initial weights were given"
                )
            self._offsets = {**self._log.beginning_offsets(self._partitions), **committed}
            pairs = dict(initial)
            whole = all(isinstance(value, Tensor) for value in pairs.values())
            state = pairs if whole else copy_state(pairs)
            self._hand_over(0, 0, state, None, {}, self._offsets)
            self.flush()
            return Started(0, 0, state, self._by_rank(), None)
        last = history.versions[-1]
        steps = history.steps
        if steps:
            ends = range_ends(steps[-1].consumed, len(self._partitions))
            if committed != dict(zip(self._partitions, ends, strict=True)):
                raise OffsetLost(
                    f"{self._group} stands at {committed}, step {steps[-1].step} ended at {ends}"
                )
        elif len(committed) < len(self._partitions):
            raise OffsetLost(f"version {last.version} is committed, but {self._group} stands at {committed}")
        links = read_links(self._log, self._lineage)
        state = load_version(self._store, plan_path(history.versions, links, None, last.version), None)
        self._publisher.resume(last, state)
        self._committer.resume(last.version, committed)
        self._version = self._committed = last.version
        self._last, self._offsets = last, committed
        return Started(
            last.version,
            last.step,
            state,
            self._by_rank(),
            steps[-1].plan_digest if steps else None,
            history.reverts.newest,
        )

    def way(self) -> list[WeightVersion]:
        """Versions that lead from nothing to the last one; none for a new lineage. For a trainer that holds its weights in
        parts: instead of `start` it reads them itself, then calls `resume`."""
        versions = self._history().versions
        if not versions:
            return []
        return [step.event for step in plan_path(versions, [], None, versions[-1].version)]

    def resume(self, last: WeightVersion) -> None:
        """`last` is the last version of the lineage, and the snapshot publisher was resumed from it."""
        self._committer.resume(last.version, {})
        self._version = self._committed = last.version
        self._last = last

    def wait_for_room(self) -> None:
        """Until the next version may be handed over. Raises what stopped an earlier one, `DeadlineExceeded`."""
        self._wait_below(self._config.max_uncommitted)

    def publish(self, state: NamedTensors, step: TrainStep, *, copy: bool = False) -> None:
        """Hands over the weights that `step` made; a `State` belongs to the publisher from then on. With `copy` they may
        be any named tensors (`SnapshotPublisher.publish`), which the caller goes on changing.

        Returns as soon as fewer than `max_uncommitted` versions are on their way. Raises `PlanViolation` for a step out
        of order, and whatever stopped an earlier version: then nothing after that one is committed, start again.
        """
        if (step.lineage, step.version) != (self._lineage, self._version + 1):
            raise PlanViolation(
                f"version {step.version} of {step.lineage} after {self._version} of {self._lineage}"
            )
        starts = {TopicPartition(r.topic, r.partition): r.start for r in step.consumed}
        if starts != self._offsets:
            raise OffsetLost(
                f"step {step.step} began at {starts}, the one before it ended at {self._offsets}"
            )
        ends = {TopicPartition(r.topic, r.partition): r.end for r in step.consumed}
        before, self._offsets = self._offsets, ends
        self._hand_over(step.version, step.step, state, step, before, ends, copy=copy)

    def publish_alone(self, state: NamedTensors, step: int, *, copy: bool = False) -> int:
        """The next version, made at the trainer's step `step` from what did not come through this log; as `publish`.
        Returns its number. Raises `ConfigError` where plans are consumed."""
        if self._partitions:
            raise ConfigError("a trainer that consumes plans publishes each version with its step")
        self._hand_over(self._version + 1, step, state, None, {}, {}, copy=copy)
        return self._version

    def flush(self) -> None:
        """Waits until everything handed over is committed. Raises what stopped it, `DeadlineExceeded`."""
        self._wait_below(1)

    def close(self, *, flush: bool = True) -> None:
        """Ends the background threads; without `flush`, what is not committed is given up."""
        try:
            if flush:
                self.flush()
        finally:
            self._committer.close()
            self._publisher.discard_from(self._committed + 1)
            self._publisher.close()

    def _hand_over(
        self,
        version: int,
        step: int,
        state: NamedTensors,
        event: TrainStep | None,
        before: Mapping[TopicPartition, int],
        after: Mapping[TopicPartition, int],
        *,
        copy: bool = False,
    ) -> None:
        self._wait_below(self._config.max_uncommitted)
        made_from = None if event is None else MadeFrom(event.consumed, event.plan_digest)
        if copy:
            published = self._publisher.publish(version, state, step=step, made_from=made_from)
        else:
            published = self._publisher.submit(version, step, as_state(state), made_from)
        self._version = version
        self._committer.take(Taken(version, event, published, None, before, after))

    def _wait_below(self, uncommitted: int) -> None:
        if not self._committer.wait_below(uncommitted, self._deadline_s):
            raise DeadlineExceeded(
                f"version {self._committed + 1} was not committed within {self._deadline_s:g} s: "
                f"{self._publisher.waiting_for()}"
            )

    def _on_committed(self, version: WeightVersion, step: TrainStep | None) -> None:
        self._last, self._committed = version, version.version
        self._publisher.committed(version.version)

    def _by_rank(self) -> tuple[int, ...]:
        return tuple(self._offsets[partition] for partition in self._partitions)

    def _history(self) -> History:
        topics = (VERSIONS, STEPS) if self._partitions else (VERSIONS,)
        events = [
            event
            for event in decoded(scan(self._log, topics, clock=self._clock, hidden=True))
            if isinstance(event, WeightVersion | TrainStep)
            and (event.model, event.lineage) == (self._model, self._lineage)
        ]
        # Repeats are dropped by their natural keys, the first one counts (law 4).
        versions = {event.version: event for event in reversed(events) if isinstance(event, WeightVersion)}
        steps = {event.step: event for event in reversed(events) if isinstance(event, TrainStep)}
        if self._partitions:
            return order_history(versions.values(), steps.values())
        return History(tuple(versions[number] for number in sorted(versions)), ())


def step_of(
    parts: Sequence[tuple[Plan, NDArray[np.float32]]],
    *,
    loss: float,
    grad_norm: float,
    learning_rate: float,
    duration_s: float,
    entropy: float = math.nan,
    truncated: int = 0,
    settings: Mapping[str, str] | None = None,
) -> TrainStep:
    """The `train-steps` event of a step: for each rank its plan and log pi of its trained tokens, in the plan's order.

    `entropy` in nats (NaN = not measured), `truncated` tokens whose ratio hit a bound. Raises `PlanViolation` where
    logprobs are missing, too many or not finite.
    """
    figures = [
        figures_of(
            plan,
            logp_S,
            loss=loss if rank == 0 else 0.0,
            entropy_sum=entropy * len(logp_S),
            truncated=truncated if rank == 0 else 0,
        )
        for rank, (plan, logp_S) in enumerate(parts)
    ]
    return train_step(
        parts[0][0].batch,
        figures,
        tuple(plan.consumed for plan, _ in parts),
        grad_norm=grad_norm,
        learning_rate=learning_rate,
        duration_s=duration_s,
        settings=dict(settings or {}),
    )
