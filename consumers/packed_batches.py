"""Step plans for a trainer of any kind: one rank's slices of `packed-batches` as numpy arrays. Needs no torch.

    reader = PackedBatchReader(log, store, model="policy", lineage=lineage)
    reader.start(held.version, held.offsets[0], held.plan_digest, held.newest_revert)  # of `VersionPublisher.start`
    for plan in reader.plans(timeout_s=60):
        ...                                                              # one optimiser step, then publish

Every plan is the next one and for the version held, or the reader halts with `PlanViolation`: order, base version, whose
it is, and the lag of every token (law 6). Reading commits nothing. A plan counts as used when `Plan.position` is
committed in the transaction of the version that was made from it; whoever starts again reads on from what is committed.

Legend: B sequences, T tokens end to end, S trained tokens in order, L layers, K experts a token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import structlog
from numpy.typing import NDArray

from rollwire.consumers.trainer.history import BATCHES
from rollwire.consumers.trainer.plan import Arrays, Expected, check_plan
from rollwire.consumers.trainer.seals import SealOpener
from rollwire.consumers.trainer.traces import TraceReader, routes_of
from rollwire.schemas.errors import Fenced, PlanViolation, Refused
from rollwire.schemas.records import OffsetRange, PackedBatch
from rollwire.streams.emit import decode_record
from rollwire.streams.seams.clock import Clock, SystemClock
from rollwire.streams.seams.log import Log, Record, TopicPartition
from rollwire.streams.seams.sealing import OpenKeys
from rollwire.streams.seams.store import ObjectStore

_log = structlog.get_logger()


class RoutingShape(NamedTuple):
    """Of the policy whose routing is replayed."""

    layers: int
    experts: int
    top_k: int


class Packed(NamedTuple):
    """One microbatch, ready to compute."""

    rollout_ids: tuple[str, ...]  # [B]
    arrays: Arrays
    routes_TLK: NDArray[np.int16] | None  # -1 = not recorded; None = routing is not replayed


class Plan(NamedTuple):
    """One rank's share of one optimiser step."""

    batch: PackedBatch  # the event: step, versions, groups, digest; what was sealed in it is open
    arrays: tuple[Arrays, ...]  # by microbatch
    microbatches: tuple[Packed, ...]  # the same with their routing traces; empty until they are resolved
    consumed: OffsetRange  # for `train-steps`
    sealed: int = 0  # sequences of live traffic, as the plan has them
    left_out: int = 0  # of them, those that open no more: their person was erased; they are not in `batch`

    @property
    def step(self) -> int:
        return self.batch.step

    @property
    def version(self) -> int:
        """The version that this step makes."""
        return self.batch.base_version + 1

    @property
    def position(self) -> Mapping[TopicPartition, int]:
        """What to commit, in the transaction of this step's version."""
        return {TopicPartition(self.consumed.topic, self.consumed.partition): self.consumed.end}


class PackedBatchReader:
    """Reads rank `rank` of `ranks`. `routing` asks for the routing traces; None reads none. `keys` opens the key store for
    the sealed tokens of live traffic, when there are some. Not thread-safe."""

    def __init__(
        self,
        log: Log,
        store: ObjectStore,
        *,
        model: str,
        lineage: str,
        rank: int = 0,
        ranks: int = 1,
        routing: RoutingShape | None = None,
        keys: OpenKeys | None = None,
        deadline_s: float = 30.0,
        clock: Clock | None = None,
    ) -> None:
        self._model = model
        self._lineage = lineage
        self._rank = rank
        self._ranks = ranks
        self._routing = routing
        self._opener = SealOpener(keys)
        self._clock = clock or SystemClock()
        self._store = store
        self._partition = TopicPartition(BATCHES, rank)
        self._reader = log.reader()
        self._traces = TraceReader(log, store, self._clock, deadline_s=deadline_s)
        self._waiting: deque[Record] = deque()
        self._last_digest: str | None = None
        self._newest_revert: int | None = None
        self._version = 0
        self._offset = 0

    @property
    def version(self) -> int:
        """The version held: the next plan is for it."""
        return self._version

    def start(
        self,
        version: int,
        offset: int,
        last_digest: str | None = None,
        newest_revert: int | None = None,
    ) -> None:
        """Read on from `offset`, holding `version`; `last_digest` is the plan of the last step taken, `newest_revert` the last
        version up to `version` that was a revert."""
        self._reader.assign({self._partition: offset})
        self._waiting.clear()
        self._version = version
        self._offset = offset
        self._last_digest = last_digest
        self._newest_revert = newest_revert

    def plans(self, *, timeout_s: float, until_step: int | None = None) -> Iterator[Plan]:
        """Plan after plan, traces resolved; each counts as taken when the next one is asked for. Ends when no plan came
        within `timeout_s`, or after `until_step`. Raises as `read` and `resolve`."""
        while until_step is None or self._version < until_step:
            plan = self.read(timeout_s)
            if plan is None:
                return
            yield self.resolve(plan)
            self.took(plan)

    def read(self, timeout_s: float) -> Plan | None:
        """The next plan, checked, its traces not read yet; `None` when it is not there after `timeout_s`, with 0: when the
        log at hand does not hold it. Raises `PlanViolation`, `OffsetLost`, `ConfigError`, `KeyMissing` and `StoreUnavailable`
        where sealed tokens cannot be opened though nobody erased them, and `Fenced` where the plan is for a revert that
        was made meanwhile: start again."""
        deadline_s = self._clock.monotonic_s() + timeout_s
        at_rest = False
        while (plan := self._next()) is None:
            left_s = max(0.0, deadline_s - self._clock.monotonic_s())
            if left_s == 0.0 and (at_rest or timeout_s > 0):
                return None
            stood = self._reader.positions()
            # May end early with nothing: a position that moved past the end of pack's transaction is news to a reader.
            self._waiting.extend(self._reader.poll(8, left_s))
            at_rest = not self._waiting and self._reader.positions() == stood
        return plan

    def resolve(self, plan: Plan) -> Plan:
        """The plan with its microbatches. Raises `PlanViolation` for a trace that is not what the plan says,
        `DeadlineExceeded` for one that does not come, `OffsetLost` for one that the log no longer holds."""
        micros = plan.batch.microbatches
        routes: list[NDArray[np.int16] | None] = [None] * len(micros)
        if self._routing is not None:
            traces = self._traces.fetch({t for micro in micros for t in micro.traces if t is not None})
            routes = [
                routes_of(
                    micro.rollout_ids,
                    [end - start for start, end in pairwise(arrays.cu_seqlens.tolist())],
                    [None if t is None else traces[t] for t in micro.traces],
                    self._store,
                    **self._routing._asdict(),
                )
                if micro.rollout_ids
                else None
                for micro, arrays in zip(micros, plan.arrays, strict=True)
            ]
        packed = zip(micros, plan.arrays, routes, strict=True)
        return plan._replace(
            microbatches=tuple(Packed(micro.rollout_ids, arrays, rows) for micro, arrays, rows in packed)
        )

    def took(self, plan: Plan) -> None:
        """The step was taken: the next plan is for the version it made."""
        self._version = plan.version
        self._last_digest = plan.batch.plan_digest
        self._offset = plan.consumed.end

    def close(self) -> None:
        self._traces.close()
        self._reader.close()

    def _next(self) -> Plan | None:
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
            expected = Expected(
                self._model, self._lineage, self._version + 1, self._version, self._rank, self._ranks
            )
            consumed = OffsetRange(
                topic=BATCHES, partition=self._rank, start=self._offset, end=record.offset + 1
            )
            check_plan(batch, expected)  # before keys are asked for
            batch, sealed, left_out = self._opener.opened(batch)
            return Plan(batch, tuple(check_plan(batch, expected)), (), consumed, sealed, left_out)
        return None

    def _passes_by(self, batch: PackedBatch) -> bool:
        """Not a filter of plans: before its first step a new lineage walks past the plans of older ones, after a revert
        those that did not know of it are passed over, and a repeat of the step just taken is dropped by its natural key
        (law 4)."""
        if batch.lineage != self._lineage:
            if self._version == 0:
                _log.info("trainer.other_lineage", lineage=batch.lineage, step=batch.step)
                return True
            return False
        if batch.newest_revert != self._newest_revert:
            if (batch.newest_revert or 0) > (self._newest_revert or 0):
                raise Fenced(
                    f"version {batch.newest_revert} was made by a revert after version {self._version}, which is held "
                    "here: start again, it goes on from there"
                )
            _log.info("trainer.passed_over", step=batch.step, reverted_at=self._newest_revert)
            return True
        repeat = batch.step == self._version and batch.plan_digest == self._last_digest
        if repeat:
            _log.warning("trainer.repeated_plan", step=batch.step)
        return repeat
