"""What the producers write: groups of every kind that the processors must tell apart, drawn from the seed.

The truth about each is kept: what was sampled, from which versions, and whether it was good.
"""

from __future__ import annotations

import random
from typing import Final, Literal, NamedTuple

import msgspec

from rollwire.schemas.codec import encode_value, schema_for
from rollwire.schemas.records import Event, Rollout, Span
from rollwire.streams import synthetic
from rollwire.streams.emit import outgoing
from rollwire.streams.seams.log import Outgoing

MODEL: Final = "policy"
LINEAGE: Final = synthetic.LINEAGE
OTHER_LINEAGE: Final = "0198a5c0-0000-7000-8000-00000000dead"
DEADLINE_S: Final = 10.0
LIVE_DEADLINE_S: Final = 15.0
_SOURCE: Final = "rollwire/simulated-producer"
_SAMPLED: Final = 4  # tokens of a rollout
_PROMPT: Final = 2

Kind = Literal[
    "good",
    "mixed",  # its tokens are of several versions
    "stale",
    "future",
    "foreign",  # of a lineage that is not trained
    "equal",
    "unrewarded",  # one reward never comes
    "unscored",
    "conflicting",  # a repeat with other content
    "late",  # its last event comes after the deadline
    "single",
    "aborted",
    "answered",  # from here on: answers of live traffic
    "silent",  # nobody said anything
    "ruled",  # the same, and a rule says what that is worth
    "unjudged",  # its reward never comes
]
LIVE_KINDS: Final[tuple[Kind, ...]] = ("answered", "answered", "answered", "silent", "ruled", "unjudged")
_WEIGHTS: Final[dict[Kind, float]] = {
    "good": 10,
    "mixed": 6,
    "stale": 1.5,
    "future": 1,
    "foreign": 1,
    "equal": 1,
    "unrewarded": 1,
    "unscored": 1,
    "conflicting": 1,
    "late": 1,
    "single": 0.5,
    "aborted": 0.5,
}


class Planned(NamedTuple):
    """A record and when it is to be written."""

    at_us: int
    order: int
    record: Outgoing


class Truth(NamedTuple):
    """One group as it really was."""

    group_id: str
    kind: Kind
    rollouts: tuple[Rollout, ...]  # as they stand in a group
    rewards: tuple[float | None, ...]
    signals: int = 0

    @property
    def live(self) -> bool:
        return self.kind in LIVE_KINDS

    @property
    def oldest_version(self) -> int:
        return min(span.version for rollout in self.rollouts for span in rollout.spans)

    @property
    def newest_version(self) -> int:
        return max(span.version for rollout in self.rollouts for span in rollout.spans)


class Workload:
    """Opens groups; the truth of each stays in `groups`, every record that was ever planned in `poison` or there."""

    def __init__(self, rng: random.Random, *, max_lag: int, traces: bool, live: bool = False) -> None:
        self._rng = rng
        self._max_lag = max_lag
        self._traces = traces
        self._live = live
        self._order = 0
        self.groups: dict[str, Truth] = {}

    def open_answer(self, now_us: int, latest_version: int) -> list[Planned]:
        """The same of live traffic: an answer, and what its feedback earned it when its window closed."""
        rng = self._rng
        kind = rng.choice(LIVE_KINDS)
        group = synthetic.group_id(now_us, len(self.groups) + 1)
        answer = synthetic.answer(
            group,
            at_us=now_us,
            prompt=_PROMPT,
            sampled=_SAMPLED,
            version=self._version(latest_version, "good"),
            outcome=rng.choice(("answered", "answered", "tool_error")),
            model=MODEL,
        )
        value = None if kind in ("silent", "unjudged") else rng.choice((0.0, 0.5, 1.0))
        signals = rng.randint(1, 3) if kind == "answered" else 0
        plain = Rollout(**{name: getattr(answer, name) for name in Rollout.__struct_fields__})
        self.groups[group] = Truth(group, kind, (plain,), (value,), signals)
        events: list[Event] = [answer]
        if kind != "unjudged":
            events.append(synthetic.said(group, value, at_us=now_us, signals=signals))
        return self._spread(group, kind, events, now_us)

    def open_group(self, now_us: int, latest_version: int, kind: Kind | None = None) -> list[Planned]:
        """The records of a new group, opened now by an engine that serves `latest_version` (at least 0)."""
        rng = self._rng
        kind = kind or rng.choices(list(_WEIGHTS), list(_WEIGHTS.values()))[0]
        group = synthetic.group_id(now_us, len(self.groups) + 1)
        size = 1 if kind == "single" else rng.choice((2, 2, 3))
        rollouts = tuple(
            self._rollout(group, index, size, now_us, latest_version, kind) for index in range(size)
        )
        rewards = self._rewards(size, kind)
        self.groups[group] = Truth(group, kind, rollouts, rewards)
        events: list[Event] = []
        for rollout, value in zip(rollouts, rewards, strict=True):
            events.append(rollout)
            if self._traces:
                rows = _PROMPT + _SAMPLED - 1
                events.append(synthetic.trace(group, rollout.index, at_us=now_us, rows=rows))
            if not (kind == "unrewarded" and rollout.index == 0):
                events.append(synthetic.reward(group, rollout.index, value, at_us=now_us))
        return self._spread(group, kind, events, now_us)

    def poison(self, now_us: int) -> Planned:
        """Bytes that are no event, a cut one, one with an unknown schema."""
        rng = self._rng
        others = (("routing-traces",) if self._traces else ()) + (
            ("production-rollouts",) if self._live else ()
        )
        topic = rng.choice(("rollouts", "rewards", "groups", *others))
        value = rng.choice((b"", b"poison", b"\xc3\x01" + bytes(8), b"\xc3\x01" + bytes(40), None))
        return self._plan(now_us, Outgoing(topic, rng.randbytes(4), value))

    # -- inside -------------------------------------------------------------------------------------------------

    def _rollout(self, group: str, index: int, size: int, now_us: int, latest: int, kind: Kind) -> Rollout:
        rng = self._rng
        rollout = synthetic.rollout(
            group,
            index,
            size,
            at_us=now_us,
            prompt=_PROMPT,
            sampled=_SAMPLED,
            version=self._version(latest, kind),
            top_k=2 if self._traces else 0,
            finish_reason="abort" if kind == "aborted" and index == 0 else "stop",
            model=MODEL,
            seed=rng.randrange(1000),
        )
        if kind == "mixed" and index == 0:
            cut = rng.randint(1, _SAMPLED - 1)
            old = max(0, latest - rng.randint(1, self._max_lag + 2))
            spans = (Span(version=old, start=0, end=cut), Span(version=latest, start=cut, end=_SAMPLED))
            rollout = msgspec.structs.replace(rollout, spans=spans if old != latest else rollout.spans)
        if kind == "foreign":
            rollout = msgspec.structs.replace(rollout, lineage=OTHER_LINEAGE)
        return rollout

    def _version(self, latest: int, kind: Kind) -> int:
        if kind == "future":
            return latest + self._rng.randint(1, 3)
        if kind == "stale":
            return max(0, latest - self._max_lag - self._rng.randint(0, 2))
        return max(0, latest - self._rng.choice((0, 0, 0, 1)))

    def _rewards(self, size: int, kind: Kind) -> tuple[float | None, ...]:
        if kind == "equal":
            return (1.0,) * size
        if kind == "unscored":
            return (None,) * size
        values: list[float | None] = [float(index % 2) for index in range(size)]
        self._rng.shuffle(values)
        return tuple(values)

    def _spread(self, group: str, kind: Kind, events: list[Event], now_us: int) -> list[Planned]:
        """Each event at a moment of its own, in any order; some twice, some with a bad copy before them."""
        rng = self._rng
        planned: list[Planned] = []
        for event in events:
            at_us = now_us + round(rng.random() ** 2 * 2e6)
            record = outgoing(event, source=_SOURCE, time_us=now_us)
            planned.append(self._plan(at_us, record))
            if rng.random() < 0.1:
                planned.append(self._plan(at_us + rng.choice((0, 4_000_000, 30_000_000)), record))
            if isinstance(event, Rollout) and rng.random() < 0.05:
                planned.append(self._plan(now_us, _untiled(event, record)))
        if kind == "late":
            which = rng.randrange(len(planned))
            planned[which] = planned[which]._replace(
                at_us=now_us + round(DEADLINE_S * 1e6) + rng.choice((100_000, 60_000_000))
            )
        if kind == "conflicting":
            index = rng.randrange(len(self.groups[group].rollouts))
            other: Event = synthetic.reward(group, index, 0.5, at_us=now_us, verifier_version="2")
            if rng.random() < 0.5:
                rollout = self.groups[group].rollouts[index]
                other = msgspec.structs.replace(rollout, seed=rollout.seed + 1)
            at_us = now_us + round(rng.random() * 4e6)
            planned.append(self._plan(at_us, outgoing(other, source=_SOURCE, time_us=now_us)))
        return planned

    def _plan(self, at_us: int, record: Outgoing) -> Planned:
        self._order += 1
        return Planned(at_us, self._order, record)


def _untiled(rollout: Rollout, record: Outgoing) -> Outgoing:
    """The rollout with spans that leave tokens out: what no producer of ours can write, and others might."""
    bad = msgspec.structs.replace(rollout, spans=(Span(version=0, start=0, end=1),))
    return record._replace(value=encode_value(bad, schema_for(type(rollout))))
