"""The boxes of a picture of lineage, the ways between them, and how many of a kind share one. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Literal, NamedTuple, TypeVar

from rollwire.consumers.audit.lineage import RolloutLine
from rollwire.consumers.audit.versions import ranges, runs

COLUMNS: Final = ("feedback", "rollouts and rewards", "groups", "plans", "steps", "versions", "fleets")
FEW: Final = 10  # rollouts that get a box each
SOME: Final = 8  # boxes of any other kind in a column
LISTED: Final = 200  # lines of what a box stands for
T = TypeVar("T")

Tone = Literal["plain", "focus", "quiet", "ended"]


class Cell(NamedTuple):
    """One rollout."""

    reward: float | None
    trained: bool | None
    erased: bool
    focus: bool
    tip: str


class Node(NamedTuple):
    name: str
    column: int  # of `COLUMNS`
    title: str
    lines: tuple[str, ...]
    tone: Tone = "plain"
    cells: tuple[Cell, ...] = ()
    listed: tuple[str, ...] = ()  # what it stands for, a line each


class Edge(NamedTuple):
    source: str
    target: str
    weight: int  # of how many it stands for
    focus: bool


class Graph(NamedTuple):
    title: str
    facts: str
    nodes: tuple[Node, ...]  # by column, from top to bottom
    edges: tuple[Edge, ...]
    findings: int


class Boxes:
    """Boxes and the ways between them, as they are found."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self._edges: dict[tuple[str, str], list[int]] = {}

    def join(self, source: str | None, target: str | None, *, focus: bool = False, weight: int = 1) -> None:
        if source is not None and target is not None:
            edge = self._edges.setdefault((source, target), [0, 0])
            edge[0] += weight
            edge[1] |= focus

    @property
    def edges(self) -> tuple[Edge, ...]:
        return tuple(Edge(s, t, weight, bool(focus)) for (s, t), (weight, focus) in self._edges.items())


def bucketed(items: Sequence[T], key: Callable[[T], int]) -> list[tuple[str, list[T]]]:
    """By number, ascending: a bucket each while they are few, else neighbours together, about as many in each."""
    by: dict[int, list[T]] = defaultdict(list)
    for item in items:
        by[key(item)].append(item)
    numbers = sorted(by)
    width = -(-len(numbers) // SOME) or 1
    found: list[tuple[str, list[T]]] = []
    for at in range(0, len(numbers), width):
        some = numbers[at : at + width]
        found.append((span(some), [item for number in some for item in by[number]]))
    return found


def span(numbers: Iterable[int]) -> str:
    """As `ranges` while that is short, else from where to where."""
    ordered = sorted(numbers)
    if len(list(runs(ordered))) <= 2:
        return ranges(ordered)
    return f"{ordered[0]} to {ordered[-1]}"


def asked_for(one: RolloutLine, focus: frozenset[str]) -> bool:
    return one.rollout_id in focus or any(said.feedback_id in focus for said in one.feedback)


def short_of(name: str) -> str:
    """A group's id, or a rollout's: what tells it from its neighbours is at the end."""
    group, dot, index = name.partition(".")
    return f"{group[:8]}…{group[-4:]}{dot}{index}"


def listed_of(lines: Iterable[str]) -> tuple[str, ...]:
    every = list(lines)
    return tuple(every[:LISTED]) + ((f"and {len(every) - LISTED:,} more",) if len(every) > LISTED else ())
