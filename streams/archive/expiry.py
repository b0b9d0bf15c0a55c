"""What is over its time in the archive. A head names it first, then it is deleted: so that it is never missing without a reason."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from rollwire.schemas.catalogue import TOPICS
from rollwire.streams.archive.archiver import archive_ms
from rollwire.streams.archive.chain import Segment
from rollwire.streams.archive.heads import Expired
from rollwire.streams.archive.policies import length
from rollwire.streams.archive.sealed import Sealed, Trusted, heads_of, opened
from rollwire.streams.archive.stretches import Stretch, listed
from rollwire.streams.seams.log import TopicPartition
from rollwire.streams.seams.store import ObjectStore


class Aged(NamedTuple):
    """A stretch, and when its oldest record was written."""

    stretch: Stretch
    first_ms: int


class Due(NamedTuple):
    """What is to be deleted, and what the next head has to say before."""

    stretches: tuple[Stretch, ...]
    expired: tuple[Expired, ...]  # that no head names yet


NOTHING_DUE: Final = Due((), ())


def policy_of(topic: str) -> str:
    """For people, as it stands in heads."""
    return f"archive_ms of {topic}: {length(archive_ms(topic))}"


def limited(topics: Iterable[str] = TOPICS) -> list[str]:
    """The topics that are archived for a time only."""
    return [topic for topic in topics if archive_ms(topic) > 0]


def due(
    aged: Sequence[Aged], kept_ms: int, now_us: int, named: Mapping[TopicPartition, Sequence[Expired]]
) -> Due:
    """Pure. A stretch is over its time as soon as its oldest record is: no record stays for longer than `kept_ms`."""
    over = [one.stretch for one in aged if one.first_ms + kept_ms <= now_us // 1_000]
    fresh = [s for s in over if not _covered(s, named.get(s.partition, ()))]
    return Due(tuple(over), tuple(_ranges(fresh, named, now_us)))


def find_due(
    store: ObjectStore, name: str, sealed: Sealed, now_us: int, trusted: Trusted | None = None
) -> Due:
    """Of all topics that are archived for a time. Raises what the store raises, and what a head may."""
    over: list[Stretch] = []
    expired: list[Expired] = []
    named: dict[TopicPartition, tuple[Expired, ...]] | None = None
    for topic in limited():
        for at, stretches in listed(store, name, topic).items():
            aged = list(_aged(stretches, sealed.segments.get(at, ())))
            if not due(aged, archive_ms(topic), now_us, {}).stretches:
                continue
            if named is None:  # seldom, and all heads are read for it
                named = named_in_heads(store, name, trusted)
            found = due(aged, archive_ms(topic), now_us, named)
            over += found.stretches
            expired += found.expired
    return Due(tuple(over), tuple(expired))


def delete_due(store: ObjectStore, what: Due) -> int:
    """Deletes the stretches, once a head names what expired; how many."""
    for stretch in what.stretches:
        store.delete(stretch.key)
    return len(what.stretches)


def named_in_heads(
    store: ObjectStore, name: str, trusted: Trusted | None
) -> dict[TopicPartition, tuple[Expired, ...]]:
    """What all heads say that has expired. Raises `HeadInvalid`, `KeyUnknown`, `SignatureInvalid`."""
    found: dict[TopicPartition, tuple[Expired, ...]] = {}
    for stored in heads_of(store, name):
        for one in opened(stored, trusted).expired:
            at = TopicPartition(one.topic, one.partition)
            found[at] = (*found.get(at, ()), one)
    return found


def _aged(stretches: Sequence[Stretch], segments: Sequence[Segment]) -> Iterator[Aged]:
    """By what is sealed of them; so one that does not read is over its time as well."""
    ends = [s.next for s in segments]
    for stretch in stretches:
        inside = segments[bisect_right(ends, stretch.first) : bisect_left(ends, stretch.next) + 1]
        if inside:
            yield Aged(stretch, min(s.first_ms for s in inside))


def _covered(stretch: Stretch, named: Collection[Expired]) -> bool:
    position = stretch.first
    for one in sorted(named, key=lambda e: e.first):
        if one.first <= position < one.next:
            position = one.next
    return position >= stretch.next


def _ranges(
    stretches: Sequence[Stretch], named: Mapping[TopicPartition, Sequence[Expired]], now_us: int
) -> Iterator[Expired]:
    """Neighbours are one range, with what was named before as well: one range covers a segment that stretches cut."""
    for at in sorted({s.partition for s in stretches}):
        known = named.get(at, ())
        spans = sorted(
            [(s.first, s.next, True) for s in stretches if s.partition == at]
            + [(e.first, e.next, False) for e in known]
        )
        first, next, fresh = spans[0]
        for a, b, new in spans[1:]:
            if a <= next:
                next, fresh = max(next, b), fresh or new
                continue
            if fresh:
                yield _expired(at, first, next, now_us)
            first, next, fresh = a, b, new
        if fresh:
            yield _expired(at, first, next, now_us)


def _expired(at: TopicPartition, first: int, next: int, now_us: int) -> Expired:
    return Expired(
        topic=at.topic,
        partition=at.partition,
        first=first,
        next=next,
        policy=policy_of(at.topic),
        at_us=now_us,
    )
