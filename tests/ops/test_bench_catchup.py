"""The catch-up benchmark in small: real paths over real objects, and its bars."""

from __future__ import annotations

from rollwire.ops.bench.catchup import bench_catchup


def test_a_hundred_versions_are_a_few_objects_and_at_most_twice_a_direct_delta() -> None:
    figures = {figure.name: figure.value for figure in bench_catchup(mib=1, starts=4, rates=[1e-5])}
    assert figures["catchup.objects"] <= 8
    assert figures["catchup.bytes_ratio"] <= 2
    assert figures["catchup.worst_objects"] <= 8
    assert figures["catchup.lr1e-5.chain_ratio"] > 4  # what it would be delta by delta
    assert figures["catchup.lr1e-5.load_ms"] > 0
