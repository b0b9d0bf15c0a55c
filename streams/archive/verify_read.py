"""Reads what is sealed, from the log and from the archive, and holds it against its segments."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from operator import itemgetter
from typing import Final, NamedTuple

import msgspec

from rollwire.schemas.errors import ArchiveCorrupt, ObjectMissing, OffsetLost
from rollwire.schemas.records import Position
from rollwire.streams.archive.follow import Follower
from rollwire.streams.archive.follow_beside import Beside, Run
from rollwire.streams.archive.stretches import Archive
from rollwire.streams.archive.verify_tables import Placed
from rollwire.streams.findings import Finding, Kind, at
from rollwire.streams.seams.clock import Clock
from rollwire.streams.seams.log import Log, TopicPartition
from rollwire.streams.seams.scan import Range, read_ranges

Sections = Mapping[TopicPartition, Sequence[Placed]]
"""The segments to look at, by partition, in their order."""

BLOCK: Final = 16
"""Segments that a sample takes or leaves together: a reader that jumps is slower than one that goes on."""

_place: Final = itemgetter(0, 1)


class Looked(NamedTuple):
    """What one place has of the segments of a partition."""

    verified: frozenset[int]  # their `first`
    unlike: frozenset[int]  # of those that are not as they were sealed, though something is there
    records: int  # looked at


class Extent(NamedTuple):
    """What the log holds of a partition: offsets [begin, end)."""

    begin: int
    end: int


class _Prefix(msgspec.Struct, array_like=True):
    """What of an encoded record must be known to place it."""

    offset: int


_prefix: Final = msgspec.msgpack.Decoder(_Prefix)


def sampled(placed: Sequence[Placed], share: float, chance: random.Random) -> list[Placed]:
    """Blocks of neighbours, each with probability `share`; the last one always: tails are cut first."""
    kept: list[Placed] = []
    for i in range(0, len(placed), BLOCK):
        if chance.random() < share or i + BLOCK >= len(placed):
            kept += placed[i : i + BLOCK]
    return kept


def runs(placed: Sequence[Placed]) -> Iterator[Range]:
    """The offsets of segments that meet, as one range each."""
    first = next_ = -1
    for one in placed:
        if one.segment.first != next_:
            if first >= 0:
                yield Range(first, next_)
            first = one.segment.first
        next_ = one.segment.next
    if first >= 0:
        yield Range(first, next_)


def look_in_log(
    log: Log,
    sections: Sections,
    extents: Mapping[TopicPartition, Extent],
    *,
    clock: Clock | None,
    progress: Callable[[int], None],
) -> dict[TopicPartition, Looked]:
    """`extents`: of the partitions that exist; of others nothing is looked for. Raises what a reader raises."""
    followers = {place: Follower(placed) for place, placed in sections.items()}
    rounds = {place: list(runs(placed)) for place, placed in sections.items() if place in extents}
    with Beside(followers) as beside:
        for number in range(max(map(len, rounds.values()), default=0)):
            ranges = {
                place: _within(some[number], extents[place])
                for place, some in rounds.items()
                if number < len(some)
            }
            _read(log, ranges, beside, clock, progress)
    for follower in followers.values():
        follower.end()
    return {place: _looked(follower) for place, follower in followers.items()}


def _within(range_: Range, extent: Extent) -> Range:
    return Range(max(range_.first, extent.begin), min(range_.next, extent.end))


def _read(
    log: Log,
    ranges: dict[TopicPartition, Range],
    beside: Beside,
    clock: Clock | None,
    progress: Callable[[int], None],
) -> None:
    while True:
        try:
            for batch in read_ranges(log, ranges, clock=clock):
                some = [Run(TopicPartition(*place), list(run)) for place, run in groupby(batch, _place)]
                beside.take(some)
                for place, records in some:
                    ranges[place] = Range(records[-1].offset + 1, ranges[place].next)
                progress(len(batch))
        except OffsetLost:
            # Retention went on while we read: what is gone is judged as what was gone before.
            begins = log.beginning_offsets(list(ranges))
            moved = {p: Range(max(begins[p], r.first), max(begins[p], r.next)) for p, r in ranges.items()}
            if moved == ranges:
                raise
            ranges.update(moved)
        else:
            return


def look_in_archive(
    archive: Archive,
    sections: Sections,
    *,
    findings: list[Finding],
    progress: Callable[[int], None],
) -> dict[TopicPartition, Looked]:
    """What does not read is added to `findings`, and passed over."""
    looked: dict[TopicPartition, Looked] = {}
    with ThreadPoolExecutor(2, thread_name_prefix="archive") as pool:
        for place, placed in sections.items():
            follower = Follower(placed)
            for run in runs(placed):
                position = archive.after(place, run.first)
                while position is not None and position < run.next:
                    position = archive.after(
                        place,
                        _archived(archive, place, position, run.next, follower, pool, findings, progress),
                    )
            follower.end()
            looked[place] = _looked(follower)
    return looked


def _archived(
    archive: Archive,
    place: TopicPartition,
    position: int,
    end: int,
    follower: Follower,
    pool: ThreadPoolExecutor,
    findings: list[Finding],
    progress: Callable[[int], None],
) -> int:
    """Where to go on, behind what is archived without a hole from `position`."""
    key = ""
    try:
        for packed in archive.packed(place, position, pool):
            if packed.frame.first >= end:
                return end
            key = packed.stretch.key
            for body in packed.bodies():
                offset = _prefix.decode(body).offset
                if position <= offset < end:
                    follower.take_encoded(offset, body)
                    position = offset + 1
            progress(packed.frame.records)
    except (ArchiveCorrupt, ObjectMissing, msgspec.DecodeError) as error:
        bad = error.key if isinstance(error, ArchiveCorrupt) and error.key else key
        stretch = archive.covering(place, position)
        # The one before it may go on behind its last record, where control records stand.
        while stretch is not None and bad not in ("", stretch.key):
            position = stretch.next
            stretch = archive.covering(place, position)
        gone = isinstance(error, ObjectMissing)
        bad = bad or (stretch.key if stretch else "")
        findings.append(
            Finding(
                kind=Kind.SEGMENT_MISSING if gone else Kind.SEGMENT_CORRUPT,
                where=bad or at(place.topic, place.partition, position),
                detail=str(error),
                position=Position(topic=place.topic, partition=place.partition, offset=position),
            )
        )
        return stretch.next if stretch else end
    # Behind the last record of a stretch it may still cover control records.
    while (stretch := archive.covering(place, position)) is not None and stretch.next > position:
        position = stretch.next
    return position


def _looked(follower: Follower) -> Looked:
    return Looked(frozenset(follower.verified), frozenset(follower.unlike), follower.records)
