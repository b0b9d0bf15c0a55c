"""Routing traces of a step, read by reference from `routing-traces`.

A plan names where each sequence's trace stands. Consecutive steps use almost consecutive records, so the reader goes
on where it was, keeps what it passed by in a bounded cache, and seeks only where a record lies behind it or far ahead.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollwire.kernels.routing.codec import check_distinct, decode_routes
from rollwire.schemas.errors import DeadlineExceeded, PlanViolation, Refused
from rollwire.schemas.records import Position, RoutingTrace
from rollwire.streams.emit import decode_record
from rollwire.streams.seams.clock import Clock
from rollwire.streams.seams.log import Log, Record, TopicPartition
from rollwire.streams.seams.store import ObjectStore

TOPIC = "routing-traces"


class TraceReader:
    """Fetches traces by position. Not thread-safe.

    `cache_bytes` bounds the records that were passed by and are kept; `seek_records` is how far ahead a record may lie
    before a seek is cheaper than reading on.
    """

    def __init__(
        self,
        log: Log,
        store: ObjectStore,
        clock: Clock,
        *,
        deadline_s: float = 30.0,
        cache_bytes: int = 64 << 20,
        seek_records: int = 5_000,
    ) -> None:
        self._log = log
        self._reader = log.reader()
        self._store = store
        self._clock = clock
        self._deadline_s = deadline_s
        self._cache_limit = cache_bytes
        self._seek_records = seek_records
        self._cache: dict[Position, Record] = {}
        self._cached_bytes = 0
        self._next: dict[TopicPartition, int] = {}  # where the reader stands

    def fetch(self, wanted: Iterable[Position]) -> dict[Position, RoutingTrace]:
        """The traces at `wanted`, claim checks resolved.

        Raises `PlanViolation` for a position that holds no trace, `OffsetLost` for one that is no longer in the log,
        `DeadlineExceeded` for one that does not come.
        """
        found: dict[Position, Record] = {}
        missing: set[Position] = set()
        for position in wanted:
            if position.topic != TOPIC:
                raise PlanViolation(f"a trace is said to stand in {position.topic!r}, not in {TOPIC!r}")
            cached = self._cache.get(position)
            if cached is None:
                missing.add(position)
            else:
                found[position] = cached
        if missing:
            self._go_to(missing)
            self._read(missing, found)
        return {position: self._decode(position, record) for position, record in found.items()}

    def close(self) -> None:
        self._reader.close()

    def _go_to(self, missing: set[Position]) -> None:
        first: dict[TopicPartition, int] = {}
        for position in missing:
            partition = TopicPartition(position.topic, position.partition)
            first[partition] = min(position.offset, first.get(partition, position.offset))
        if set(first) - set(self._next):
            # A partition that was not read before: those that were go on where they stand.
            self._next = {**first, **self._next}
            self._reader.assign(self._next)
        for partition, offset in first.items():
            ahead = offset - self._next[partition]
            if ahead < 0 or ahead > self._seek_records:
                self._reader.seek(partition, offset)
                self._next[partition] = offset

    def _read(self, missing: set[Position], found: dict[Position, Record]) -> None:
        deadline = self._clock.monotonic_s() + self._deadline_s
        while missing:
            for record in self._reader.poll(1_000, 0.1):
                position = Position(topic=record.topic, partition=record.partition, offset=record.offset)
                self._next[TopicPartition(record.topic, record.partition)] = record.offset + 1
                if position in missing:
                    missing.discard(position)
                    found[position] = record
                self._keep(position, record)
            passed = [p for p in missing if self._next[TopicPartition(p.topic, p.partition)] > p.offset]
            if passed:
                raise PlanViolation(f"the plan names {_at(passed[0])} as a trace, but no record stands there")
            if missing and self._clock.monotonic_s() > deadline:
                raise DeadlineExceeded(
                    f"{len(missing)} routing traces, {_at(min(missing, key=_order))} first, did not come within "
                    f"{self._deadline_s:g} s: is the broker up?"
                )

    def _keep(self, position: Position, record: Record) -> None:
        if position not in self._cache:
            self._cache[position] = record
            self._cached_bytes += len(record.value or b"")
        while self._cached_bytes > self._cache_limit and self._cache:
            oldest = next(
                iter(self._cache)
            )  # dicts keep the order of insertion: the record passed longest ago
            self._cached_bytes -= len(self._cache.pop(oldest).value or b"")

    def _decode(self, position: Position, record: Record) -> RoutingTrace:
        try:
            event = decode_record(record)
        except Refused as refusal:
            raise PlanViolation(f"the trace at {_at(position)} was refused: {refusal}") from refusal
        if not isinstance(event, RoutingTrace):
            raise PlanViolation(f"{_at(position)} holds a {type(event).__name__}, not a routing trace")
        return event


def trace_rows(trace: RoutingTrace, store: ObjectStore) -> NDArray[np.integer[Any]]:
    """The expert ids [rows, L, K] of one trace, -1 where they were not recorded; a claim check is fetched and verified."""
    data = trace.data
    if data is None:
        if trace.claim is None:
            raise PlanViolation(f"trace of {trace.rollout_id} has neither data nor a claim check")
        data = store.get(trace.claim.key, sha256=trace.claim.sha256)
    shape = (trace.rows, len(trace.layers), trace.top_k)
    try:
        ids_RLK = decode_routes(trace.encoding, data, shape, trace.num_experts)
        if trace.claim is not None:  # data inside the event was checked with it
            check_distinct(ids_RLK, trace.num_experts)
    except Refused as refusal:
        raise PlanViolation(f"trace of {trace.rollout_id}: {refusal}") from refusal
    return ids_RLK


def routes_of(
    rollout_ids: Sequence[str],
    lengths_B: Sequence[int],
    traces: Sequence[RoutingTrace | None],
    store: ObjectStore,
    *,
    layers: int,
    experts: int,
    top_k: int,
) -> NDArray[np.int16]:
    """Expert ids [T, L, K] of a microbatch, -1 where none were recorded (a last token was never an input).

    Nothing is invented: a sequence without a trace has -1 throughout, and its router is free. Raises `PlanViolation`
    where a trace belongs to another rollout or model.
    """
    routes_TLK = np.full((sum(lengths_B), layers, top_k), -1, np.int16)
    start = 0
    for rollout_id, length, trace in zip(rollout_ids, lengths_B, traces, strict=True):
        if trace is not None:
            if trace.rollout_id != rollout_id:
                raise PlanViolation(f"the trace of {trace.rollout_id} was named for {rollout_id}")
            if trace.layers != tuple(range(layers)) or (trace.num_experts, trace.top_k) != (experts, top_k):
                raise PlanViolation(
                    f"trace of {rollout_id}: layers {trace.layers}, {trace.top_k} of {trace.num_experts} experts; the "
                    f"policy has {layers} layers, {top_k} of {experts}"
                )
            if trace.tokens != length or trace.start_row < 0 or trace.start_row + trace.rows > length:
                raise PlanViolation(
                    f"trace of {rollout_id}: rows [{trace.start_row}, {trace.start_row + trace.rows}) of {trace.tokens} "
                    f"tokens; the plan has {length}"
                )
            first = start + trace.start_row
            routes_TLK[first : first + trace.rows] = trace_rows(trace, store)
        start += length
    if int(routes_TLK.max(initial=-1)) >= experts:
        raise PlanViolation(f"an expert id of {int(routes_TLK.max())} among {experts} experts")
    return routes_TLK


def _order(position: Position) -> tuple[int, int]:
    return position.partition, position.offset


def _at(position: Position) -> str:
    return f"{position.topic}[{position.partition}] at {position.offset}"
