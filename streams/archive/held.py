"""What the archive holds, as heads say it: ranges of offsets. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rollwire.schemas.records import OffsetRange
from rollwire.streams.archive.stretches import Stretch
from rollwire.streams.seams.log import TopicPartition


def held(
    before: Sequence[OffsetRange], listed: Iterable[Stretch], over: Iterable[Stretch]
) -> tuple[OffsetRange, ...]:
    """What was held before and what is `listed`, without what is `over` its time. An object that is gone from the listing for
    no such reason stays in: it is missing, and a head does not make that good."""
    spans: dict[TopicPartition, list[tuple[int, int]]] = {}
    for one in before:
        spans.setdefault(TopicPartition(one.topic, one.partition), []).append((one.start, one.end))
    for stretch in listed:
        spans.setdefault(stretch.partition, []).append((stretch.first, stretch.next))
    gone: dict[TopicPartition, list[tuple[int, int]]] = {}
    for stretch in over:
        gone.setdefault(stretch.partition, []).append((stretch.first, stretch.next))
    return tuple(
        OffsetRange(topic=at.topic, partition=at.partition, start=start, end=end)
        for at in sorted(spans)
        for start, end in without(joined(spans[at]), joined(gone.get(at, [])))
    )


def joined(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same offsets, by ranges that do not touch."""
    found: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


def without(spans: Sequence[tuple[int, int]], gone: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Both as `joined` gives them."""
    found: list[tuple[int, int]] = []
    for start, end in spans:
        for a, b in gone:
            if a >= end or b <= start:
                continue
            if a > start:
                found.append((start, a))
            start = b
        if start < end:
            found.append((start, end))
    return found
