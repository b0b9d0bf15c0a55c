"""Reads a topic and gives its records readably, filtered; ends at the end of the topic or follows it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from rollwire.ops.readable import Look, matches, readable_record, shut
from rollwire.schemas.catalogue import topic_named
from rollwire.schemas.errors import ConfigError
from rollwire.streams.seams.log import Log, Record, TopicPartition
from rollwire.streams.seams.scan import scan

_POLL_S: Final = 0.2
_RECORDS: Final = 500


class Query(NamedTuple):
    topic: str  # without the prefix
    where: tuple[tuple[str, str], ...] = ()  # (dotted path in the event or the record, value); all must match
    key: str | None = None
    partition: int | None = None  # None = all
    start: str = "beginning"  # "beginning" | "end" | an offset | "-n": the last n offsets of each partition
    limit: int | None = None  # records to give at most
    follow: bool = False


def parse_where(terms: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """`path=value` terms. Raises `ConfigError`."""
    found = []
    for term in terms:
        path, equals, value = term.partition("=")
        if not equals or not path:
            raise ConfigError(f"--where {term!r} is not of the form field=value, as in spans.version=3")
        found.append((path, value))
    return tuple(found)


def cat(log: Log, query: Query, stop: threading.Event, look: Look = shut) -> Iterator[dict[str, Any]]:
    """The records that fit, in order within each partition, as JSON values (`readable_record`, where `look` is said).

    What is no event is given too, with the reason it would be refused for. Following ends when `stop` is set.
    Raises `ConfigError` for a topic, partition or start that cannot be, and what the log raises.
    """
    given = 0
    for record in _records(log, query, stop):
        if query.key is not None and record.key != query.key.encode():
            continue
        shown = readable_record(record, look)
        # `event.reward` and `reward` are both understood: people filter by what the event says.
        if not all(
            matches(shown, path, value) or matches(shown.get("event"), path, value)
            for path, value in query.where
        ):
            continue
        yield shown
        given += 1
        if query.limit is not None and given >= query.limit:
            return


def starts(log: Log, query: Query) -> dict[TopicPartition, int]:
    """The offset to begin at in each partition that is asked for."""
    topic_named(query.topic)
    count = log.partitions(query.topic)
    if query.partition is not None and not 0 <= query.partition < count:
        raise ConfigError(f"{query.topic} has partitions 0 to {count - 1}, not {query.partition}")
    wanted = range(count) if query.partition is None else [query.partition]
    partitions = [TopicPartition(query.topic, p) for p in wanted]
    begins = log.beginning_offsets(partitions)
    if query.start == "beginning":
        return begins
    ends = log.end_offsets(partitions)
    if query.start == "end":
        return ends
    try:
        number = int(query.start)
    except ValueError:
        raise ConfigError(f"--from {query.start!r} is neither beginning, end, an offset nor -n") from None
    return {p: min(max(number if number >= 0 else ends[p] + number, begins[p]), ends[p]) for p in partitions}


def _records(log: Log, query: Query, stop: threading.Event) -> Iterator[Record]:
    begin = starts(log, query)
    if not query.follow:
        others = [TopicPartition(query.topic, p) for p in range(log.partitions(query.topic))]
        skipped = [p for p in others if p not in begin]
        yield from scan(log, [query.topic], start=begin | (log.end_offsets(skipped) if skipped else {}))
        return
    reader = log.reader()
    try:
        reader.assign(begin)
        while not stop.is_set():
            yield from reader.poll(_RECORDS, _POLL_S)
    finally:
        reader.close()
