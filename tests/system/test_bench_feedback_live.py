"""`rollwire bench feedback` in small on a real broker, Redis and gateway: it measures what it says, under every fault."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollwire.ops.bench.feedback.attribution import Bench, Sizes, attribution_figures
from rollwire.ops.bench.feedback.phases import BATCH, FAULTS, QUICK
from rollwire.ops.bench.feedback.run import gateway_figures, workers
from rollwire.ops.stack import StackInfo

pytestmark = pytest.mark.system

SMALL = QUICK._replace(
    connections=(16,), single_s=0.5, batch_s=0.5, bare_events=2_000, steady_s=1.0, burst_s=1.0, around_burst_s=0.5, flood_s=0.5,
    fault_s=0.5, broker_pause_s=1.5,
)  # fmt: skip


def test_t6_nothing_is_lost_or_repeated_under_load_and_faults(
    stack: StackInfo, prefix: str, tmp_path: Path
) -> None:
    """The broker stands still, Redis is killed, the gateway is killed: all are back at the end."""
    figures = {f.name: f for f in gateway_figures(stack, tmp_path, SMALL, lambda _: None, prefix)}
    assert figures["feedback.lost"].value == 0
    assert figures["feedback.repeated"].value == 0
    assert figures["feedback.ledger_gap"].value == 0
    # The account by the hour says the same, from the topic alone, and so do the gateway's own counters.
    assert figures["ledger.gap"].value == figures["ledger.unclosed"].value == 0
    assert [f.value for name, f in figures.items() if name.startswith("ledger.gap.")]
    assert figures["ledger.live_gap"].value == 0
    assert (figures["ledger.live_gap"].baseline or 0) > 0
    assert figures["feedback.single_ratio"].value > 0
    assert figures["feedback.batch_ratio"].value > 0
    assert 0 < figures["feedback.p99_ms"].value <= figures["feedback.p999_ms"].value
    # What the broker's pause cost is in the latencies from the planned time.
    assert figures["feedback.broker.max_ms"].value >= 1_000 * SMALL.broker_pause_s * 0.8
    # Callers lost patience meanwhile, and asked again.
    assert figures["feedback.broker.tries_again"].value > 0
    # The gateway's death was met: asks were sent again, and all were answered in the end.
    assert figures["feedback.kill.tries_again"].value > 0
    asked = sum(
        figures[f"feedback.{fault}.asked"].value * (BATCH if fault == "flood" else 1) for fault in FAULTS
    )
    assert 0 < (figures["feedback.repeated"].baseline or 0) <= asked


def test_attribution_and_a_plain_agent_are_measured_on_the_same_events(
    stack: StackInfo, tmp_path: Path
) -> None:
    ours, table = workers(stack, tmp_path)
    bench = Bench(stack.bootstrap, lambda _: None)
    sizes = Sizes(answers=400, rounds=1, before_s=1.0, stopped_s=2.0)
    figures = {f.name: f for f in attribution_figures(bench, ours, table, sizes)}
    rates = figures["attribution.per_s"]
    assert rates.ratio == pytest.approx(figures["attribution.ratio"].value)
    assert rates.value > 0
    assert figures["attribution.catchup"].value > 0
