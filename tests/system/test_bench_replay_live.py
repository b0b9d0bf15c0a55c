"""`rollwire bench replay` in small on a real broker and S3 server: every side sees, or makes, what it should."""

from __future__ import annotations

import pytest

from rollwire.ops.bench.replay import reading
from rollwire.ops.bench.replay.load import QUICK, Size, filled
from rollwire.ops.bench.replay.run import stack_figures
from rollwire.ops.stack import StackInfo
from rollwire.ops.stores import stack_store
from rollwire.schemas.errors import LogError

pytestmark = pytest.mark.system

SMALL = QUICK._replace(small=Size("1kb", 64, 40), large=Size("100kb", 12_000, 2), weights_mb=1, versions=3)


def test_every_part_gives_its_ratio_and_its_rates(stack: StackInfo, prefix: str) -> None:
    stack_store(stack, None).ensure_bucket()
    figures = stack_figures(stack, SMALL, "all", lambda _: None, prefix.rstrip("."))
    found = {figure.name: figure for figure in figures}
    assert len(found) == len(figures)
    for size in ("1kb", "100kb"):
        bare = found[f"replay.bare_{size}_per_s"].value
        for side in ("records", "events", "verify", "export"):
            rate = found[f"replay.{side}_{size}_per_s"]
            assert rate.baseline == bare
            assert (rate.ratio or 0) > 0
    assert found["replay.verify_ratio_1kb"].value == pytest.approx(found["replay.verify_1kb_per_s"].ratio)
    assert found["replay.decode_ratio"].value == pytest.approx(found["replay.events_1kb_per_s"].ratio)
    assert found["rebuild.deltas_ratio"].value == pytest.approx(found["rebuild.deltas_mb_per_s"].ratio)


def test_records_have_the_size_they_are_named_after_and_a_side_that_misses_one_says_so(
    stack: StackInfo, prefix: str
) -> None:
    for size, nbytes in ((SMALL.small, 1_000), (SMALL.large, 100_000)):
        source = filled(stack.bootstrap, f"{prefix}{size.name}.", size, seed=1)
        assert source.records == size.records
        assert source.value_bytes / source.records == pytest.approx(nbytes, rel=0.25)
        missing = source._replace(value_bytes=source.value_bytes + 1)
        for side in (reading.bare, reading.bare_batches, reading.records):
            assert side(source) > 0
            with pytest.raises(LogError, match="saw"):
                side(missing)
