"""Which part of each tensor a replica holds: a share of its first dimension, by name pattern."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from rollwire.consumers.weights.parts import Choose
from rollwire.consumers.weights.sums import Layout
from rollwire.schemas.errors import ConfigError


class Slice(NamedTuple):
    """Rows [n * rank // ranks, n * (rank + 1) // ranks) of the n of dimension 0, as tensor parallelism cuts them."""

    rank: int
    ranks: int


SliceSpec = Mapping[str, Slice]
"""Name pattern (`*`, `?`, `[...]`) -> slice; the first that fits counts. A tensor that none fits is held whole."""


def parse_slices(texts: Sequence[str]) -> dict[str, Slice]:
    """From `pattern=rank/ranks`. Raises `ConfigError`."""
    found: dict[str, Slice] = {}
    for text in texts:
        pattern, _, numbers = text.rpartition("=")
        rank, _, ranks = numbers.partition("/")
        if not (pattern and rank.isdecimal() and ranks.isdecimal() and int(rank) < int(ranks)):
            raise ConfigError(f"slice {text!r}: it is written pattern=rank/ranks, with 0 <= rank < ranks")
        found[pattern] = Slice(int(rank), int(ranks))
    return found


def choose_slices(spec: SliceSpec) -> Choose:
    """The flat elements that are held of each tensor. Whoever reads rounds them out to the chunk grid."""

    def choose(layout: Layout) -> dict[str, tuple[int, int]]:
        return {name: elements_of(shape, _of(spec, name)) for name, (_, shape) in layout.items()}

    return choose


def elements_of(shape: tuple[int, ...], part: Slice | None) -> tuple[int, int]:
    """Flat elements [start, end). A scalar is held whole."""
    size = 1
    for length in shape:
        size *= length
    if part is None or not shape or shape[0] == 0:
        return 0, size
    row = size // shape[0]
    return shape[0] * part.rank // part.ranks * row, shape[0] * (part.rank + 1) // part.ranks * row


def share_of(spec: SliceSpec) -> float:
    """What part of the weights is held, about: for planning. In (0, 1]."""
    return sum(1 / part.ranks for part in spec.values()) / len(spec) if spec else 1.0


def _of(spec: SliceSpec, name: str) -> Slice | None:
    return next((part for pattern, part in spec.items() if fnmatchcase(name, pattern)), None)
