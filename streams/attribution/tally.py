"""Live counts over the rollouts that a worker holds: per version and signal, and coverage per outcome class."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

from rollwire.streams.attribution.fold import Case, summed


class Share(NamedTuple):
    """What one rollout adds to the tables. Taken off again as it was added: nothing is counted that is not held."""

    version: int
    outcome: str
    closed: bool
    scored: bool
    signals: tuple[tuple[str, int, float], ...]


class _Cell:
    __slots__ = ("count", "total")

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0


class _Row:
    __slots__ = ("closed", "rollouts", "scored", "signalled")

    def __init__(self) -> None:
        self.rollouts = self.closed = self.signalled = self.scored = 0


def share_of(case: Case) -> Share | None:
    """None for a case without a rollout: nobody knows its version yet."""
    if case.closed is not None:
        closed = case.closed
        return Share(closed.version, closed.outcome, True, closed.scored, closed.signals)
    if case.answered is not None:
        return Share(case.answered.version, case.answered.outcome, False, False, summed(case.taken.values()))
    return None


class Tally:
    """Sums of shares. Thread-confined."""

    def __init__(self) -> None:
        self._counts: dict[tuple[int, str], _Cell] = defaultdict(_Cell)
        self._rows: dict[str, _Row] = defaultdict(_Row)

    def add(self, share: Share | None, sign: int = 1) -> None:
        """`sign` -1 takes it off."""
        if share is None:
            return
        row = self._rows[share.outcome]
        row.rollouts += sign
        row.closed += sign * share.closed
        row.scored += sign * share.scored
        row.signalled += sign * bool(share.signals)
        for signal, count, total in share.signals:
            cell = self._counts[share.version, signal]
            cell.count += sign * count
            cell.total += sign * total
            if cell.count == 0:
                del self._counts[share.version, signal]
        if row.rollouts == 0:
            del self._rows[share.outcome]

    def more(self, version: int, outcome: str, signal: str, value: float, *, first: bool) -> None:
        """One more event of an open rollout that is counted already; `first`: nobody said anything about it before."""
        cell = self._counts[version, signal]
        cell.count += 1
        cell.total += value
        if first:
            self._rows[outcome].signalled += 1

    def counts(self) -> list[dict[str, Any]]:
        """By version, signal."""
        return [
            {"version": version, "signal": signal, "events": cell.count, "mean": cell.total / cell.count}
            for (version, signal), cell in sorted(self._counts.items())
        ]

    def coverage(self) -> list[dict[str, Any]]:
        """By outcome class: rollouts whose window is open or lately closed, and those that anybody said anything about."""
        return [
            {
                "outcome": outcome,
                "rollouts": row.rollouts,
                "closed": row.closed,
                "signalled": row.signalled,
                "scored": row.scored,
                "coverage": row.signalled / row.rollouts,
            }
            for outcome, row in sorted(self._rows.items())
        ]


def tally_of(cases: Iterable[Case]) -> Tally:
    """The tally of cases, from nothing."""
    tally = Tally()
    for case in cases:
        tally.add(share_of(case))
    return tally
