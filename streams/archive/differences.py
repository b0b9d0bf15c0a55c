"""Which record of a segment is not what was sealed, and what happened to it. Pure.

What was found is compared with the marks; around the first difference the records themselves are asked which place they
were sealed for, so that a change, an exchange, a gap and a repeat are told apart though all digests behind them differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from rollwire.streams.archive.leaves import leaf_of_fields
from rollwire.streams.archive.marks import MARK_BYTES, Mark
from rollwire.streams.findings import Kind
from rollwire.streams.seams.log import Record

_CHANGED: Final = "its payload, key, headers or timestamp are not those that were sealed"


class Difference(NamedTuple):
    kind: Kind
    offset: int  # of the first bad record: where it stands, or should stand
    place: int  # of the first difference, in what was found
    detail: str


def first_difference(expected: Sequence[Mark], found: Sequence[Mark]) -> Difference | None:
    """By offsets and marks alone. Both ascend by offset."""
    for i, (right, there) in enumerate(zip(expected, found, strict=False)):
        if right == there:
            continue
        if there.offset > right.offset:
            return Difference(
                Kind.RECORDS_MISSING, right.offset, i, "the record that was sealed here is gone"
            )
        if there.offset < right.offset:
            return Difference(Kind.RECORDS_ADDED, there.offset, i, "no record was sealed here")
        return Difference(Kind.RECORD_CHANGED, right.offset, i, _CHANGED)
    if len(found) < len(expected):
        i = len(found)
        count = len(expected) - i
        return Difference(
            Kind.RECORDS_MISSING, expected[i].offset, i, f"{count:,} records that were sealed are gone"
        )
    if len(found) > len(expected):
        i = len(expected)
        return Difference(Kind.RECORDS_ADDED, found[i].offset, i, "no record was sealed here")
    return None


def first_foreign(expected: Sequence[Mark], found: Sequence[Mark]) -> Difference | None:
    """The first that was found and was not sealed there: all that may be said where a log is compacted."""
    sealed = dict(expected)
    for i, (offset, leaf) in enumerate(found):
        if offset not in sealed:
            return Difference(Kind.RECORDS_ADDED, offset, i, "no record was sealed here")
        if sealed[offset] != leaf:
            return Difference(Kind.RECORD_CHANGED, offset, i, _CHANGED)
    return None


def explained(
    difference: Difference,
    expected: Sequence[Mark],
    at: int,
    records: Sequence[Record],
) -> Difference:
    """The same difference, with what it is: `expected[at]` is what should stand there, `records` are the first that do
    (two are enough). Of moved records none is taken for changed."""
    if difference.kind is not Kind.RECORD_CHANGED or not records:
        return difference
    here = records[0]
    follows = records[1] if len(records) > 1 else None
    if at > 0 and _sealed_as(here, expected[at - 1]):
        return difference._replace(
            kind=Kind.RECORDS_ADDED, detail=f"the record at {expected[at - 1].offset:,} stands here once more"
        )
    if follows is not None and _sealed_as(follows, expected[at]):
        if at + 1 < len(expected) and _sealed_as(here, expected[at + 1]):
            return difference._replace(
                kind=Kind.ORDER_CHANGED,
                detail=f"it and the record at {expected[at + 1].offset:,} have changed places",
            )
        return difference._replace(
            kind=Kind.RECORDS_ADDED, detail="a record that was never sealed stands here, the others behind it"
        )
    for i in range(at + 1, len(expected)):
        if not _sealed_as(here, expected[i]):
            continue
        if follows is not None and (i + 1 >= len(expected) or _sealed_as(follows, expected[i + 1])):
            return difference._replace(
                kind=Kind.RECORDS_MISSING,
                detail=f"{i - at:,} records that were sealed from here on are gone, those behind them moved up",
            )
        return difference._replace(
            kind=Kind.ORDER_CHANGED,
            detail=f"the record that was sealed at {expected[i].offset:,} stands here",
        )
    return difference


def changed_fields(sealed: Record, found: Record) -> str:
    """Which parts of a record differ, for people."""
    parts = [
        name
        for name, a, b in (
            ("timestamp", sealed.timestamp_ms, found.timestamp_ms),
            ("key", sealed.key, found.key),
            ("headers", tuple(sealed.headers), tuple(found.headers)),
            ("payload", sealed.value, found.value),
        )
        if a != b
    ]
    return " and ".join(parts)


def _sealed_as(record: Record, mark: Mark) -> bool:
    """Whether the record, whatever its offset is now, was sealed at the mark's."""
    leaf = leaf_of_fields(mark.offset, record.timestamp_ms, record.key, record.headers, record.value)
    return leaf[:MARK_BYTES] == mark.leaf
