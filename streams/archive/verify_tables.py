"""Whether the segments of each epoch follow from those before, and are what the epoch's head signed. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from rollwire.schemas.records import Position
from rollwire.streams.archive.chain import SEGMENT_RECORDS, Segment
from rollwire.streams.archive.heads import Head, PartitionHead
from rollwire.streams.archive.leaves import chain_of, chain_start, tree_leaf
from rollwire.streams.archive.marks import Marks
from rollwire.streams.archive.tree import root_of
from rollwire.streams.findings import Finding, Kind, at
from rollwire.streams.seams.log import TopicPartition


class Placed(NamedTuple):
    """A segment to check, and who sealed it."""

    segment: Segment
    head: Head

    @property
    def at(self) -> TopicPartition:
        return TopicPartition(self.segment.topic, self.segment.partition)


def check_table(head: Head, before: Head | None, segments: Sequence[Segment]) -> list[Finding]:
    """`before`: the head of the epoch before, where it is there and right; without it the chain is followed from this
    epoch's first segments on."""
    findings: list[Finding] = []
    order = [(s.topic, s.partition, s.first) for s in segments]
    if any(a >= b for a, b in pairwise(order)):
        findings.append(_finding(head, "its segments are not in order"))
    if len(segments) != head.size:
        findings.append(_finding(head, f"it speaks of {head.size} segments, its table has {len(segments)}"))
    if root_of([tree_leaf(s.digest, s.chain) for s in segments]).hex() != head.root:
        findings.append(_finding(head, "the root of its tree is not that of its segments"))
    by_partition: dict[TopicPartition, list[Segment]] = {}
    for segment in segments:
        by_partition.setdefault(TopicPartition(segment.topic, segment.partition), []).append(segment)
    known = {p.at: p for p in before.partitions} if before is not None else {}
    for place, those in by_partition.items():
        stated = head.partition(place)
        if stated is None:
            findings.append(_finding(head, f"it does not name {place.topic}[{place.partition}]"))
            continue
        broken = _follow(head, before is None and head.epoch > 1, known.get(place), stated, those)
        if broken is not None:
            findings.append(broken)
    for place, was in known.items():
        if place not in by_partition and head.partition(place) != was:
            findings.append(
                _finding(head, f"{place.topic}[{place.partition}] moved on, without a segment for it")
            )
    return findings


def _follow(
    head: Head,
    unknown: bool,
    was: PartitionHead | None,
    stated: PartitionHead,
    segments: Sequence[Segment],
) -> Finding | None:
    """The first segment of a partition that does not follow; `unknown`: what came before cannot be known."""
    place = TopicPartition(stated.topic, stated.partition)
    position = segments[0].first if unknown else (was.next if was else stated.begin)
    chain: bytes | None = None
    if was is not None:
        chain = bytes.fromhex(was.chain)
    elif not unknown:
        chain = chain_start(place.topic, place.partition, stated.begin)
    for segment in segments:
        if segment.first != position and not _skipped(head, place, position, segment.first):
            return _broken(
                place, segment, f"it begins at {segment.first:,}, the one before ended at {position:,}"
            )
        if segment.next <= segment.first or segment.records < 1:
            return _broken(place, segment, "it holds nothing")
        if chain is not None and chain_of(chain, segment.digest) != segment.chain:
            return _broken(place, segment, "its chain is not that of its digest and the segment before it")
        position, chain = segment.next, segment.chain
    records = sum(s.records for s in segments) + (was.records if was else 0)
    count = len(segments) + (was.segments if was else 0)
    end = (segments[-1].next, segments[-1].chain.hex())
    if end != (stated.next, stated.chain) or (
        not unknown and (records, count) != (stated.records, stated.segments)
    ):
        return _finding(head, f"it says another end of {place.topic}[{place.partition}] than its segments")
    return None


def _skipped(head: Head, place: TopicPartition, first: int, next: int) -> bool:
    """Whether the head itself says that nothing could be sealed there."""
    return any((e.topic, e.partition) == place and e.first <= first and next <= e.next for e in head.expired)


def from_marks(head: Head, marks: dict[TopicPartition, Marks]) -> list[Segment]:
    """Segments that stand in for a table that cannot be read: without digests, to be held against the marks."""
    found: list[Segment] = []
    for place in sorted(marks):
        those = marks[place].between(0, 1 << 62)
        for i in range(0, len(those), SEGMENT_RECORDS):
            some = those[i : i + SEGMENT_RECORDS]
            first = some[0].offset if i == 0 else those[i - 1].offset + 1
            found.append(
                Segment(
                    place.topic, place.partition, first, some[-1].offset + 1, len(some), 0, 0, b"", b"", b""
                )
            )
    return found


def _broken(place: TopicPartition, segment: Segment, what: str) -> Finding:
    return Finding(
        kind=Kind.CHAIN_BROKEN,
        where=at(place.topic, place.partition, segment.first),
        detail=f"the segment {segment.first:,} to {segment.next - 1:,}: {what}",
        position=Position(topic=place.topic, partition=place.partition, offset=segment.first),
    )


def _finding(head: Head, what: str) -> Finding:
    return Finding(kind=Kind.HEAD_INVALID, where=f"head {head.epoch}", detail=what)
