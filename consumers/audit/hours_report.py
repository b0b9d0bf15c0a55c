"""An account by topic and hour as the report of an audit. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from blake3 import blake3

from rollwire.consumers.audit.hours import Difference, FlowHour, HourLedger, HourLine
from rollwire.consumers.audit.hours_count import Counted
from rollwire.consumers.audit.hours_live import Compared, Counters
from rollwire.schemas.records import Position
from rollwire.streams.findings import Finding, Kind, Report, at


class LedgerReport(Report, frozen=True, kw_only=True):
    """What `rollwire audit ledger --json` writes. Every difference is one of `findings`; their ids stand in `differences`."""

    gap: int
    gaps: dict[str, int]  # by hour
    hours: tuple[HourLine, ...]
    flows: tuple[FlowHour, ...]
    differences: tuple[Difference, ...]
    live: tuple[Counters, ...]  # what running processes say of themselves


def digest_of(ledger: HourLedger) -> str:
    """Of all lines, flows and differences: two accounts with one digest say the same."""
    return blake3(msgspec.json.encode(ledger)).hexdigest()


def make_report(
    counted: Counted,
    shown: HourLedger,
    *,
    live: Sequence[Counters] = (),
    compared: Compared | None = None,
) -> LedgerReport:
    """`shown`: the part of the account that was asked for."""
    findings = [*map(_finding, shown.differences), *map(_flow, filter(_wrong, shown.flows))]
    findings += [
        Finding(
            kind=Kind.HISTORY_GAP,
            where=at(hole.partition.topic, hole.partition.partition, hole.first),
            detail=f"offsets up to {hole.next:,} are neither in the log nor in the archive: whatever stood there is not counted",
            position=Position(
                topic=hole.partition.topic, partition=hole.partition.partition, offset=hole.first
            ),
        )
        for hole in counted.lost
    ]
    notes = [f"{topic} is neither on the broker nor in the archive: not counted" for topic in counted.absent]
    notes += [
        f"{count:,} of {topic} went nowhere else and are older than the oldest dead letter: counted as refused, their letters "
        "are kept for a time only"
        for topic, count in shown.lapsed.items()
    ]
    if compared is not None:
        findings += compared.findings
        notes += compared.notes
    return LedgerReport(
        command="audit ledger",
        findings=tuple(findings),
        checked={
            "records": counted.records,
            "topics": len({line.topic for line in shown.lines}),
            "hours": len({line.hour for line in shown.lines}),
        },
        notes=tuple(notes),
        digests={"ledger": digest_of(shown)},
        results={"ledger.gap": float(shown.gap)},
        gap=shown.gap,
        gaps=shown.gaps(),
        hours=shown.lines,
        flows=shown.flows,
        differences=shown.differences,
        live=tuple(live),
    )


def _finding(one: Difference) -> Finding:
    position = None
    where = f"{one.topic}, {one.hour}"
    if one.partition is not None and one.offset is not None:
        position = Position(topic=one.topic, partition=one.partition, offset=one.offset)
        where = at(one.topic, one.partition, one.offset)
    kind = Kind.TWICE if one.wrong == "extra" else Kind.UNACCOUNTED
    if one.reason:
        kind = Kind.SCHEMA_UNKNOWN if one.reason == "unknown_schema" else Kind.UNDECODABLE
    event = one.event_id or "unnamed"
    detail = one.detail if event in one.detail else f"{event}: {one.detail}"
    return Finding(kind=kind, where=where, detail=detail, position=position)


def _wrong(flow: FlowHour) -> bool:
    return bool(flow.lost or flow.unstarted)


def _flow(flow: FlowHour) -> Finding:
    return Finding(
        kind=Kind.UNACCOUNTED,
        where=f"{flow.flow}, {flow.hour}",
        detail=f"{flow.lost:,} started in this hour are neither closed nor open, {flow.unstarted:,} were closed in it and "
        "never started: the events are named above",
    )
