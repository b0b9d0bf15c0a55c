"""The figures of `rollwire bench replay`, from rounds in which all sides take turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import median
from typing import Final

from rollwire.ops.bench.replay import reading
from rollwire.ops.bench.replay.load import Source
from rollwire.ops.figures import Figure

Side = Callable[[Source], float]
"""Reads a source once; seconds."""

BARE: Final = "bare"
BASELINES: Final[Mapping[str, Side]] = {BARE: reading.bare, "bare_batches": reading.bare_batches}


def rounds(
    source: Source, sides: Mapping[str, Side], count: int, told: Callable[[str], None]
) -> dict[str, float]:
    """Of each side, and of the bare ones, the median of its seconds. Sides take turns, so that all of them meet the same
    neighbours; before they do, the broker's part is read once into the page cache."""
    every = {**BASELINES, **sides}
    reading.bare(source)
    taken: dict[str, list[float]] = {name: [] for name in every}
    for number in range(1, count + 1):
        for name, side in every.items():
            told(f"{source.size.name}: {name}, round {number} of {count}")
            taken[name].append(side(source))
    return {name: median(seconds) for name, seconds in taken.items()}


def rate_figures(source: Source, seconds: Mapping[str, float]) -> list[Figure]:
    """Records a second of every side but the bare one, which is their baseline."""
    size, records = source.size.name, source.records
    bare = records / seconds[BARE]
    return [
        Figure(
            name=f"replay.{name}_{size}_per_s",
            value=records / took,
            unit="records/s",
            baseline=None if name == BARE else bare,
        )
        for name, took in seconds.items()
    ]


def ratio(name: str, side: str, seconds: Mapping[str, float]) -> Figure:
    """The speed of a side over the bare consumer's."""
    return Figure(name=name, value=seconds[BARE] / seconds[side], unit="x")
