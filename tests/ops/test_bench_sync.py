"""`rollwire bench sync` without a stack: its weights, and its figures from made-up times."""

from __future__ import annotations

import pytest

from rollwire.ops.bench.sync import SLICES, Case, Sample, case_figures, cases, slice_figures
from rollwire.ops.bench.sync_weights import MovingWeights, shapes
from rollwire.schemas.records import Claim, WeightVersion

CLAIM = Claim(key="k", size=1, sha256="0" * 64)
EVENT = WeightVersion(
    model="m",
    lineage="L",
    version=1,
    base_version=0,
    kind="delta",
    step=1,
    manifest=CLAIM,
    anchor=None,
    checkpoint=None,
    state_digest="d",
    full_bytes=1_000,
    stored_bytes=40,
    changed_elements=2,
    total_elements=50,
    published_us=1,
)


def sample(times: float, fetched: tuple[int, ...] = (40,)) -> Sample:
    return Sample(
        served=times, copy=times / 10, store=times / 2, commit=1.0, stage=times / 4, swap=1.0, pause=0.5,
        put_get=10.0, memcpy=times / 20, event=EVENT, fetched=fetched,
    )  # fmt: skip


@pytest.mark.parametrize("nbytes", [10_000_000, 100_000_000, 1_000_000_000])
def test_sizes_are_what_they_are_called(nbytes: int) -> None:
    elements = sum(rows * columns for rows, columns in shapes(nbytes).values())
    assert nbytes <= 2 * elements < nbytes + 2 * 5_632


def test_weights_move_as_real_ones_do() -> None:
    weights = MovingWeights(10_000_000)
    before = {name: t.bits.copy() for name, t in weights.state.items()}
    weights.step()
    changed = sum(int((before[name] != t.bits).sum()) for name, t in weights.state.items())
    assert 0.03 < changed / (weights.nbytes / 2) < 0.06
    assert weights.flat.size == weights.nbytes


def test_figures_are_medians_and_the_bars_are_named_once() -> None:
    samples = [sample(100.0), sample(400.0), sample(200.0)]
    figures = {f.name: f for f in case_figures(Case("100mb_1", 1, 1, 3), samples)}
    assert figures["sync.served_ms"].value == figures["sync.100mb_1.served_ms"].value == 200.0
    assert figures["sync.served_ms"].ratio == 20.0
    assert figures["sync.pause_ms"].value == 0.5
    assert figures["sync.100mb_1.delta_pct"].value == 4.0
    big = {f.name: f.value for f in case_figures(Case("1gb_1", 1, 1, 3), samples)}
    assert big["sync.blocked_ratio"] == 2.0
    assert "sync.served_ms" not in big
    assert [
        f.value for f in slice_figures([sample(1.0, (10, 11, 10, 10)), sample(1.0, (10, 10, 12, 10))])
    ] == [1.2]
    every = cases(short=False, runs=6)
    assert {case.name for case in every} == {"10mb_1", "100mb_1", "100mb_8", "1gb_1", "slices"}
    assert [case.replicas for case in every if case.sliced] == [SLICES]
