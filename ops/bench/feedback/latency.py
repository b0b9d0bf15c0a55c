"""HDR histograms of several generators as one, and what is read off them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from hdrh.histogram import HdrHistogram  # type: ignore[import-untyped]

_US_PER_MS: Final = 1_000.0


def merged(histograms: Sequence[bytes]) -> HdrHistogram:
    """At least one histogram, as `Generator.run` encodes them: microseconds."""
    first, *others = (HdrHistogram.decode(one) for one in histograms)
    for other in others:
        first.add(other)
    return first


def percentile_ms(histogram: HdrHistogram, percentile: float) -> float:
    return float(histogram.get_value_at_percentile(percentile)) / _US_PER_MS


def max_ms(histogram: HdrHistogram) -> float:
    return float(histogram.get_max_value()) / _US_PER_MS
