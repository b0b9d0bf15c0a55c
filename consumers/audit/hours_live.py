"""What running processes count of themselves, held against the topics (P8). Pure.

A gateway counts from its start on. Whatever it acknowledged since then must be in `user-feedback`:

    accepted - repeated + conflicting repeats <= records of gateways in the topic since the earliest start
                                              <= the same + acknowledged too late + outcomes it did not learn + pending

The counters are read before the topic for the first line, and after it for the second, so that both hold while events come.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from rollwire.schemas.errors import ConfigError
from rollwire.streams.findings import Finding, Kind
from rollwire.streams.seams.log import Record

TOPIC: Final = "user-feedback"
SOURCE: Final = b"rollwire/gateway"
"""`ce_source` of what gateways write."""
_CONFLICT: Final = "conflicting_repeat"
_LONG_AGO: Final = datetime.fromtimestamp(0, UTC)
_UNKNOWN: Final = "outcome_unknown"
_NAMES: Final = {
    "rollwire_events_received": "received",
    "rollwire_events_accepted": "accepted",
    "rollwire_events_refused": "refused",
    "rollwire_events_shed": "shed",
    "rollwire_events_pending": "pending",
    "rollwire_feedback_repeated": "repeated",
    "rollwire_feedback_late": "late",
}


class Counters(msgspec.Struct, frozen=True, kw_only=True):
    """What one process says of one topic, at one moment."""

    url: str
    topic: str
    received: int = 0
    accepted: int = 0
    refused: int = 0
    shed: int = 0
    pending: int = 0
    repeated: int = 0  # of the accepted
    late: int = 0
    conflicting: int = 0  # of the refused
    unknown: int = 0  # of the shed
    started_us: int | None = None  # None: it is no gateway

    @property
    def gap(self) -> int:
        """0 is the only good value."""
        return self.received - self.accepted - self.refused - self.shed - self.pending

    @property
    def written(self) -> int:
        """Records that it knows to be in the topic."""
        return self.accepted - self.repeated + self.conflicting

    @property
    def perhaps(self) -> int:
        """Records that may be there besides."""
        return self.late + self.unknown + self.pending


def parse_counters(url: str, exposition: str) -> tuple[Counters, ...]:
    """By topic. Raises `ConfigError` for text that is no exposition, or has no `rollwire_events_*`."""
    sums: dict[str, dict[str, int]] = {}
    started_us: int | None = None
    try:
        for family in text_string_to_metric_families(exposition):
            if family.name == "rollwire_feedback_start_time_seconds":
                started_us = round(family.samples[0].value * 1e6)
            field = _NAMES.get(family.name)
            if field is None:
                continue
            for sample in family.samples:
                if sample.name.endswith("_created"):
                    continue
                row = sums.setdefault(sample.labels.get("topic", ""), {})
                value, reason = round(sample.value), sample.labels.get("reason", "")
                row[field] = row.get(field, 0) + value
                for name, of in (("conflicting", _CONFLICT), ("unknown", _UNKNOWN)):
                    row[name] = row.get(name, 0) + (value if reason == of else 0)
    except (ValueError, IndexError) as error:
        raise ConfigError(f"{url}: what it answers is not Prometheus's text: {error}") from error
    if not sums:
        raise ConfigError(f"{url}: it shows no rollwire_events_*: give the address of /metrics itself")
    return tuple(
        Counters(url=url, topic=topic, started_us=started_us if topic == TOPIC else None, **row)
        for topic, row in sorted(sums.items())
    )


class Written:
    """Counts what gateways wrote since the earliest start of those that are asked: by `ce_time`, which is the clock that they
    take their start from; the broker's may differ."""

    def __init__(self, before: Sequence[Counters]) -> None:
        starts = [one.started_us for one in before if one.started_us is not None]
        self._since = _LONG_AGO + timedelta(microseconds=min(starts)) if starts else None
        self.records = 0

    def take(self, record: Record) -> None:
        if (
            record.topic == TOPIC
            and self._since is not None
            and ("ce_source", SOURCE) in record.headers
            and _time(record) >= self._since
        ):
            self.records += 1


def _time(record: Record) -> datetime:
    """When a record says that it was written; long ago where it says nothing that can be read."""
    value = next((value for name, value in record.headers if name == "ce_time"), None)
    try:
        time = datetime.fromisoformat((value or b"").decode())
    except ValueError:
        return _LONG_AGO
    return time if time.tzinfo is not None else _LONG_AGO


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]


def compare(before: Sequence[Counters], after: Sequence[Counters], records: int) -> Compared:
    """`records`: what `Written` counted in the topic, between the two looks."""
    findings = [_unbalanced(one) for one in after if one.gap]
    gateways = [one for one in before if one.started_us is not None]
    if not gateways:
        return Compared(findings=tuple(findings), notes=())
    written = sum(one.written for one in gateways)
    last = [one for one in after if one.started_us is not None]
    most = sum(one.written + one.perhaps for one in last)
    where = ", ".join(one.url for one in gateways)
    told = f"{where}: {written:,} events acknowledged since their start, {records:,} in {TOPIC} since then"
    if any(one.started_us != now.started_us for one, now in _pairs(gateways, last)):
        return Compared(
            findings=tuple(findings), notes=(f"{told}; one was started again meanwhile: not compared",)
        )
    if records < written:
        lost = f"{told}: {written - records:,} are not there; the records that stand there follow no other count of theirs"
        findings.append(Finding(kind=Kind.UNACCOUNTED, where=f"{TOPIC} of {where}", detail=lost))
    note = told
    if records > most:
        note += f": {records - most:,} more than these tell of, by another gateway or an earlier life of one"
    return Compared(findings=tuple(findings), notes=(note,))


def _pairs(before: Sequence[Counters], after: Sequence[Counters]) -> Iterator[tuple[Counters, Counters]]:
    now = {(one.url, one.topic): one for one in after}
    for one in before:
        yield one, now.get((one.url, one.topic), one)


def _unbalanced(one: Counters) -> Finding:
    return Finding(
        kind=Kind.UNACCOUNTED,
        where=f"{one.topic} at {one.url}",
        detail=f"received {one.received:,} = accepted {one.accepted:,} + refused {one.refused:,} + shed {one.shed:,} + "
        f"pending {one.pending:,} does not hold: {one.gap:,} differ",
    )
