"""What was said about one rollout, as one number: the same whatever the order it is given in."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rollwire.schemas.rules.types import Rules, Signal


class Given(NamedTuple):
    """One accepted feedback event: what it says, and what orders it among others."""

    happened_us: int
    feedback_id: str
    signal: str
    value: float | None  # None = a text


class Scored(NamedTuple):
    """A reward and what it is made of."""

    reward: float | None  # None = nothing that is scored was said, and silence is worth nothing here
    components: tuple[tuple[str, float], ...]  # (signal, its worth), by name
    evidence: tuple[str, ...]  # ids of the events behind it, sorted; () = silence


def score(rules: Rules, outcome: str, given: Iterable[Given]) -> Scored:
    """The weighted mean of what the signals are worth; where none makes a reward by itself, what silence is worth.

    Every event's signal must be known to `rules` and its value checked. A pure function of the *set* of events: sums are
    exact (`math.fsum`), ties of `last` and `first` are broken by id.
    """
    by_signal: dict[str, list[Given]] = {}
    for event in given:
        if event.value is not None and rules.signals[event.signal].scored:
            by_signal.setdefault(event.signal, []).append(event)
    if not any(rules.signals[name].alone for name in by_signal):
        return Scored(rules.silent(outcome), (), ())
    names = sorted(by_signal)
    worths = [
        rules.signals[name].worth_of(_folded(rules.signals[name], sorted(by_signal[name]))) for name in names
    ]
    weights = [rules.signals[name].weight for name in names]
    total = math.fsum(w * worth for w, worth in zip(weights, worths, strict=True))
    # Rounding may leave the hull of the worths by an ulp, which is no value that a signal has.
    reward = min(max(total / math.fsum(weights), min(worths)), max(worths))
    evidence = sorted(event.feedback_id for events in by_signal.values() for event in events)
    return Scored(reward, tuple(zip(names, worths, strict=True)), tuple(evidence))


def _folded(signal: Signal, events: Sequence[Given]) -> float:
    """The one value of several; `events` are sorted, so by time, then by id."""
    values = [event.value for event in events if event.value is not None]
    match signal.fold:
        case "last":
            return values[-1]
        case "first":
            return values[0]
        case "any" | "max":
            return max(values)
        case "all" | "min":
            return min(values)
        case "mean":
            return min(max(math.fsum(values) / len(values), min(values)), max(values))
