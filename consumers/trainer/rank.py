"""One data-parallel rank: reads its own partition of `packed-batches`, resolves traces, computes, updates.

Rank 0 lives in the trainer's process, the others in their own (`ranks`); all run this same object.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import torch

from rollwire.consumers.packed_batches import PackedBatchReader, Plan, RoutingShape
from rollwire.consumers.trainer.config import TrainerConfig
from rollwire.consumers.trainer.figures import Figures
from rollwire.consumers.trainer.gradient import Work, add_gradients, shuffled
from rollwire.consumers.trainer.learner import Head
from rollwire.consumers.trainer.weights import TrainedWeights
from rollwire.kernels.policy.config import PolicyConfig
from rollwire.schemas.errors import PlanViolation
from rollwire.schemas.records import PackedBatch
from rollwire.streams.seams.clock import Clock
from rollwire.streams.seams.log import Log
from rollwire.streams.seams.sealing import OpenKeys
from rollwire.streams.seams.store import ObjectStore


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
        keys: OpenKeys | None = None,
    ) -> None:
        # Thread count and algorithms change bits, so they are part of the recipe, not of the machine.
        torch.use_deterministic_algorithms(True)
        torch.set_num_threads(config.threads)
        self.weights = TrainedWeights(policy_config, config)
        self._plan: Plan | None = None
        self._config = config
        self._rank = rank
        self._all_reduce = all_reduce
        self._reader = PackedBatchReader(
            log,
            store,
            model=model,
            lineage=lineage,
            rank=rank,
            ranks=config.ranks,
            routing=RoutingShape(
                policy_config.num_hidden_layers, policy_config.num_experts, policy_config.num_experts_per_tok
            )
            if config.routing_replay or config.routing_filter
            else None,
            keys=keys,
            deadline_s=config.read_deadline_s,
            clock=clock,
        )

    @property
    def plan(self) -> PackedBatch | None:
        """The plan that was read and is not applied yet."""
        return None if self._plan is None else self._plan.batch

    def start(
        self, version: int, offset: int, last_digest: str | None, newest_revert: int | None = None
    ) -> None:
        """Read on from `offset`, holding `version`; `last_digest` is the plan of the last step taken, `newest_revert` the
        last version up to `version` that was a revert."""
        self._reader.start(version, offset, last_digest, newest_revert)
        self._plan = None
        self.weights.clear()

    def read(self, timeout_s: float) -> Head | None:
        """The next plan, checked; `None` when it is not there after `timeout_s`. Raises `PlanViolation`, `OffsetLost`."""
        plan = self._reader.read(timeout_s)
        if plan is None:
            return None
        self._plan = plan
        return Head(digest=plan.batch.plan_digest, end=plan.consumed.end)

    def compute(self) -> Figures:
        """This rank's gradient of the plan just read, and what it measured."""
        if self._plan is None:
            raise PlanViolation("there is no plan to compute")
        plan = self._reader.resolve(self._plan)
        works = [Work(packed.arrays, packed.routes_TLK) for packed in plan.microbatches if packed.rollout_ids]
        if self._config.control and works:
            works = shuffled(works, seed=self._config.seed, step=plan.step, rank=self._rank)
        figures = add_gradients(
            self.weights.policy,
            works,
            self._config,
            total_sequences=plan.batch.total_sequences,
            measure_free=self._config.measures_without_replay(plan.step),
        )
        return msgspec.structs.replace(
            figures, production_sequences=plan.sealed, erased_sequences=plan.left_out
        )

    def apply(self) -> float:
        """Adds the gradients over all ranks and takes the optimiser step; returns the gradient's norm."""
        plan = self._plan
        if plan is None:
            raise PlanViolation("there is no plan to apply")
        self._all_reduce(self.weights.gradient_N)
        norm = self.weights.update(plan.step)
        self._reader.took(plan)
        self._plan = None
        return norm

    def close(self) -> None:
        self._reader.close()
