"""The benchmark of events measures what it says, on events that the codec takes."""

from __future__ import annotations

from rollwire.ops.bench.events import TOKENS, bench_events, sample_events
from rollwire.schemas.records import Group, PackedBatch, Rollout


def test_events_have_the_sizes_that_are_named() -> None:
    events = sample_events(1)
    rollout, group, plan = events["rollout"], events["group"], events["packed_batch"]
    assert isinstance(rollout, Rollout)
    assert isinstance(group, Group)
    assert isinstance(plan, PackedBatch)
    assert len(rollout.token_ids) == TOKENS == 30
    assert len(rollout.logprobs) == 40
    assert len(group.members) == 8
    assert plan.total_sequences == 512
    assert sum(len(m.rollout_ids) for m in plan.microbatches) == 512
    assert sample_events(1) == events
    assert sample_events(2) != events


def test_every_figure_has_a_baseline_of_the_same_run() -> None:
    figures = {figure.name: figure for figure in bench_events(repeats=1, slice_s=0.002)}
    assert len(figures) == 20
    for event in ("rollout", "routing_trace", "group", "packed_batch"):
        for way in ("encode", "decode"):
            ours = figures[f"bench.events.{event}.{way}_per_s"]
            bare = figures[f"bench.events.{event}.{way}_vs_fastavro_per_s"]
            assert ours.value == bare.value > 0
            assert ours.baseline is not None
            assert bare.baseline is not None
            assert bare.ratio is not None
            assert bare.ratio < 1.5  # the checks are not free, so this cannot honestly be beaten by far
        size = figures[f"bench.events.{event}.value_bytes"]
        assert size.ratio is not None
        assert size.ratio < 1
