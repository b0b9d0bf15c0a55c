"""The ledger, added up from the topic: is everything there that was answered with a 2xx, and is anything there twice?

Repeats are counted twice over: as records (a retry whose first try had been written after all; each is harmless), and behind
the stream's repeat check, where there must be none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollwire.ops.bench.feedback.generator import Outcome
from rollwire.schemas.records import Feedback
from rollwire.streams.emit import decode_record
from rollwire.streams.seams.log import Log, Record, TopicPartition

TOPIC: Final = "user-feedback"
_POLL: Final = 10_000


class Acknowledged(NamedTuple):
    """What one phase was told: the first number of every ask with a 2xx, and the events of an ask."""

    name: str  # of its bodies
    firsts: Sequence[int]
    batch: int
    sent: int  # events that were ever sent


class Ledger(NamedTuple):
    records: int
    distinct: int  # events in the topic, by id
    lost: int  # acknowledged, and not in the topic
    unasked: int  # in the topic, and never sent: none
    again: int  # records beyond an event's first
    found: Mapping[str, int]  # distinct events in the topic, by phase


def acknowledged(name: str, outcome: Outcome, batch: int) -> Acknowledged:
    return Acknowledged(name, outcome.accepted, batch, outcome.asked * batch)


def read_topic(log: Log) -> Iterable[Record]:
    """Every record that is in the topic now, oldest first in each partition."""
    partitions = [TopicPartition(TOPIC, number) for number in range(log.partitions(TOPIC))]
    ends = log.end_offsets(partitions)
    reader = log.reader()
    try:
        reader.assign(log.beginning_offsets(partitions))
        while any(reader.positions()[one] < ends[one] for one in partitions):
            yield from (
                record
                for record in reader.poll(_POLL, 1.0)
                if record.offset < ends[TopicPartition(record.topic, record.partition)]
            )
    finally:
        reader.close()


class Counts:
    """How often each event of the phases is in the topic."""

    def __init__(self, phases: Sequence[Acknowledged]) -> None:
        self._phases = phases
        self._seen: Mapping[str, NDArray[np.int32]] = {
            phase.name: np.zeros(phase.sent, np.int32) for phase in phases
        }
        self._records = self._unasked = 0

    def take(self, feedback_id: str) -> None:
        self._records += 1
        name, _, number = feedback_id.rpartition("-")
        seen = self._seen.get(name)
        if seen is None or not number.isdecimal() or int(number) >= len(seen):
            self._unasked += 1
        else:
            seen[int(number)] += 1

    def ledger(self) -> Ledger:
        lost = 0
        for phase in self._phases:
            firsts = np.asarray(phase.firsts, np.int64)
            told = (firsts[:, None] + np.arange(phase.batch)).ravel()
            lost += int((self._seen[phase.name][told] == 0).sum())
        every = list(self._seen.values())
        distinct = sum(int((seen > 0).sum()) for seen in every)
        return Ledger(
            records=self._records,
            distinct=distinct,
            lost=lost,
            unasked=self._unasked,
            again=sum(int(seen.sum()) for seen in every) - distinct,
            found={name: int((seen > 0).sum()) for name, seen in self._seen.items()},
        )


def count_topic(
    log: Log, phases: Sequence[Acknowledged], also: Callable[[Record, Feedback], None] = lambda *_: None
) -> Ledger:
    """`also` is told every event of the topic, in the order of each partition."""
    counts = Counts(phases)
    for record in read_topic(log):
        event = decode_record(record)
        if isinstance(event, Feedback):
            counts.take(event.feedback_id)
            also(record, event)
    return counts.ledger()
