"""`rollwire bench sync` in small on a real broker and S3 server: it measures what it says."""

from __future__ import annotations

import pytest

from rollwire.ops.bench.sync import bench_sync, cases
from rollwire.ops.bench.sync_run import where_of
from rollwire.ops.stack import StackInfo

pytestmark = pytest.mark.system


def test_a_version_is_served_and_every_part_of_the_way_is_measured(stack: StackInfo, prefix: str) -> None:
    where = where_of(stack, prefix)
    where.store().ensure_bucket()
    todo = cases(short=True, runs=1)
    figures = {f.name: f.value for f in bench_sync(where, todo, lambda _: None)}
    parts = ("copy", "store", "commit", "stage", "swap")
    total = sum(figures[f"sync.10mb_1.{part}_ms"] for part in parts)
    assert figures["sync.10mb_1.served_ms"] == pytest.approx(total, rel=0.5)  # medians of each
    assert all(figures[f"sync.10mb_1.{part}_ms"] > 0 for part in ("copy", "store", "commit", "stage"))
    assert 3 < figures["sync.10mb_1.changed_pct"] < 6
    assert 1 < figures["sync.10mb_1.delta_pct"] < 4
    assert 0 < figures["sync.10mb_1.pause_ms"] < figures["sync.10mb_1.swap_ms"]
    # Few chunks: rounding out to the grid counts for more than in weights of 100 MB.
    assert 0.9 < figures["sync.slice_bytes_ratio"] < 4
