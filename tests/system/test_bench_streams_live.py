"""`rollwire bench streams` in small on a real broker: it measures what it says, and leaves no topic behind."""

from __future__ import annotations

import pytest
from confluent_kafka.admin import AdminClient

from rollwire.ops.bench.streams import Bench, faust_figures, latency_figures, ratio_figures, sizes
from rollwire.ops.stack import StackInfo


@pytest.fixture
def bench(stack: StackInfo) -> Bench:
    return Bench(stack.bootstrap, 2, 0, lambda _: None)


def _topics(bench: Bench) -> list[str]:
    client = AdminClient({"bootstrap.servers": bench.bootstrap, "broker.address.family": "v4"})
    return [name for name in client.list_topics(timeout=10).topics if name.startswith("bench-")]


@pytest.mark.system
def test_both_sides_are_measured_on_the_same_records(bench: Bench) -> None:
    figures = {figure.name: figure for figure in ratio_figures(bench, sizes(short=True)[0], 1)}
    assert figures["streams.ratio_2kb"].value > 0
    rates, sizes_ = figures["streams.rollouts_per_s_2kb"], figures["streams.mb_per_s_2kb"]
    assert rates.ratio == pytest.approx(figures["streams.ratio_2kb"].value)
    assert sizes_.ratio == pytest.approx(rates.ratio, rel=1e-3)
    # A rollout and its reward.
    assert 2_000 < sizes_.value * 1e6 / rates.value < 2_600
    assert figures["streams.assemble_cpu_us_2kb"].value > 0
    assert figures["streams.pack_cpu_us_2kb"].value > 0
    assert _topics(bench) == []


@pytest.mark.system
def test_latency_runs_from_the_timetable(bench: Bench) -> None:
    figures = {f.name: f.value for f in latency_figures(bench, sizes(short=True)[0], 1_000, 1.0)}
    assert 0 < figures["streams.latency_p50_ms"] <= figures["streams.latency_p99_ms"]
    assert figures["streams.latency_p99_ms"] <= figures["streams.latency_max_ms"] < 30_000
    assert figures["streams.latency_rollouts_per_s"] == 500
    assert 20 <= figures["streams.latency_groups"] <= 40
    assert _topics(bench) == []


@pytest.mark.system
def test_a_faust_agent_joins_the_same_groups(bench: Bench) -> None:
    figures = {figure.name: figure for figure in faust_figures(bench, sizes(short=True)[0], 1, groups=20)}
    rates = figures["streams.assemble_rollouts_per_s_2kb"]
    assert rates.value > 0
    assert rates.ratio == pytest.approx(figures["streams.over_faust"].value)
    assert _topics(bench) == []
