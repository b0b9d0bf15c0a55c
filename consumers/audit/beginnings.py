"""Whether topics that are kept for ever still begin where they began: what is gone from them was taken, and no policy did it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from rollwire.schemas.catalogue import TOPICS
from rollwire.streams.findings import Finding, Kind, gap
from rollwire.streams.seams.log import Log
from rollwire.streams.seams.places import existing, partitions_of

VERSIONS: Final = "weight-versions"


def cut_beginnings(log: Log, topics: Iterable[str]) -> list[Finding]:
    """`log`: one that reads across the archive. Topics with a retention are passed over."""
    kept = [topic for topic in topics if TOPICS[topic].retention_ms < 0 and not TOPICS[topic].compacted]
    partitions = partitions_of(log, existing(log, kept))
    begins = log.beginning_offsets(partitions) if partitions else {}
    return [gap(at.topic, at.partition, 0, begin) for at, begin in sorted(begins.items()) if begin > 0]


def versions_gone(findings: Iterable[Finding]) -> bool:
    """Whether versions may have been published of which nothing is known any more."""
    return any(
        one.kind is Kind.HISTORY_GAP and one.position is not None and one.position.topic == VERSIONS
        for one in findings
    )
