"""Verifies the sealed history of a run: heads, tables, trees, chains, and every record, in the log and in the archive.

It never stops at a finding. What a policy took away is a note, what is gone without one is a finding, with the position of
the first record that is not what was sealed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Final, NamedTuple

from rollwire.schemas.catalogue import TOPICS
from rollwire.schemas.errors import ArchiveCorrupt, AuditError, ObjectMissing
from rollwire.streams.archive.chain import Segment
from rollwire.streams.archive.heads import Head, PartitionHead
from rollwire.streams.archive.judge import Judge, Sources
from rollwire.streams.archive.marks import Marks
from rollwire.streams.archive.policies import POLICIES, Policies, Policy
from rollwire.streams.archive.sealed import (
    StoredHead,
    Trusted,
    check_marks,
    heads_of,
    marks_of,
    newest_head,
    opened,
    segments_of,
)
from rollwire.streams.archive.sealer import UNSEALED
from rollwire.streams.archive.stretches import Archive
from rollwire.streams.archive.verify_again import LookAgain
from rollwire.streams.archive.verify_heads import Pinned, check_heads
from rollwire.streams.archive.verify_outside import look_outside
from rollwire.streams.archive.verify_read import Extent, look_in_archive, look_in_log, sampled
from rollwire.streams.archive.verify_tables import Placed, check_table, from_marks
from rollwire.streams.findings import Finding, Kind, Report
from rollwire.streams.seams.clock import Clock
from rollwire.streams.seams.log import Log, TopicPartition
from rollwire.streams.seams.places import existing_partitions
from rollwire.streams.seams.store import ObjectStore

COMMAND: Final = "verify"
_AT_ONCE: Final = 8


class Verified(NamedTuple):
    report: Report
    newest: StoredHead | None  # of the heads that are right: what to remember


def verify(
    log: Log,
    store: ObjectStore,
    *,
    name: str,
    trusted: Trusted,
    now_us: int,
    archive: Archive | None = None,
    sample: float | None = None,
    seed: int = 0,
    seen: Pinned | None = None,
    policies: Mapping[str, Policy] = POLICIES,
    clock: Clock | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> Verified:
    """`log`: the live one. `archive`: None = it is not looked into. `sample`: the share of the segments whose records are
    read, chosen by `seed`; heads and tables are always looked at. `seen`: heads that are known from elsewhere. `policies`:
    how long topics keep records. `progress` is told how many records were read since it was told last.

    Raises what log and store raise where they do not answer.
    """
    checked = check_heads(list(heads_of(store, name)), name, trusted, seen or {})
    findings = list(checked.findings)
    by_epoch = {head.epoch: head for head in checked.heads}
    tables = _Tables(store, findings)
    everything = tables.placed(checked.heads, by_epoch)
    chance = random.Random(seed)
    sections = {
        place: placed if sample is None else sampled(placed, sample, chance)
        for place, placed in sorted(everything.items())
    }
    extents = _extents(log, sections)
    in_archive = (
        {} if archive is None else look_in_archive(archive, sections, findings=findings, progress=progress)
    )
    in_log = look_in_log(log, sections, extents, clock=clock, progress=progress)
    extents = _extents(log, sections)  # retention goes on meanwhile
    if archive is not None:
        findings += look_outside(archive, lambda: _sealed_now(store, name, trusted, checked.heads), extents)
    rules = Policies(policies, checked.heads, now_us)
    archived = checked.heads[-1].archived if checked.heads else ()
    notes: list[str] = []
    verified = 0
    with closing(LookAgain(log, archive, extents, clock)) as again:
        sources = Sources(tables.marks, again.in_log, again.in_archive, again.records, again.archived)
        for place, placed in sections.items():
            judge = Judge(
                place,
                extent=extents.get(place),
                archived=[r for r in archived if (r.topic, r.partition) == place],
                in_archive=in_archive.get(place),
                policies=rules,
                sources=sources,
            )
            for one in placed:
                judge.judge(one, one.segment.first in in_log[place].verified)
            findings += judge.findings()
            notes += _told(place, judge.notes())
            verified += judge.verified
    report = Report(
        command=COMMAND,
        findings=tuple(findings),
        checked={
            "heads": len(checked.heads),
            "segments": sum(map(len, sections.values())),
            "segments verified": verified,
            "records of the log": sum(looked.records for looked in in_log.values()),
            "records of the archive": sum(looked.records for looked in in_archive.values()),
        },
        notes=(
            *_sampling(sample, seed, sections, everything),
            *notes,
            *_never_sealed(checked.heads),
            *_not_yet(checked.heads, _extents(log, _of_catalogue(log, sections))),
        ),
        digests={} if checked.newest is None else {f"head {checked.newest.epoch}": checked.newest.digest},
    )
    return Verified(report, checked.newest)


def _sealed_now(
    store: ObjectStore, name: str, trusted: Trusted, heads: Sequence[Head]
) -> Iterable[PartitionHead]:
    """By the newest head: an archiver may have sealed and copied since `heads` were read."""
    stored = newest_head(store, name)
    if stored is not None and (not heads or stored.epoch > heads[-1].epoch):
        try:
            newest = opened(stored, trusted)
        except AuditError:
            pass  # a finding, of this audit or of the next
        else:
            return newest.partitions if newest.name == name else ()
    return heads[-1].partitions if heads else ()


class _Tables:
    """The tables of epochs, and their marks where they are asked for."""

    def __init__(self, store: ObjectStore, findings: list[Finding]) -> None:
        self._store = store
        self._findings = findings
        self._marks: dict[int, dict[TopicPartition, Marks] | None] = {}

    def placed(
        self, heads: Iterable[Head], by_epoch: Mapping[int, Head]
    ) -> dict[TopicPartition, list[Placed]]:
        found: dict[TopicPartition, list[Placed]] = {}
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="tables") as pool:
            for head, table, marks in pool.map(lambda h: (h, self._table(h), self._damaged(h)), heads):
                if marks is not None:
                    self._findings.append(marks)
                    self._marks[head.epoch] = None
                if isinstance(table, Finding):
                    self._findings.append(table)
                    segments = from_marks(head, self._marks_of(head) or {})
                else:
                    segments = list(table)
                    self._findings.extend(check_table(head, by_epoch.get(head.epoch - 1), segments))
                for segment in segments:
                    place = TopicPartition(segment.topic, segment.partition)
                    found.setdefault(place, []).append(Placed(segment, head))
        return found

    def marks(self, placed: Placed) -> Marks | None:
        marks = self._marks_of(placed.head)
        return None if marks is None else marks.get(placed.at)

    def _table(self, head: Head) -> tuple[Segment, ...] | Finding:
        try:
            return segments_of(self._store, head)
        except ObjectMissing as error:
            return Finding(
                kind=Kind.HEAD_MISSING,
                where=f"head {head.epoch}",
                detail=f"the table of its segments: {error}",
            )
        except ArchiveCorrupt as error:
            return Finding(kind=Kind.HEAD_INVALID, where=f"head {head.epoch}", detail=str(error))

    def _damaged(self, head: Head) -> Finding | None:
        try:
            check_marks(self._store, head)
        except (ObjectMissing, ArchiveCorrupt) as error:
            kind = Kind.HEAD_MISSING if isinstance(error, ObjectMissing) else Kind.HEAD_INVALID
            return Finding(kind=kind, where=f"head {head.epoch}", detail=f"the marks of its records: {error}")
        return None

    def _marks_of(self, head: Head) -> dict[TopicPartition, Marks] | None:
        """None: they cannot be read."""
        if head.epoch not in self._marks:
            held = [epoch for epoch, marks in self._marks.items() if marks is not None]
            if len(held) > 2:  # they are asked for in order, and are large
                del self._marks[held[0]]
            try:
                self._marks[head.epoch] = marks_of(self._store, head)
            except (ObjectMissing, ArchiveCorrupt):
                self._marks[head.epoch] = None
        return self._marks[head.epoch]


def _extents(log: Log, places: Iterable[TopicPartition]) -> dict[TopicPartition, Extent]:
    wanted = set(places)
    there = [at for at in existing_partitions(log, sorted({at.topic for at in wanted})) if at in wanted]
    begins, ends = log.beginning_offsets(there), log.end_offsets(there)
    return {place: Extent(begins[place], ends[place]) for place in there}


def _of_catalogue(log: Log, sealed: Iterable[TopicPartition]) -> set[TopicPartition]:
    """Where something may be written: also where nothing is sealed yet."""
    return set(existing_partitions(log, {*TOPICS, *(place.topic for place in sealed)}))


def _told(place: TopicPartition, notes: Iterable[tuple[str, int, int]]) -> list[str]:
    ranges: dict[str, list[int]] = {}
    for policy, first, next_ in notes:
        so_far = ranges.setdefault(policy, [first, next_])
        so_far[1] = next_
    return [
        f"{place.topic}[{place.partition}] {first:,} to {next_ - 1:,}: expired by policy {policy}"
        for policy, (first, next_) in ranges.items()
    ]


def _sampling(
    sample: float | None,
    seed: int,
    sections: Mapping[TopicPartition, list[Placed]],
    everything: Mapping[TopicPartition, list[Placed]],
) -> list[str]:
    if sample is None:
        return []
    count, of = sum(map(len, sections.values())), sum(map(len, everything.values()))
    return [f"a sample: {count:,} of {of:,} segments, seed {seed}"]


def _never_sealed(heads: Iterable[Head]) -> list[str]:
    return [
        f"{gone.topic}[{gone.partition}] {gone.first:,} to {gone.next - 1:,}: {UNSEALED}; nothing is known of it"
        for head in heads
        for gone in head.expired
        if gone.policy == UNSEALED
    ]


def _not_yet(heads: tuple[Head, ...], extents: Mapping[TopicPartition, Extent]) -> list[str]:
    if not heads:
        return []
    sealed = {p.at: p.next for p in heads[-1].partitions}
    left = sum(
        max(0, extent.end - max(sealed.get(place, 0), extent.begin)) for place, extent in extents.items()
    )
    if not left:
        return []
    return [
        f"{left:,} offsets behind the newest head are not sealed: control records, or what was written since"
    ]
