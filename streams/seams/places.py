"""Which topics and partitions of a log there are."""

from __future__ import annotations

from collections.abc import Iterable

from rollwire.schemas.errors import TopicMismatch
from rollwire.streams.seams.log import Log, TopicPartition


def exists(log: Log, topic: str) -> bool:
    """A stack that was provisioned by an older release lacks the newer topics; another one may have been taken down in parts."""
    try:
        log.partitions(topic)
    except TopicMismatch:
        return False
    return True


def existing(log: Log, topics: Iterable[str]) -> list[str]:
    """Those of `topics` that exist, in their order."""
    return [topic for topic in topics if exists(log, topic)]


def partitions_of(log: Log, topics: Iterable[str]) -> list[TopicPartition]:
    """All partitions of `topics`, in order. Raises `TopicMismatch` where one of them does not exist."""
    return [TopicPartition(topic, p) for topic in topics for p in range(log.partitions(topic))]


def existing_partitions(log: Log, topics: Iterable[str]) -> list[TopicPartition]:
    """Those of `topics` that exist, asked once each: a broker is asked for long, since a topic may be new."""
    found: list[TopicPartition] = []
    for topic in topics:
        try:
            found += partitions_of(log, [topic])
        except TopicMismatch:
            continue
    return found


def size_of(log: Log, topics: Iterable[str]) -> int:
    """Offsets that the existing ones of `topics` hold: as many records at most, since control records have offsets too."""
    partitions = existing_partitions(log, topics)
    begins, ends = log.beginning_offsets(partitions), log.end_offsets(partitions)
    return sum(ends[p] - begins[p] for p in partitions)
