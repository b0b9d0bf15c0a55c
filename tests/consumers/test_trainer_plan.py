"""The trainer's pure parts: what it asserts of a plan, of history, of routing traces."""

from __future__ import annotations

import hashlib

import msgspec
import numpy as np
import pytest

from rollwire.consumers.trainer.config import TrainerConfig
from rollwire.consumers.trainer.history import check_joined, order_history
from rollwire.consumers.trainer.measure import lag_histogram, routes_differing
from rollwire.consumers.trainer.plan import Expected, check_agreement, check_plan
from rollwire.consumers.trainer.rehearsal import TINY as POLICY
from rollwire.consumers.trainer.rehearsal import Rehearsal, plan, sequences
from rollwire.consumers.trainer.traces import TraceReader, routes_of
from rollwire.schemas.errors import DeadlineExceeded, OffsetLost, PlanViolation
from rollwire.schemas.records import Claim, LagCount, OffsetRange, PackedBatch, Position, RoutingTrace
from rollwire.streams.emit import outgoing
from rollwire.streams.seams.clock import SystemClock
from rollwire.streams.seams.log import Outgoing, TopicPartition
from rollwire.streams.seams.log_memory import MemoryLog
from rollwire.streams.seams.store_memory import MemoryStore

LINEAGE = "0197a1b2-0000-7000-8000-0000000000aa"
SPEC = Rehearsal(POLICY, LINEAGE, lag=2)


def _plan(step: int = 5) -> PackedBatch:
    stands = [Position(topic="routing-traces", partition=0, offset=i) for i in range(SPEC.sequences)]
    return plan(SPEC, step, stands)[0]


def _expected(step: int = 5) -> Expected:
    return Expected("policy", LINEAGE, step, step - 1, 0, 1)


def test_a_good_plan_becomes_arrays() -> None:
    arrays = check_plan(_plan(), _expected())
    assert len(arrays) == 2
    assert sum(a.tokens_T.size for a in arrays) == _plan().total_tokens
    assert {int(v) for a in arrays for v in a.versions_S} == {2, 4}


@pytest.mark.parametrize(
    "change",
    [
        {"model": "other"},
        {"lineage": "0197a1b2-0000-7000-8000-0000000000bb"},
        {"step": 6},
        {"step": 4},
        {"base_version": 5},
        {"base_version": 3},
        {"rank": 1},
        {"ranks": 2},
        {"max_lag_versions": 1},
        {"oldest_version": 5},
    ],
)
def test_a_plan_that_is_not_the_expected_one_halts(change: dict[str, object]) -> None:
    with pytest.raises(PlanViolation):
        check_plan(msgspec.structs.replace(_plan(), **change), _expected())


@pytest.mark.parametrize(("version", "holds"), [(1, False), (2, True), (4, True), (5, False)])
def test_the_lag_of_every_token_is_asserted_inclusively(version: int, holds: bool) -> None:
    batch = _plan()
    micro = batch.microbatches[0]
    versions_S = np.frombuffer(micro.versions, "<i8").copy()
    versions_S[3] = version
    changed = msgspec.structs.replace(micro, versions=versions_S.tobytes())
    batch = msgspec.structs.replace(batch, microbatches=(changed, *batch.microbatches[1:]))
    if holds:
        check_plan(batch, _expected())
    else:
        with pytest.raises(PlanViolation, match="behind 4"):
            check_plan(batch, _expected())


def test_ranks_must_hold_slices_of_one_plan() -> None:
    check_agreement(["a", "a"], 3)
    with pytest.raises(PlanViolation, match="step 3"):
        check_agreement(["a", "b"], 3)


def test_warm_up_is_linear_then_constant() -> None:
    config = TrainerConfig(learning_rate=1e-3, warmup_steps=4)
    assert [config.rate(step) for step in (1, 2, 4, 5, 100)] == [2.5e-4, 5e-4, 1e-3, 1e-3, 1e-3]
    assert TrainerConfig(warmup_steps=0).rate(1) == TrainerConfig().learning_rate


def test_settings_name_all_that_enters_the_bits() -> None:
    settings = TrainerConfig(control=True).settings(
        torch_version="2", policy="{}", cpu="x86_64 AVX2", code="0.1.0"
    )
    assert settings["control"] == "True"
    assert settings["threads"] == "1"
    assert settings["learning_rate"] == "0.0002"


def test_lags_are_counted_per_token() -> None:
    counts = lag_histogram(np.array([4, 4, 2, 4], np.int64), 4)
    assert counts == (LagCount(lag=0, tokens=3), LagCount(lag=2, tokens=1))


def test_differing_routes_are_sets_and_only_of_recorded_rows() -> None:
    recorded = np.array([[[0, 1]], [[2, 3]], [[-1, -1]]], np.int16)
    free = np.array([[[1, 0]], [[2, 1]], [[0, 1]]], np.int16)
    assert routes_differing(recorded, free) == (1, 2)


def test_history_refuses_holes_and_gaps() -> None:
    with pytest.raises(OffsetLost, match="passed over"):
        check_joined(
            [OffsetRange(topic="packed-batches", partition=0, start=0, end=3)],
            [OffsetRange(topic="packed-batches", partition=0, start=4, end=5)],
            2,
        )
    assert order_history([], []).versions == ()


def _log_with_traces(count: int) -> tuple[MemoryLog, list[RoutingTrace], list[Position]]:
    log = MemoryLog({"routing-traces": 2})
    spec = SPEC._replace(sequences=count)
    traces = [one.trace for one in sequences(spec, 1)]
    writer = log.writer()
    for index, trace in enumerate(traces):
        writer.write(
            [outgoing(trace, source="t", time_us=1_767_225_600_000_000)._replace(partition=index % 2)]
        )
    writer.close()
    stands = [Position(topic="routing-traces", partition=i % 2, offset=i // 2) for i in range(count)]
    return log, traces, stands


def test_traces_are_found_in_any_order_and_again() -> None:
    log, traces, stands = _log_with_traces(40)
    # A cache of one byte keeps nothing: every way back is a seek.
    for cache_bytes in (1, 1 << 20):
        reader = TraceReader(log, MemoryStore(), SystemClock(), cache_bytes=cache_bytes, seek_records=3)
        for chosen in ([30, 31, 4], [5], [4, 39], list(range(40)), [0]):
            found = reader.fetch([stands[i] for i in chosen])
            assert [found[stands[i]] for i in chosen] == [traces[i] for i in chosen]
        reader.close()


def test_a_position_without_a_trace_is_named() -> None:
    log, _, _ = _log_with_traces(4)
    reader = TraceReader(log, MemoryStore(), SystemClock(), deadline_s=0.2)
    with pytest.raises(DeadlineExceeded, match="at 2"):
        reader.fetch([Position(topic="routing-traces", partition=0, offset=2)])
    with pytest.raises(OffsetLost):
        TraceReader(log, MemoryStore(), SystemClock()).fetch(
            [Position(topic="routing-traces", partition=0, offset=7)]
        )
    with pytest.raises(PlanViolation, match="groups"):
        reader.fetch([Position(topic="groups", partition=0, offset=0)])
    writer = log.writer()
    writer.write([Outgoing("routing-traces", b"k", b"not an event", (), 0)])
    with pytest.raises(PlanViolation, match="refused"):
        reader.fetch([Position(topic="routing-traces", partition=0, offset=2)])
    log.trim(TopicPartition("routing-traces", 0), 1)
    with pytest.raises(OffsetLost):
        TraceReader(log, MemoryStore(), SystemClock()).fetch(
            [Position(topic="routing-traces", partition=0, offset=0)]
        )


def test_routes_have_minus_one_where_nothing_was_recorded() -> None:
    trace = sequences(SPEC, 1)[0].trace
    length = trace.rows + 1
    routes = routes_of(
        [trace.rollout_id, "x.0"], [length, 3], [trace, None], MemoryStore(), layers=2, experts=4, top_k=2
    )
    assert routes.shape == (length + 3, 2, 2)
    assert (routes[: trace.rows] >= 0).all()
    assert (routes[trace.rows :] == -1).all()


def test_a_claimed_trace_is_fetched_and_a_foreign_one_refused() -> None:
    trace = sequences(SPEC, 1)[0].trace
    data = trace.data or b""
    store = MemoryStore()
    store.create("routes", data)
    claim = Claim(key="routes", size=len(data), sha256=hashlib.sha256(data).hexdigest())
    claimed = msgspec.structs.replace(trace, data=None, claim=claim)
    ids, lengths = [trace.rollout_id], [trace.rows + 1]
    direct = routes_of(ids, lengths, [trace], store, layers=2, experts=4, top_k=2)
    assert (routes_of(ids, lengths, [claimed], store, layers=2, experts=4, top_k=2) == direct).all()
    for changed in (
        msgspec.structs.replace(trace, rollout_id="0197a1b2-0000-7000-8000-0000000000aa.3"),
        msgspec.structs.replace(trace, layers=(0, 2)),
        msgspec.structs.replace(trace, top_k=1),
        msgspec.structs.replace(trace, start_row=2),
    ):
        with pytest.raises(PlanViolation):
            routes_of(ids, lengths, [changed], store, layers=2, experts=4, top_k=2)
