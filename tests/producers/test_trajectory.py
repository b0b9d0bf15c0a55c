"""What becomes of an engine's arrays: spans, segments, masks and routes, or a clear error; never padding (C01, C02, C17)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from rollwire.consumers.trainer.traces import routes_of
from rollwire.kernels.routing.codec import decode_routes
from rollwire.producers.emit import decode_record, outgoing
from rollwire.producers.trajectory import Finished, Origin, Trajectory, narrowest_dtype, spans_of
from rollwire.schemas.errors import ConfigError
from rollwire.schemas.ids import new_group_id
from rollwire.schemas.records import Event, RoutingTrace, Segment, Span
from rollwire.streams.seams.engine import Sampled
from rollwire.streams.seams.environment import Task
from rollwire.streams.seams.log import Record
from rollwire.streams.seams.store_memory import MemoryStore

NOW_US = 1_767_225_600_000_000
GROUP = new_group_id(NOW_US, 42)
ORIGIN = Origin(
    model="policy",
    lineage="0197a1b2-0000-7000-8000-0000000000aa",
    environment="countdown",
    fleet="fleet",
    replica="fleet-0",
    token_dtype="u1",
    temperature=1.0,
    num_experts=8,
    moe_layers=None,
)


def trajectory(prompt: int = 4) -> Trajectory:
    task = Task("task-1", "{}", np.arange(prompt, dtype=np.int64))
    return Trajectory(GROUP, 1, 8, task, 7, NOW_US)


def sampled(
    count: int, *, rows: int | None, versions: list[int] | None = None, reason: str = "stop"
) -> Sampled:
    return Sampled(
        f"{GROUP}.1",
        np.arange(count, dtype=np.int64) + 10,
        np.linspace(-1, -0.5, count, dtype=np.float32),
        np.array([3] * count if versions is None else versions, dtype=np.int64),
        None if rows is None else np.tile(np.array([rows % 8, (rows + 1) % 8], dtype=np.uint8), (rows, 2, 1)),
        reason,
    )


def through_the_codec(event: Event) -> Event:
    out = outgoing(event, source="test", time_us=NOW_US)
    return decode_record(Record(out.topic, 0, 0, 0, out.key, out.value, out.headers))


def rows_of(trace: RoutingTrace) -> NDArray[Any]:
    assert trace.data is not None
    shape = (trace.rows, len(trace.layers), trace.top_k)
    return decode_routes(trace.encoding, trace.data, shape, trace.num_experts)


def check_both(finished: Finished) -> None:
    assert finished.rollout is not None
    assert through_the_codec(finished.rollout) == finished.rollout
    if finished.trace is not None:
        assert through_the_codec(finished.trace) == finished.trace


def test_one_turn() -> None:
    one = trajectory()
    one.add_sampled(sampled(3, rows=6))
    finished = one.finish(ORIGIN, "stop", NOW_US + 5)
    check_both(finished)
    rollout, trace = finished
    assert rollout is not None
    assert trace is not None
    assert rollout.rollout_id == f"{GROUP}.1"
    assert rollout.token_ids == bytes([0, 1, 2, 3, 10, 11, 12])
    assert rollout.loss_mask == bytes([0, 0, 0, 0, 1, 1, 1])
    assert rollout.segments == (
        Segment(kind="prompt", start=0, end=4),
        Segment(kind="sampled", start=4, end=7),
    )
    assert rollout.spans == (Span(version=3, start=0, end=3),)
    assert rollout.top_k_experts == 2
    assert np.frombuffer(rollout.logprobs, "<f4").tolist() == [-1.0, -0.75, -0.5]
    assert (trace.start_row, trace.rows, trace.layers, trace.top_k) == (0, 6, (0, 1), 2)


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 3)), min_size=1, max_size=6))
def test_c02_spans_tile_the_sampled_tokens_and_give_the_versions_back(steps: list[tuple[int, int]]) -> None:
    versions: list[int] = []
    version = 0
    for length, rise in steps:
        versions += [version] * length
        version += rise
    spans = spans_of(np.array(versions, dtype=np.int64))
    assert [s.version for span in spans for s in [span] * (span.end - span.start)] == versions
    assert [span.start for span in spans] == [0, *[span.end for span in spans[:-1]]]
    assert len(spans) == len(steps)
    one = trajectory()
    one.add_sampled(sampled(len(versions), rows=None, versions=versions))
    check_both(one.finish(ORIGIN, "stop", NOW_US))


def test_two_turns_with_a_tool_between() -> None:
    one = trajectory()
    one.add_sampled(sampled(3, rows=6))
    one.add_tool(np.array([5, 6], dtype=np.int64))
    assert one.token_ids.tolist() == [0, 1, 2, 3, 10, 11, 12, 5, 6]
    one.add_sampled(sampled(2, rows=10, versions=[4, 4]))
    finished = one.finish(ORIGIN, "stop", NOW_US)
    check_both(finished)
    rollout, trace = finished
    assert rollout is not None
    assert trace is not None
    assert [segment.kind for segment in rollout.segments] == ["prompt", "sampled", "tool", "sampled"]
    assert rollout.loss_mask == bytes([0, 0, 0, 0, 1, 1, 1, 0, 0, 1, 1])
    assert rollout.spans == (Span(version=3, start=0, end=3), Span(version=4, start=3, end=5))
    assert one.sampled_ids.tolist() == [10, 11, 12, 10, 11]
    # Rows 0..5 are those of the first turn, whose weights chose the tokens; later rows come from the second.
    routes_RLK = rows_of(trace)
    assert len(routes_RLK) == 10
    assert (routes_RLK[:6] == [6, 7]).all()
    assert (routes_RLK[6:] == [2, 3]).all()


def test_an_abort_after_a_tool_leaves_the_tool_out() -> None:
    one = trajectory()
    one.add_sampled(sampled(3, rows=6))
    one.add_tool(np.array([5, 6], dtype=np.int64))
    one.add_sampled(sampled(0, rows=0, reason="abort"))
    finished = one.finish(ORIGIN, "abort", NOW_US)
    check_both(finished)
    rollout, trace = finished
    assert rollout is not None
    assert trace is not None
    assert rollout.finish_reason == "abort"
    assert len(rollout.loss_mask) == 7
    assert trace.rows == 6


def test_an_abort_before_the_first_token_hands_nothing_back() -> None:
    one = trajectory()
    one.add_sampled(sampled(0, rows=None, reason="abort"))
    assert one.finish(ORIGIN, "abort", NOW_US) == Finished(None, None)


def test_without_routes_no_trace_is_promised() -> None:
    one = trajectory()
    one.add_sampled(sampled(3, rows=None))
    rollout, trace = one.finish(ORIGIN, "length", NOW_US)
    assert trace is None
    assert rollout is not None
    assert rollout.top_k_experts == 0


@pytest.mark.parametrize("rows", [5, 7, 8])
def test_c17_another_number_of_rows_is_an_error(rows: int) -> None:
    with pytest.raises(ConfigError, match=f"{rows} rows of routes, expected 6"):
        trajectory().add_sampled(sampled(3, rows=rows))


def test_c17_a_row_of_the_last_token_counts_where_the_engine_says_so() -> None:
    one = trajectory()
    one.add_sampled(sampled(3, rows=7)._replace(routes_of_last=True))
    finished = one.finish(ORIGIN, "stop", NOW_US)
    check_both(finished)
    trace = finished.trace
    assert trace is not None
    assert (trace.rows, trace.tokens, trace.last_row) == (7, 7, "recorded")
    for rows in (5, 6, 8):
        with pytest.raises(ConfigError, match=f"{rows} rows of routes, expected 7"):
            trajectory().add_sampled(sampled(3, rows=rows)._replace(routes_of_last=True))


def test_a_turn_without_routes_is_missing_not_zero_and_not_the_end_of_the_trace() -> None:
    one = trajectory()
    one.add_sampled(sampled(3, rows=6))
    one.add_tool(np.array([5, 6], dtype=np.int64))
    one.add_sampled(sampled(2, rows=None))
    finished = one.finish(ORIGIN, "stop", NOW_US)
    check_both(finished)
    trace = finished.trace
    assert trace is not None
    assert (trace.rows, trace.tokens, trace.last_row) == (10, 11, "missing")
    assert (rows_of(trace)[:6] == [6, 7]).all()
    assert (rows_of(trace)[6:] == -1).all()
    # One byte an id has no word for "not recorded": then there is no trace rather than a wrong one.
    assert one.finish(ORIGIN._replace(pack_routes=False), "stop", NOW_US).trace is None


def test_c19_a_resumed_rollout_that_returns_the_full_trace_says_where_it_starts() -> None:
    one = trajectory(prompt=4)
    one.add_sampled(sampled(3, rows=6))
    full = sampled(4, rows=10, versions=[4] * 4)
    with pytest.raises(ConfigError, match="10 rows of routes without a start, for 5 new tokens"):
        one.add_sampled(full._replace(routes_start=None))
    assert one.sampled_count == 3
    one.add_sampled(full)
    trace = one.finish(ORIGIN, "stop", NOW_US).trace
    assert trace is not None
    assert trace.rows == 10
    assert (rows_of(trace)[:6] == [6, 7]).all()


def test_one_byte_an_id_is_a_setting() -> None:
    one = trajectory()
    one.add_sampled(sampled(3, rows=6))
    packed, plain = (one.finish(ORIGIN._replace(pack_routes=pack), "stop", NOW_US) for pack in (True, False))
    check_both(packed)
    check_both(plain)
    assert packed.trace is not None
    assert plain.trace is not None
    assert (packed.trace.encoding, plain.trace.encoding) == ("bits", "u1")
    assert packed.trace.data is not None
    assert plain.trace.data is not None
    assert len(packed.trace.data) * 2 == len(plain.trace.data) == 24
    assert (rows_of(packed.trace) == rows_of(plain.trace)).all()


def test_arrays_that_disagree_are_an_error() -> None:
    good = sampled(5, rows=None)
    for bad in (
        good._replace(logprobs=good.logprobs[:4]),
        good._replace(versions=np.append(good.versions, 3)),
    ):
        with pytest.raises(ConfigError, match="5 tokens"):
            trajectory().add_sampled(bad)


def test_layers_must_be_named_rightly() -> None:
    one = trajectory()
    one.add_sampled(sampled(3, rows=6))
    with pytest.raises(ConfigError, match="moe_layers"):
        one.finish(ORIGIN._replace(moe_layers=(1, 3, 5)), "stop", NOW_US)
    trace = one.finish(ORIGIN._replace(moe_layers=(1, 3)), "stop", NOW_US).trace
    assert trace is not None
    assert trace.layers == (1, 3)


def test_an_unknown_finish_is_an_error() -> None:
    one = trajectory()
    one.add_sampled(sampled(3, rows=6))
    with pytest.raises(ConfigError, match="cosmic"):
        one.finish(ORIGIN, "cosmic ray", NOW_US)


@pytest.mark.parametrize(
    ("vocab", "dtype"), [(20, "u1"), (256, "u1"), (257, "u2"), (65_536, "u2"), (65_537, "u4")]
)
def test_tokens_take_the_narrowest_dtype(vocab: int, dtype: str) -> None:
    assert narrowest_dtype(vocab) == dtype


@pytest.mark.parametrize("pack", [True, False])
def test_the_trainer_gets_the_routes_that_the_engine_recorded(pack: bool) -> None:
    rng = np.random.default_rng(5)
    routes = rng.random((6, 3, 8)).argsort(axis=2)[:, :, :2].astype(np.uint8)
    one = trajectory()
    one.add_sampled(sampled(3, rows=None)._replace(routes=routes))
    trace = one.finish(ORIGIN._replace(pack_routes=pack), "stop", NOW_US).trace
    assert trace is not None
    read = through_the_codec(trace)
    assert isinstance(read, RoutingTrace)
    routes_TLK = routes_of(
        [trace.rollout_id, "another"], [7, 2], [read, None], MemoryStore(), layers=3, experts=8, top_k=2
    )
    assert (routes_TLK[:6] == routes).all()
    assert (routes_TLK[6:] == -1).all()
