"""What it means that a sealed segment is not in the log, or not as it was sealed: one partition, segment by segment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from rollwire.schemas.records import OffsetRange, Position
from rollwire.streams.archive.chain import Segment
from rollwire.streams.archive.differences import (
    Difference,
    changed_fields,
    explained,
    first_difference,
    first_foreign,
)
from rollwire.streams.archive.marks import Mark, Marks
from rollwire.streams.archive.policies import Policies
from rollwire.streams.archive.verify_read import Extent, Looked
from rollwire.streams.archive.verify_tables import Placed
from rollwire.streams.findings import Finding, Kind, at
from rollwire.streams.seams.log import Record, TopicPartition

_AROUND = 256  # marks before and behind a segment that its records are looked for at


class Sources(NamedTuple):
    """Where a judge looks further, once something is wrong."""

    marks: Callable[[Placed], Marks | None]  # None: they cannot be read, which is a finding already
    found: Callable[[Segment], Sequence[Mark]]  # of what the log has in the segment's place
    found_archived: Callable[[Segment], Sequence[Mark]]
    records: Callable[[TopicPartition, int], Sequence[Record]]  # up to two of the log, from an offset on
    archived: Callable[[TopicPartition, int], Record | None]


class _Open:
    """A finding or a note that may go on in the next segment."""

    def __init__(self, kind: Kind | None, offset: int, detail: str, until: int, where: str = "") -> None:
        self.kind = kind  # None: a note, with the policy in `detail`
        self.offset = offset
        self.detail = detail
        self.first_until = self.until = until
        self.where = where


class Judge:
    """`extent`: of the partition in the log; None where it is not there. `archived`: what of it the archive should hold."""

    def __init__(
        self,
        place: TopicPartition,
        *,
        extent: Extent | None,
        archived: Sequence[OffsetRange],
        in_archive: Looked | None,
        policies: Policies,
        sources: Sources,
    ) -> None:
        self._place = place
        self._extent = extent
        self._archived = archived
        self._in_archive = in_archive
        self._policies = policies
        self._sources = sources
        self._said: list[_Open] = []
        self._shifted: _Open | None = None  # what is wrong at the end of the segment before
        self.verified = 0

    def judge(self, placed: Placed, verified: bool) -> None:
        """`verified`: by the log."""
        segment = placed.segment
        archived = self._judge_archived(placed)
        if verified:
            self._shifted = None
            self.verified += 1
            return
        if self._extent is None or not (
            self._extent.begin < segment.next and segment.first < self._extent.end
        ):
            self._shifted = None
            if archived:
                self.verified += 1
            cut = self._extent is not None and self._extent.end < segment.next
            if cut or not archived:
                self._missing(placed, cut=cut, whole=True)
            return
        self._judge_log(placed, self._sources.found(segment), archived)

    def findings(self) -> list[Finding]:
        return [self._finding(one) for one in self._said if one.kind is not None]

    def notes(self) -> list[tuple[str, int, int]]:
        """(policy, first, next) of what policies took."""
        return [(one.detail, one.offset, one.until) for one in self._said if one.kind is None]

    def _judge_archived(self, placed: Placed) -> bool:
        """Whether the archive has the segment as it was sealed; says what is wrong where it should, or has another."""
        if self._in_archive is None:
            return False
        segment = placed.segment
        if segment.first in self._in_archive.verified:
            return True
        if segment.first not in self._in_archive.unlike:
            if any(r.start <= segment.first and segment.next <= r.end for r in self._archived):
                policy = self._policies.expired(segment)
                if policy is None:
                    what = "the newest head says that it is archived, and the archive has not got it"
                    self._say(Kind.SEGMENT_MISSING, segment.first, segment.next, what, "archive of ")
            return False
        expected = self._marks(placed)
        if expected is None:
            what = f"the records up to {segment.next - 1:,} are not those that were sealed"
            self._say(Kind.RECORD_CHANGED, segment.first, segment.next, what, "archive of ")
            return False
        found = self._sources.found_archived(segment)
        kept, policy = self._policies.kept(segment, expected)
        if policy is not None:
            # Its stretches were let go of one after the other: what is left has no digest of its own.
            found, _ = self._policies.kept(segment, found)
            if first_difference(kept, found) is None:
                self._say(None, segment.first, segment.next, policy)
                return False
        wrong = first_difference(kept, found)
        if wrong is None and not segment.digest:
            return True
        if wrong is None:
            wrong = _somewhere(segment)
        self._say(wrong.kind, wrong.offset, segment.next, wrong.detail, "archive of ")
        return False

    def _judge_log(self, placed: Placed, found: Sequence[Mark], archived: bool) -> None:
        begin, end = self._extent or Extent(0, 0)
        segment = placed.segment
        expected = self._marks(placed)
        if expected is None:
            self._say(Kind.RECORD_CHANGED, segment.first, segment.next, _somewhere(segment).detail)
            return
        here = [mark for mark in expected if begin <= mark.offset < end]
        wrong = first_difference(here, found)
        compaction = self._policies.compaction(segment.topic)
        if (
            wrong is not None
            and compaction is not None
            and (foreign := first_foreign(here, found)) is not None
        ):
            self._say(foreign.kind, foreign.offset, segment.next, foreign.detail)
        elif wrong is not None and compaction is not None:
            if not archived:
                self._say(None, segment.first, segment.next, compaction)
            else:
                self.verified += 1
        elif wrong is not None:
            self._say_wrong(placed, expected, wrong, found)
        else:
            self._shifted = None
            whole = len(here) == len(expected)
            if whole and segment.digest:
                wrong = _somewhere(segment)
                self._say(wrong.kind, wrong.offset, segment.next, wrong.detail)
            elif whole or archived:
                self.verified += 1
        if expected and expected[0].offset < begin and not archived:
            self._missing(placed, cut=False, whole=False)
        if expected and expected[-1].offset >= end:
            self._missing(placed, cut=True, whole=False)

    def _say_wrong(
        self, placed: Placed, expected: Sequence[Mark], wrong: Difference, found: Sequence[Mark]
    ) -> None:
        segment = placed.segment
        goes_on = bool(found) and bool(expected) and found[-1] != expected[-1]
        if self._shifted is not None and wrong.place == 0 and goes_on:
            self._shifted.until = segment.next
            return
        records = (
            self._sources.records(self._place, found[wrong.place].offset) if wrong.place < len(found) else ()
        )
        around = self._around(placed)
        where = next((i for i, mark in enumerate(around) if mark.offset == wrong.offset), None)
        if where is not None:
            wrong = explained(wrong, around, where, records)
        if wrong.kind is Kind.RECORD_CHANGED and records:
            sealed = self._sources.archived(self._place, wrong.offset)
            parts = changed_fields(sealed, records[0]) if sealed is not None else ""
            if parts:
                wrong = wrong._replace(detail=f"its {parts} differ from the archived record")
        self._say(wrong.kind, wrong.offset, segment.next, wrong.detail)
        self._shifted = self._said[-1] if goes_on else None

    def _missing(self, placed: Placed, *, cut: bool, whole: bool) -> None:
        """`cut`: the log ends before the segment does; else it begins behind its beginning. `whole`: none of it is there."""
        segment = placed.segment
        policy = None
        if not cut:
            policy = self._policies.expired(segment)
            should = any(r.start <= segment.first and segment.next <= r.end for r in self._archived)
            if policy is None and not (should and self._in_archive is not None):
                # Compaction takes records from between others; it moves no beginning, and takes no partition.
                policy = self._policies.retention(segment, whole=whole)
        if policy is not None:
            self._say(None, segment.first, segment.next, policy)
            return
        end = self._extent.end if self._extent is not None else 0
        last = self._said[-1] if self._said else None
        if (
            last is not None
            and last.kind in (Kind.RECORDS_MISSING, Kind.PARTITION_MISSING)
            and last.until == segment.first
        ):
            last.until = segment.next
            return
        expected = self._marks(placed) or ()
        offset = next((m.offset for m in expected if not cut or m.offset >= end), segment.first)
        if self._extent is None:
            what = "the partition is not in the log any more, and not in the archive"
            self._say(Kind.PARTITION_MISSING, offset, segment.next, what)
        elif cut:
            self._say(Kind.RECORDS_MISSING, offset, segment.next, f"the log ends at {end:,}")
        else:
            what = f"the log begins at {self._extent.begin:,}, and the archive has not got them"
            self._say(Kind.RECORDS_MISSING, offset, segment.next, what)

    def _say(self, kind: Kind | None, offset: int, until: int, detail: str, where: str = "") -> None:
        last = self._said[-1] if self._said else None
        if (
            last is not None
            and (last.kind, last.detail, last.where) == (kind, detail, where)
            and kind in (None, Kind.SEGMENT_MISSING)
            and last.until == offset
        ):
            last.until = until
            return
        self._said.append(_Open(kind, offset, detail, until, where))

    def _marks(self, placed: Placed) -> list[Mark] | None:
        marks = self._sources.marks(placed)
        return None if marks is None else marks.between(placed.segment.first, placed.segment.next)

    def _around(self, placed: Placed) -> list[Mark]:
        marks, segment = self._sources.marks(placed), placed.segment
        return [] if marks is None else marks.between(segment.first - _AROUND, segment.next + _AROUND)

    def _finding(self, said: _Open) -> Finding:
        topic, partition = self._place
        detail = said.detail
        if said.until > said.first_until:
            detail += f"; nor is what follows, up to {said.until - 1:,}, what was sealed there"
        return Finding(
            kind=said.kind or Kind.RECORD_CHANGED,
            where=said.where + at(topic, partition, said.offset),
            detail=detail,
            position=Position(topic=topic, partition=partition, offset=said.offset),
        )


def _somewhere(segment: Segment) -> Difference:
    what = f"one of the {segment.records} records up to {segment.next - 1:,} is not the one that was sealed"
    return Difference(Kind.RECORD_CHANGED, segment.first, 0, what)
