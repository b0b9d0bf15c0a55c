"""One data-parallel rank: reads its own partition of `packed-batches`, resolves traces, computes, updates.

Rank 0 lives in the trainer's process, the others in their own (`ranks`); all run this same object.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import pairwise

import msgspec
import structlog
import torch

from rollwire.consumers.trainer.config import TrainerConfig
from rollwire.consumers.trainer.figures import Figures
from rollwire.consumers.trainer.gradient import Work, add_gradients, shuffled
from rollwire.consumers.trainer.history import BATCHES
from rollwire.consumers.trainer.plan import Arrays, Expected, check_plan
from rollwire.consumers.trainer.traces import TraceReader, routes_of
from rollwire.consumers.trainer.weights import TrainedWeights
from rollwire.kernels.policy.config import PolicyConfig
from rollwire.schemas.errors import PlanViolation, Refused
from rollwire.schemas.records import PackedBatch
from rollwire.streams.emit import decode_record
from rollwire.streams.seams.clock import Clock
from rollwire.streams.seams.log import Log, Record, TopicPartition
from rollwire.streams.seams.store import ObjectStore

_log = structlog.get_logger()


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """A plan that was read and checked: its digest, and the offset after it."""

    digest: str
    end: int


class RankWorker:
    """`all_reduce` adds the gradient vector over all ranks in place; with one rank it does nothing."""

    def __init__(
        self,
        log: Log,
        store: ObjectStore,
        policy_config: PolicyConfig,
        config: TrainerConfig,
        *,
        model: str,
        lineage: str,
        rank: int,
        clock: Clock,
        all_reduce: Callable[[torch.Tensor], None],
    ) -> None:
        # Thread count and algorithms change bits, so they are part of the recipe, not of the machine.
        torch.use_deterministic_algorithms(True)
        torch.set_num_threads(config.threads)
        self.weights = TrainedWeights(policy_config, config)
        self.plan: PackedBatch | None = None
        self._store = store
        self._policy_config = policy_config
        self._config = config
        self._model = model
        self._lineage = lineage
        self._rank = rank
        self._clock = clock
        self._all_reduce = all_reduce
        self._partition = TopicPartition(BATCHES, rank)
        self._reader = log.reader()
        self._traces = TraceReader(log, store, clock, deadline_s=config.read_deadline_s)
        self._waiting: deque[Record] = deque()
        self._arrays: list[Arrays] = []
        self._last_digest: str | None = None
        self._version = 0

    def start(self, version: int, offset: int, last_digest: str | None) -> None:
        """Read on from `offset`, holding `version`; `last_digest` is the plan of the last step taken."""
        self._reader.assign({self._partition: offset})
        self._waiting.clear()
        self._version = version
        self._last_digest = last_digest
        self.plan = None
        self.weights.clear()

    def read(self, timeout_s: float) -> Head | None:
        """The next plan, checked; `None` when it is not there after `timeout_s`. Raises `PlanViolation`, `OffsetLost`."""
        deadline_s = self._clock.monotonic_s() + timeout_s
        while (head := self._next()) is None:
            left_s = deadline_s - self._clock.monotonic_s()
            if left_s <= 0:
                return None
            # May end early with nothing: a position that moved past the end of pack's transaction is news to a reader.
            self._waiting.extend(self._reader.poll(8, left_s))
        return head

    def compute(self) -> Figures:
        """This rank's gradient of the plan just read, and what it measured."""
        plan = self.plan
        if plan is None:
            raise PlanViolation("there is no plan to compute")
        works = self._works(plan)
        if self._config.control and works:
            works = shuffled(works, seed=self._config.seed, step=plan.step, rank=self._rank)
        return add_gradients(
            self.weights.policy,
            works,
            self._config,
            total_sequences=plan.total_sequences,
            measure_free=self._config.measures_without_replay(plan.step),
        )

    def apply(self) -> float:
        """Adds the gradients over all ranks and takes the optimiser step; returns the gradient's norm."""
        plan = self.plan
        if plan is None:
            raise PlanViolation("there is no plan to apply")
        self._all_reduce(self.weights.gradient_N)
        norm = self.weights.update(plan.step)
        self._version = plan.base_version + 1
        self._last_digest = plan.plan_digest
        self.plan = None
        return norm

    def close(self) -> None:
        self._traces.close()
        self._reader.close()

    def _next(self) -> Head | None:
        """The first of the records at hand that is a plan for us."""
        while self._waiting:
            record = self._waiting.popleft()
            try:
                batch = decode_record(record)
            except Refused as refusal:
                raise PlanViolation(
                    f"{BATCHES}[{self._rank}] at {record.offset} was refused: {refusal}"
                ) from refusal
            if not isinstance(batch, PackedBatch):
                raise PlanViolation(
                    f"{BATCHES}[{self._rank}] at {record.offset} holds a {type(batch).__name__}"
                )
            if self._passes_by(batch):
                continue
            step = self._version + 1
            self._arrays = check_plan(
                batch,
                Expected(self._model, self._lineage, step, self._version, self._rank, self._config.ranks),
            )
            self.plan = batch
            return Head(digest=batch.plan_digest, end=record.offset + 1)
        return None

    def _passes_by(self, batch: PackedBatch) -> bool:
        """Not a filter of plans: before its first step a new lineage walks past the plans of older ones, and a
        repeat of the step just taken is dropped by its natural key (law 4)."""
        if batch.lineage != self._lineage:
            if self._version == 0:
                _log.info("trainer.other_lineage", lineage=batch.lineage, step=batch.step)
                return True
            return False
        repeat = batch.step == self._version and batch.plan_digest == self._last_digest
        if repeat:
            _log.warning("trainer.repeated_plan", step=batch.step)
        return repeat

    def _works(self, plan: PackedBatch) -> list[Work]:
        if not self._config.routing_replay:
            return [Work(arrays, None) for arrays in self._arrays]
        traces = self._traces.fetch({t for micro in plan.microbatches for t in micro.traces if t is not None})
        return [
            Work(
                arrays,
                routes_of(
                    micro.rollout_ids,
                    _lengths(arrays),
                    [None if t is None else traces[t] for t in micro.traces],
                    self._store,
                    layers=self._policy_config.num_hidden_layers,
                    experts=self._policy_config.num_experts,
                    top_k=self._policy_config.num_experts_per_tok,
                ),
            )
            for micro, arrays in zip(plan.microbatches, self._arrays, strict=True)
        ]


def _lengths(arrays: Arrays) -> list[int]:
    return [end - start for start, end in pairwise(arrays.cu_seqlens.tolist())]
