"""The ledger: received = accepted + refused + shed + pending, per topic, added up by a reader that trusts no process (law 7).

It reads the topics and the committed offsets, nothing else. Each record is looked for where it must have gone: see
`audit.hours_book`, whose account by topic and hour this sums over the hours.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Final

import msgspec

from rollwire.consumers.audit.hours import Difference, HourLedger
from rollwire.consumers.audit.hours_count import SETTLE_S, count_hours
from rollwire.schemas.catalogue import TOPICS
from rollwire.streams.seams.log import Log

SHOWN: Final = 20  # ids of missing and extra events that a line carries
_NUMBERS: Final = ("received", "accepted", "refused", "shed", "pending", "extra")


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One topic's account."""

    topic: str
    received: int
    accepted: int
    refused: int
    shed: int
    pending: int
    extra: int
    missing_ids: tuple[str, ...]  # the first `SHOWN`
    extra_ids: tuple[str, ...]

    @property
    def missing(self) -> int:
        return self.received - self.accepted - self.refused - self.shed - self.pending

    @property
    def gap(self) -> int:
        """What is not accounted for; 0 is the only good value."""
        return self.missing + self.extra


class Ledger(msgspec.Struct, frozen=True, kw_only=True):
    lines: tuple[Line, ...]  # by topic name

    @property
    def gap(self) -> int:
        return sum(line.gap for line in self.lines)

    def __getitem__(self, topic: str) -> Line:
        return next(line for line in self.lines if line.topic == topic)


def summed(hours: HourLedger) -> Ledger:
    """An account by hours as one by topics."""
    numbers: dict[str, Counter[str]] = {topic: Counter() for topic in sorted(TOPICS)}
    for line in hours.lines:
        numbers[line.topic].update({name: getattr(line, name) for name in _NUMBERS})
    ids: dict[tuple[str, str], list[str]] = defaultdict(list)
    for one in hours.differences:
        shown = ids[one.topic, one.wrong]
        if len(shown) < SHOWN:
            shown.append(_told(one))
    return Ledger(
        lines=tuple(
            Line(
                topic=topic,
                **{name: count[name] for name in _NUMBERS},
                missing_ids=tuple(ids[topic, "missing"]),
                extra_ids=tuple(ids[topic, "extra"]),
            )
            for topic, count in numbers.items()
        )
    )


def _told(one: Difference) -> str:
    if one.wrong == "extra":
        return one.detail
    return f"{one.event_id or 'unnamed'} at {one.topic}[{one.partition}]:{one.offset}"


def count_ledger(log: Log, prefix: str, *, settle_s: float = SETTLE_S) -> Ledger:
    """Counts all topics of the catalogue. `prefix` is that of the consumer groups. See `audit.hours_count.count_hours`."""
    return summed(count_hours(log, prefix, settle_s=settle_s).ledger)
