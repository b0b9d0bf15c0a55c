"""What the archive holds that was never sealed: readers would take it for history, and no segment speaks of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from rollwire.schemas.catalogue import TOPICS
from rollwire.schemas.errors import ArchiveCorrupt, ObjectMissing
from rollwire.schemas.records import Position
from rollwire.streams.archive.heads import PartitionHead
from rollwire.streams.archive.stretches import Archive, Stretch
from rollwire.streams.archive.verify_read import Extent
from rollwire.streams.findings import Finding, Kind
from rollwire.streams.seams.log import TopicPartition


class _Outside(NamedTuple):
    stretch: Stretch
    offset: int
    detail: str


def look_outside(
    archive: Archive,
    sealed: Callable[[], Iterable[PartitionHead]],
    extents: Mapping[TopicPartition, Extent],
) -> list[Finding]:
    """`sealed`: what is sealed now. It is asked once the archive is listed, since what is copied was sealed before.

    An archiver begins a stretch at a sealed record and may end it behind the last one, where control records stand; never
    behind the end of the log, since readers take a log that ends before its archive does for another one.
    """
    topics = sorted({*TOPICS, *(place.topic for place in extents)})
    stretches = [
        stretch
        for topic in topics
        for partition in range(archive.partitions(topic))
        for stretch in archive.stretches(TopicPartition(topic, partition))
    ]
    known = {p.at: Extent(p.begin, p.next) for p in sealed()}
    found = (
        _outside(archive, one, known.get(one.partition), extents.get(one.partition)) for one in stretches
    )
    return [_finding(one) for one in found if one is not None]


def _outside(
    archive: Archive, stretch: Stretch, sealed: Extent | None, extent: Extent | None
) -> _Outside | None:
    if sealed is None or stretch.first >= sealed.end or stretch.first < sealed.begin:
        return _Outside(stretch, stretch.first, "nothing that begins here was ever sealed")
    if stretch.next <= sealed.end:
        return None
    if extent is not None and sealed.end <= extent.end < stretch.next:
        return _Outside(
            stretch, extent.end, f"it goes up to {stretch.next - 1:,}, and the log ends at {extent.end:,}"
        )
    try:
        record = next(archive.records(stretch.partition, sealed.end, stretch.next), None)
    except (ArchiveCorrupt, ObjectMissing):
        return None  # it holds what is sealed as well, whose readers said so
    if record is None:
        return None
    return _Outside(stretch, record.offset, "a record that was never sealed")


def _finding(outside: _Outside) -> Finding:
    topic, partition = outside.stretch.partition
    return Finding(
        kind=Kind.RECORDS_ADDED,
        where=outside.stretch.key,
        detail=outside.detail,
        position=Position(topic=topic, partition=partition, offset=outside.offset),
    )
