"""The ledger by topic and hour, as it is answered: what came, where it went, what is open, and every difference by name.

    received = accepted + refused + shed + pending      for every topic and hour
    open     = started - closed                         for every flow

An hour is that of the broker's timestamp, in UTC: no process's clock and no machine's time zone is in it. A record is counted
in the hour in which it was received, whenever it was decided.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Final, Literal

import msgspec

HOUR_MS: Final = 3_600_000

Flow = Literal["groups", "cohorts", "plans", "feedback windows", "dead letters"]
FLOWS: Final[dict[Flow, str]] = {
    "groups": "a group's first record, to the group or the fate that `assemble` made of it",
    "cohorts": "a group, to the fate that `pack` gave it",
    "plans": "a step plan of one rank, to the step that took it or the revert that passes it over",
    "feedback windows": "an answer, to the reward of what people said or, where nobody did, its fate",
    "dead letters": "a refusal, to the mark that replayed or dropped it",
}
"""What is opened by one event and closed by another."""

Wrong = Literal["missing", "extra"]


def hour_of(timestamp_ms: int) -> int:
    """Hours since 1970."""
    return timestamp_ms // HOUR_MS


def hour_name(hour: int) -> str:
    """`hour`: since 1970. As in 2026-11-30T06, in UTC."""
    return datetime.fromtimestamp(hour * 3_600, UTC).strftime("%Y-%m-%dT%H")


class HourLine(msgspec.Struct, frozen=True, kw_only=True):
    """One topic's account of one hour."""

    topic: str
    hour: str
    received: int
    accepted: int
    refused: int
    shed: int
    pending: int
    extra: int  # twice what may be once, or made from what does not exist

    @property
    def missing(self) -> int:
        """Received, and in none of the four: lost."""
        return self.received - self.accepted - self.refused - self.shed - self.pending

    @property
    def gap(self) -> int:
        """0 is the only good value."""
        return self.missing + self.extra


class FlowHour(msgspec.Struct, frozen=True, kw_only=True):
    """One flow's account of one hour."""

    flow: Flow
    hour: str
    started: int
    closed: int
    open: int  # started - closed up to the hour's end
    lost: int  # of those that started in this hour: not closed, and nobody is at them any more
    unstarted: int  # closed in this hour, and never started


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """One record that is missing or too many. Its place is that of the record it shows in; a hole has none."""

    wrong: Wrong
    topic: str
    hour: str
    event_id: str
    detail: str
    partition: int | None = None
    offset: int | None = None
    reason: str = ""  # code by which the codec refuses it, where nobody else did


class HourLedger(msgspec.Struct, frozen=True, kw_only=True):
    """By topic, then hour; by flow, then hour; differences by topic, partition, offset."""

    lines: tuple[HourLine, ...]
    flows: tuple[FlowHour, ...]
    differences: tuple[Difference, ...]
    lapsed: dict[str, int] = {}  # by topic: of the refused, those whose letters retention may have removed

    @property
    def gap(self) -> int:
        """Of all topics: 0 is the only good value."""
        return sum(line.gap for line in self.lines)

    @property
    def exact(self) -> bool:
        """Whether nothing is missing or too many, in topics and in flows."""
        return self.gap == 0 and not any(flow.lost or flow.unstarted for flow in self.flows)

    def gaps(self) -> dict[str, int]:
        """By hour, also where it is 0."""
        found: dict[str, int] = {}
        for line in self.lines:
            found[line.hour] = found.get(line.hour, 0) + line.gap
        return dict(sorted(found.items()))


def chosen(
    ledger: HourLedger, *, topics: Iterable[str] = (), since: str = "", until: str = "~"
) -> HourLedger:
    """The part of some topics (none named: all, and the flows) and of the hours from `since` to before `until`."""
    named = frozenset(topics)

    def fits(topic: str, hour: str) -> bool:
        return (not named or topic in named) and since <= hour < until

    return HourLedger(
        lines=tuple(line for line in ledger.lines if fits(line.topic, line.hour)),
        flows=() if named else tuple(flow for flow in ledger.flows if since <= flow.hour < until),
        differences=tuple(one for one in ledger.differences if fits(one.topic, one.hour)),
        lapsed={topic: count for topic, count in ledger.lapsed.items() if not named or topic in named},
    )
