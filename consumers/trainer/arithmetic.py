"""A trainer whose model is arithmetic on integers: the real commits, checkpoints, publications and deltas, at no cost.

Its weights (`sums`) are a function of the rollouts it trained, how often and in which order, and of nothing else: neither
of times nor of offsets. So the digest of any version proves what a lineage was trained on, and a simulation or a fault
test compares it with `fold` over the plans. It predicts nothing: loss, gradient norm, entropy and rate are 0, and the
sampler's logprobs count as its own, so that the mismatch is 0. Needs no torch.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Final

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load as load_arrays
from safetensors.numpy import save as save_arrays

from rollwire.consumers.packed_batches import PackedBatchReader, Plan
from rollwire.consumers.trainer.checkpoint_store import DueCheckpoint, Part, read_checkpoint, read_vector
from rollwire.consumers.trainer.config import TrainerConfig
from rollwire.consumers.trainer.figures import Figures, figures_of
from rollwire.consumers.trainer.learner import Head
from rollwire.consumers.trainer.life import run_sessions
from rollwire.consumers.trainer.pipeline import Run
from rollwire.consumers.trainer.sums import NOTHING, Sums, fold, state_of, sums_of
from rollwire.consumers.weights.publisher import PublisherConfig
from rollwire.kernels.tensors import State, tensor
from rollwire.schemas.errors import DeadlineExceeded, DeltaCorrupt, PlanViolation
from rollwire.schemas.records import Claim, PackedBatch, WeightVersion
from rollwire.schemas.release import code_version
from rollwire.streams.seams.clock import Clock, SystemClock
from rollwire.streams.seams.log import Log
from rollwire.streams.seams.sealing import OpenKeys
from rollwire.streams.seams.store import ObjectStore
from rollwire.streams.seams.work import Threads, Work

_NONE: Final = np.zeros(0, np.float32)
_VECTOR: Final = "sums"
_PARAMETERS: Final = tuple(Part(name=name, shape=t.shape) for name, t in sorted(state_of(NOTHING).items()))


class ArithmeticLearner:
    """All ranks of one trainer in one process and thread: rank r's slice is read from partition r."""

    def __init__(
        self,
        log: Log,
        store: ObjectStore,
        config: TrainerConfig,
        *,
        model: str,
        lineage: str,
        clock: Clock,
        keys: OpenKeys | None = None,
    ) -> None:
        self._store = store
        self._config = config
        self._model = model
        self._lineage = lineage
        self._clock = clock
        self._readers = [
            PackedBatchReader(
                log,
                store,
                model=model,
                lineage=lineage,
                rank=rank,
                ranks=config.ranks,
                keys=keys,
                deadline_s=config.read_deadline_s,
                clock=clock,
            )
            for rank in range(config.ranks)
        ]
        self._plans: list[Plan] = []  # of the next step, by rank, as far as they were read
        self._since_s = 0.0  # when rank 0's was
        self._sums = NOTHING

    @property
    def settings(self) -> dict[str, str]:
        return {"learner": "arithmetic", "ranks": str(self._config.ranks), "code": code_version()}

    @property
    def plan(self) -> PackedBatch | None:
        return self._plans[0].batch if self._plans else None

    @property
    def sums(self) -> Sums:
        return self._sums

    def begin(self) -> None:
        """Version 0 has trained on nothing."""
        self._sums = NOTHING

    def restore(self, claim: Claim) -> tuple[int, ...]:
        checkpoint = read_checkpoint(self._store, claim, lineage=self._lineage, parameters=_PARAMETERS)
        try:
            arrays = load_arrays(read_vector(self._store, checkpoint, _VECTOR))
            layout = state_of(NOTHING)
            self._sums = sums_of({name: tensor(t.dtype, t.shape, arrays[name]) for name, t in layout.items()})
        except (SafetensorError, KeyError) as error:
            raise DeltaCorrupt(f"checkpoint {claim.key} does not hold the sums: {error}") from error
        return checkpoint.next_offsets

    def start(
        self,
        version: int,
        offsets: Sequence[int],
        last_digest: str | None,
        newest_revert: int | None = None,
    ) -> None:
        for reader, offset in zip(self._readers, offsets, strict=True):
            reader.start(version, offset, last_digest, newest_revert)
        self._plans.clear()

    def move(
        self, version: int, offsets: Sequence[int], last_digest: str | None, newest_revert: int | None
    ) -> None:
        self.start(version, offsets, last_digest, newest_revert)

    def read(self, timeout_s: float) -> list[Head] | None:
        """With several ranks: what one partition shows already, another may show later; both are the same transaction."""
        for reader in self._readers[len(self._plans) :]:
            plan = reader.read(timeout_s)
            if plan is None:
                if self._plans and self._clock.monotonic_s() - self._since_s > self._config.read_deadline_s:
                    raise DeadlineExceeded(
                        f"rank {len(self._plans)} got no plan of step {self._plans[0].step} within "
                        f"{self._config.read_deadline_s:g} s, though rank 0 has its slice of it"
                    )
                return None
            if not self._plans:
                self._since_s = self._clock.monotonic_s()
            self._plans.append(plan)
        return [Head(digest=plan.batch.plan_digest, end=plan.consumed.end) for plan in self._plans]

    def compute(self) -> list[Figures]:
        return [
            figures_of(plan, np.concatenate([_NONE, *(arrays.logp_S for arrays in plan.arrays)]))
            for plan in self._plans
        ]

    def apply(self) -> float:
        if len(self._plans) < len(self._readers):
            raise PlanViolation("there is no plan to apply")
        self._sums = fold(self._sums, [plan.batch for plan in self._plans])
        for reader, plan in zip(self._readers, self._plans, strict=True):
            reader.took(plan)
        self._plans.clear()
        return 0.0

    def rate(self, step: int) -> float:
        return 0.0

    def published(self) -> State:
        return state_of(self._sums)

    def checkpoint(self, step: int, next_offsets: tuple[int, ...]) -> DueCheckpoint:
        sums = self._sums
        return DueCheckpoint(
            self._store,
            [(_VECTOR, save_arrays({name: t.bits.reshape(t.shape) for name, t in state_of(sums).items()}))],
            model=self._model,
            lineage=self._lineage,
            step=step,
            updates=sums.steps,
            next_offsets=next_offsets,
            parameters=_PARAMETERS,
            settings=self.settings,
        )

    def close(self) -> None:
        for reader in self._readers:
            reader.close()


def arithmetic_run(
    log: Log,
    store: ObjectStore,
    config: TrainerConfig,
    *,
    prefix: str,
    model: str,
    lineage: str,
    stop: threading.Event,
    until_step: int | None = None,
    clock: Clock | None = None,
    publisher_config: PublisherConfig | None = None,
    work: Work | None = None,
    keys: OpenKeys | None = None,
) -> Run:
    """What a `Session` is made of; with `work=Inline()` it is driven by hand."""
    clock = clock or SystemClock()
    return Run(
        log=log,
        store=store,
        learner=lambda: ArithmeticLearner(
            log, store, config, model=model, lineage=lineage, clock=clock, keys=keys
        ),
        config=config,
        publisher_config=publisher_config,
        hf_config=None,
        prefix=prefix,
        model=model,
        lineage=lineage,
        until_step=until_step,
        stopped=stop.is_set,
        clock=clock,
        work=work or Threads(),
    )


def run_arithmetic_trainer(
    log: Log,
    store: ObjectStore,
    config: TrainerConfig,
    *,
    prefix: str,
    model: str,
    lineage: str,
    stop: threading.Event,
    until_step: int | None = None,
    clock: Clock | None = None,
    publisher_config: PublisherConfig | None = None,
    keys: OpenKeys | None = None,
) -> WeightVersion | None:
    """As `run.run_trainer`, with the same transactional id, group, events, objects and errors."""
    run = arithmetic_run(
        log,
        store,
        config,
        prefix=prefix,
        model=model,
        lineage=lineage,
        stop=stop,
        until_step=until_step,
        clock=clock,
        publisher_config=publisher_config,
        keys=keys,
    )
    return run_sessions(run, stop.wait)
