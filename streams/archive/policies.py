"""Which policy took sealed records away: retention and erasure are no tampering. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from rollwire.schemas.catalogue import TOPICS, TopicSpec
from rollwire.streams.archive.chain import Segment
from rollwire.streams.archive.heads import Expired, Head
from rollwire.streams.archive.marks import Mark
from rollwire.streams.seams.log import TopicPartition

_DAY_MS: Final = 86_400_000


class Policy(NamedTuple):
    """How long a topic's records are kept by the log."""

    retention_ms: int  # -1: for ever
    compacted: bool


def policy_of(spec: TopicSpec) -> Policy:
    return Policy(spec.retention_ms if "delete" in spec.cleanup_policy else -1, spec.compacted)


POLICIES: Final[Mapping[str, Policy]] = {name: policy_of(spec) for name, spec in TOPICS.items()}


class Policies:
    """What the topics' settings and the heads say of records that are not there any more."""

    def __init__(self, topics: Mapping[str, Policy], heads: Iterable[Head], now_us: int) -> None:
        self._topics = topics
        self._now_ms = now_us // 1_000
        self._expired: dict[TopicPartition, list[Expired]] = {}
        for head in heads:
            for gone in head.expired:
                self._expired.setdefault(TopicPartition(gone.topic, gone.partition), []).append(gone)

    def expired(self, segment: Segment) -> str | None:
        """The policy by which the archive let go of a segment, as its heads tell."""
        for gone in self._expired.get(TopicPartition(segment.topic, segment.partition), ()):
            if gone.first <= segment.first and segment.next <= gone.next:
                return gone.policy
        return None

    def kept(self, segment: Segment, marks: Sequence[Mark]) -> tuple[Sequence[Mark], str | None]:
        """Those of a segment's `marks` that the archive has not let go of, and the policy by which it let go of others."""
        gone = [
            one
            for one in self._expired.get(TopicPartition(segment.topic, segment.partition), ())
            if one.first < segment.next and segment.first < one.next
        ]
        left = [mark for mark in marks if not any(one.first <= mark.offset < one.next for one in gone)]
        return left, gone[0].policy if gone and len(left) < len(marks) else None

    def retention(self, segment: Segment, *, whole: bool) -> str | None:
        """The policy by which the log let go of a segment's beginning, or of all of it."""
        policy = self._topics.get(segment.topic)
        if policy is None or policy.retention_ms < 0:
            return None
        newest_ms = segment.last_ms if whole else segment.first_ms
        if newest_ms + policy.retention_ms > self._now_ms:
            return None
        return f"retention.ms of {segment.topic}: {length(policy.retention_ms)}"

    def compaction(self, topic: str) -> str | None:
        """The policy by which the log lets go of any record that has a successor."""
        policy = self._topics.get(topic)
        return f"cleanup.policy of {topic}: compact" if policy is not None and policy.compacted else None


def length(ms: int) -> str:
    """ "30 d", "12 h", "90 s"."""
    for unit, size in (("d", _DAY_MS), ("h", 3_600_000), ("min", 60_000), ("s", 1_000)):
        if ms >= size and ms % size == 0:
            return f"{ms // size:,} {unit}"
    return f"{ms:,} ms"
