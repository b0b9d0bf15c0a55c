"""Routing traces above 512 KiB: into the store first, then claimed; the trainer gets the same ids back."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from rollwire.consumers.trainer.traces import trace_rows
from rollwire.kernels.routing.codec import encode_routes
from rollwire.producers.claims import claim_check
from rollwire.producers.emit import decode_record
from rollwire.producers.outbox import Outbox
from rollwire.producers.trajectory import Finished
from rollwire.schemas.codec import use_registry
from rollwire.schemas.errors import PlanViolation, Refused, RegistryUnavailable, StoreUnavailable
from rollwire.schemas.ids import new_group_id, rollout_id
from rollwire.schemas.records import Rollout, RoutingTrace, Segment, Span
from rollwire.streams.seams.clock import SystemClock
from rollwire.streams.seams.log import Record, TopicPartition
from rollwire.streams.seams.log_memory import MemoryLog
from rollwire.streams.seams.store_memory import MemoryStore

NOW_US = 1_767_225_600_000_000
GROUP = new_group_id(NOW_US, 42)
LAYERS, EXPERTS, TOP_K = 60, 384, 8


def ids_of(rows: int) -> NDArray[Any]:
    first = np.random.default_rng(rows).integers(0, EXPERTS, (rows, LAYERS, 1))
    return (first + np.arange(TOP_K) * 7) % EXPERTS


def finished(tokens: int) -> Finished:
    packed = encode_routes(ids_of(tokens - 1), EXPERTS, zstd=False)
    name = rollout_id(GROUP, 0)
    trace = RoutingTrace(
        rollout_id=name,
        group_id=GROUP,
        layers=tuple(range(LAYERS)),
        num_experts=EXPERTS,
        top_k=TOP_K,
        start_row=0,
        rows=tokens - 1,
        tokens=tokens,
        last_row="missing",
        encoding=packed.encoding,
        data=packed.data,
        claim=None,
        recorded_us=NOW_US,
    )
    rollout = Rollout(
        rollout_id=name,
        group_id=GROUP,
        index=0,
        group_size=1,
        model="org/policy",
        lineage="0197a1b2-0000-7000-8000-0000000000aa",
        environment="countdown",
        task_id="t",
        task="{}",
        token_ids=bytes(tokens),
        token_dtype="u1",
        segments=(
            Segment(kind="prompt", start=0, end=1),
            Segment(kind="sampled", start=1, end=tokens),
        ),
        loss_mask=b"\0" + b"\1" * (tokens - 1),
        logprobs=np.full(tokens - 1, -1, "<f4").tobytes(),
        spans=(Span(version=0, start=0, end=tokens - 1),),
        finish_reason="stop",
        temperature=1.0,
        top_k_experts=TOP_K,
        fleet="fleet",
        replica="fleet-0",
        seed=0,
        started_us=NOW_US,
        finished_us=NOW_US,
    )
    return Finished(rollout, trace)


def trace_of(one: Finished) -> RoutingTrace:
    assert one.trace is not None
    return one.trace


def written(log: MemoryLog, topic: str) -> list[Record]:
    reader = log.reader()
    reader.assign({TopicPartition(topic, p): 0 for p in range(log.partitions(topic))})
    return reader.poll(100, 1.0)


class Flaky(MemoryStore):
    """Away for the first calls."""

    failures = 2

    def create(self, key: str, data: bytes) -> bool:
        if self.failures:
            self.failures -= 1
            raise StoreUnavailable("away")
        return super().create(key, data)


def outbox(log: MemoryLog, store: MemoryStore | None, patience_s: float = 30.0) -> Outbox:
    return Outbox(log, source="test", clock=SystemClock(), patience_s=patience_s, retry_s=0.01, store=store)


@pytest.mark.parametrize("kind", [MemoryStore, Flaky])
def test_c42_a_large_trace_goes_through_the_store_and_back(kind: type[MemoryStore]) -> None:
    log, store = MemoryLog({"rollouts": 1, "routing-traces": 1}), kind()
    out = outbox(log, store)
    large, small = finished(1200), finished(40)
    out.put(large)
    out.put(small)
    assert out.flush(30.0)
    out.close()
    assert (out.written, out.refused) == (2, 0)
    first, second = (decode_record(record) for record in written(log, "routing-traces"))
    assert isinstance(first, RoutingTrace)
    assert first.data is None
    assert first.claim is not None
    assert first.claim.key.startswith("routing/org%2Fpolicy/")
    assert second == small.trace
    assert len(list(store.list("routing/"))) == 1
    assert (trace_rows(first, store) == ids_of(1199)).all()
    assert claim_check(trace_of(large), "org/policy", store) == first


def test_c42_without_a_store_it_is_refused_and_the_next_one_passes() -> None:
    log = MemoryLog({"rollouts": 1, "routing-traces": 1})
    out = outbox(log, None)
    out.put(finished(1200))
    out.put(finished(40))
    assert out.flush(30.0)
    out.close()
    assert (out.written, out.refused) == (1, 1)
    assert out.take_refused() == [GROUP]


def test_ids_that_are_no_routes_are_not_claimed() -> None:
    log, store = MemoryLog({"rollouts": 1, "routing-traces": 1}), MemoryStore()
    bad = finished(1200)
    ids = ids_of(1199)
    ids[7, 3] = 5
    twice = msgspec.structs.replace(trace_of(bad), data=encode_routes(ids, EXPERTS, zstd=False).data)
    with pytest.raises(Refused, match="twice"):
        claim_check(twice, "policy", store)
    out = outbox(log, store)
    out.put(bad._replace(trace=twice))
    assert out.flush(30.0)
    out.close()
    assert (out.written, out.refused) == (0, 1)
    assert list(store.list("")) == []


def test_a_store_that_stays_away_ends_the_outbox() -> None:
    store = Flaky()
    store.failures = 1_000_000
    out = outbox(MemoryLog({"rollouts": 1, "routing-traces": 1}), store, patience_s=0.05)
    out.put(finished(1200))
    assert not out.flush(30.0)
    out.close()
    with pytest.raises(StoreUnavailable):
        out.check()


class _Away:
    """A schema registry that does not answer."""

    def head(self, topic: str, schema: str) -> bytes:
        raise RegistryUnavailable("away")

    def schema_of(self, schema_id: int) -> str | None:
        raise RegistryUnavailable("away")


def test_a_registry_that_is_away_ends_the_outbox_and_is_told() -> None:
    use_registry(_Away())
    try:
        out = outbox(MemoryLog({"rollouts": 1, "routing-traces": 1}), None)
        out.put(finished(40))
        assert not out.flush(30.0)
        out.close()
    finally:
        use_registry(None)
    with pytest.raises(RegistryUnavailable):
        out.check()
    assert (out.written, out.refused) == (0, 0)


def test_a_claimed_trace_that_holds_something_else_is_found_by_the_trainer() -> None:
    store = MemoryStore()
    trace = claim_check(trace_of(finished(1200)), "policy", store)
    shorter = msgspec.structs.replace(trace, rows=1198, tokens=1199)
    with pytest.raises(PlanViolation, match="array_length"):
        trace_rows(shorter, store)
