"""What an audit finds: each kind, in one place, and the report that commands print and write. Pure.

A finding never ends an audit: it is noted with its position, and the audit goes on to the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Final

import msgspec

from rollwire.schemas.errors import Refused
from rollwire.schemas.records import Position
from rollwire.streams.seams.log import Record


class Kind(StrEnum):
    """What is wrong. `MEANING` says it for people."""

    # history
    RECORD_CHANGED = "record_changed"
    ORDER_CHANGED = "order_changed"
    RECORDS_MISSING = "records_missing"
    RECORDS_ADDED = "records_added"
    PARTITION_MISSING = "partition_missing"
    SEGMENT_MISSING = "segment_missing"
    SEGMENT_CORRUPT = "segment_corrupt"
    CHAIN_BROKEN = "chain_broken"
    HEAD_MISSING = "head_missing"
    HEAD_FORKED = "head_forked"
    HEAD_ROLLED_BACK = "head_rolled_back"
    HEAD_INVALID = "head_invalid"
    SIGNATURE_INVALID = "signature_invalid"
    KEY_UNKNOWN = "key_unknown"
    PROOF_INVALID = "proof_invalid"
    # what events say
    UNDECODABLE = "undecodable"
    SCHEMA_UNKNOWN = "schema_unknown"
    ERASED = "erased"
    OBJECT_MISSING = "object_missing"
    OBJECT_CORRUPT = "object_corrupt"
    VERSION_UNKNOWN = "version_unknown"
    EVENT_UNKNOWN = "event_unknown"
    DIGEST_DIFFERS = "digest_differs"
    OUTCOME_DIFFERS = "outcome_differs"
    HISTORY_GAP = "history_gap"
    UNACCOUNTED = "unaccounted"
    TWICE = "twice"


MEANING: Final[dict[Kind, str]] = {
    Kind.RECORD_CHANGED: "a record is not the one that was sealed: value, key, header or timestamp differ",
    Kind.ORDER_CHANGED: "the same records stand in another order",
    Kind.RECORDS_MISSING: "sealed records are not in the log, and no policy expired them",
    Kind.RECORDS_ADDED: "records stand among sealed ones that were not sealed with them, or twice",
    Kind.PARTITION_MISSING: "a sealed partition is not in the log any more",
    Kind.SEGMENT_MISSING: "an archived segment is not in the store, and no policy expired it",
    Kind.SEGMENT_CORRUPT: "an archived segment does not read",
    Kind.CHAIN_BROKEN: "a segment does not follow from the one before it",
    Kind.HEAD_MISSING: "a sealed head, or the table of its segments, is not in the store",
    Kind.HEAD_FORKED: "two heads name the same predecessor or the same epoch",
    Kind.HEAD_ROLLED_BACK: "the newest head is older than one that was seen before",
    Kind.HEAD_INVALID: "a head is not what its place or its own digests say",
    Kind.SIGNATURE_INVALID: "a head's signature does not verify",
    Kind.KEY_UNKNOWN: "a head is signed by a key that is not trusted",
    Kind.PROOF_INVALID: "a proof does not prove what it says, or there is nothing to prove",
    Kind.UNDECODABLE: "a record's value cannot be decoded",
    Kind.SCHEMA_UNKNOWN: "a record's schema fingerprint is not known here",
    Kind.ERASED: "a person's key was destroyed on request: the content is gone, and that is no fault",
    Kind.OBJECT_MISSING: "an object that an event names is not in the store",
    Kind.OBJECT_CORRUPT: "an object that an event names is damaged, or of a format that this release does not read",
    Kind.VERSION_UNKNOWN: "the version was never published in this lineage",
    Kind.EVENT_UNKNOWN: "no event has this id",
    Kind.DIGEST_DIFFERS: "what was computed again has another digest than what was published",
    Kind.OUTCOME_DIFFERS: "a processor run again says something else than it said then",
    Kind.HISTORY_GAP: "offsets that an event names are neither in the log nor in the archive",
    Kind.UNACCOUNTED: "a record went nowhere: neither accepted, refused, shed nor pending",
    Kind.TWICE: "a record that may stand once stands more often, or comes from none that exists",
}


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    kind: Kind
    where: str  # for people: "rollouts[2] at 1234", an object key, "version 17, tensor lm_head.weight"
    detail: str  # what was expected, what is there, and what to do
    position: Position | None = None  # the first bad record, where it is one


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What an audit did and found. `notes` are facts that are no faults: what a policy expired, what is erased."""

    command: str
    findings: tuple[Finding, ...]
    checked: dict[str, int]  # counts of what was looked at: "records", "segments", "versions"
    notes: tuple[str, ...] = ()
    digests: dict[str, str] = {}
    results: dict[str, float] = {}  # figures by the ids that bars have: "rebuild.training_equal"

    @property
    def exit_code(self) -> int:
        """0 clean, 1 findings."""
        return 1 if self.findings else 0


def at(topic: str, partition: int, offset: int) -> str:
    """A position as people read it."""
    return f"{topic}[{partition}] at {offset:,}"


def merged(command: str, reports: Sequence[Report]) -> Report:
    """One report of several; counts of the same name are added up."""
    checked: dict[str, int] = {}
    digests: dict[str, str] = {}
    results: dict[str, float] = {}
    for report in reports:
        digests.update(report.digests)
        results.update(report.results)
        for name, count in report.checked.items():
            checked[name] = checked.get(name, 0) + count
    return Report(
        command=command,
        findings=tuple(finding for report in reports for finding in report.findings),
        checked=checked,
        notes=tuple(note for report in reports for note in report.notes),
        digests=digests,
        results=results,
    )


def gap(topic: str, partition: int, first: int, next: int) -> Finding:
    """Offsets [first, next) that an audit wants to read, and that nothing has."""
    return Finding(
        kind=Kind.HISTORY_GAP,
        where=at(topic, partition, first),
        detail=f"offsets {first:,} to {next - 1:,} are neither in the log nor in the archive: "
        "`rollwire audit verify` says what stood there",
        position=Position(topic=topic, partition=partition, offset=first),
    )


def undecodable(record: Record, refused: Refused, then: str = "") -> Finding:
    """A record that the codec refuses, and what follows from that."""
    unknown = refused.reason == "unknown_schema"
    words = (
        f"{refused.reason}: {refused.detail}",
        "a newer release wrote it: upgrade rollwire here" if unknown else "",
        then,
    )
    return Finding(
        kind=Kind.SCHEMA_UNKNOWN if unknown else Kind.UNDECODABLE,
        where=at(record.topic, record.partition, record.offset),
        detail="; ".join(word for word in words if word),
        position=Position(topic=record.topic, partition=record.partition, offset=record.offset),
    )
