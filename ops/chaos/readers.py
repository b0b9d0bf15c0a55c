"""Two witnesses: a reader that watches all the while, through every fault, and one that reads everything afterwards."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from typing import Final

from rollwire.ops.chaos.verdict import (
    Fact,
    SeenFate,
    SeenGroup,
    SeenLetter,
    SeenMember,
    SeenStep,
    SeenVersion,
    Sighting,
    Unreadable,
)
from rollwire.ops.chaos.workload import fingerprint, tag
from rollwire.schemas.errors import DeadlineExceeded, Refused, RollwireError
from rollwire.schemas.records import (
    DeadLetter,
    Event,
    Group,
    GroupFate,
    PackedBatch,
    TrainStep,
    WeightVersion,
)
from rollwire.streams.emit import decode_record
from rollwire.streams.seams.log import Log, Record, TopicPartition
from rollwire.streams.seams.scan import scan

WATCHED: Final = ("groups", "group-fates", "packed-batches", "train-steps", "weight-versions", "dead-letters")
_POLL_S: Final = 0.2


def sight(record: Record) -> Sighting:
    """What a record says, as far as the verdict needs it."""
    try:
        fact = _fact(decode_record(record))
    except Refused as refused:
        fact = Unreadable(f"{refused}")
    return Sighting(record.topic, record.partition, record.offset, fact)


def _fact(event: Event) -> Fact:
    match event:
        case Group():
            members = (
                SeenMember(m.rollout.rollout_id, m.reward, fingerprint(m.rollout)) for m in event.members
            )
            return SeenGroup(event.group_id, tuple(members))
        case GroupFate():
            return SeenFate(event.group_id, event.decided_by, event.reason, event.members)
        case PackedBatch():
            return event
        case TrainStep():
            consumed = tuple((r.partition, r.start, r.end) for r in event.consumed)
            return SeenStep(
                event.lineage, event.step, event.version, event.plan_digest, event.state_digest, consumed
            )
        case WeightVersion():
            return SeenVersion(event.lineage, event.version, event.step, event.state_digest)
        case DeadLetter():
            at = event.source
            return SeenLetter(
                (at.topic, at.partition, at.offset),
                event.refused_by,
                event.reason,
                tag({header.key: header.value for header in event.headers}),
            )
        case _:
            return Unreadable(f"{type(event).__name__} on a topic that is watched")


def read_all(log: Log) -> list[Sighting]:
    """Everything from the beginning to where the topics end now. Raises `DeadlineExceeded` where the log stands still."""
    return [sight(record) for record in scan(log, WATCHED)]


class Watcher:
    """Reads from the beginning as records come, in a thread of its own, until it is closed.

    The log's patience must be longer than any outage: this reader is never made anew, since what it is given over one
    outage after the other is what it is there to tell.
    """

    def __init__(self, log: Log) -> None:
        self._log = log
        self._partitions = [
            TopicPartition(topic, p) for topic in WATCHED for p in range(log.partitions(topic))
        ]
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._sightings: list[Sighting] = []
        self._counts: Counter[str] = Counter()
        self._letters: set[str] = set()
        self._positions: dict[TopicPartition, int] = {}
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="chaos-watcher", daemon=True)
        self._thread.start()

    def counts(self) -> Mapping[str, int]:
        """Records seen so far, by topic. Raises what ended the reader, if anything did."""
        if self._failure is not None:
            raise self._failure
        with self._lock:
            return dict(self._counts)

    def refused(self) -> frozenset[str]:
        """Ids of the records whose dead letters were seen so far."""
        with self._lock:
            return frozenset(self._letters)

    def drain(self, deadline_s: float) -> list[Sighting]:
        """Waits until it has read what is there now; all that it was given. Raises `DeadlineExceeded`."""
        ends = self._log.end_offsets(self._partitions)
        pause = threading.Event()
        waited = 0.0
        while True:
            self.counts()
            with self._lock:
                left = {p: end for p, end in ends.items() if self._positions.get(p, 0) < end}
                if not left:
                    return list(self._sightings)
            if waited > deadline_s:
                where = ", ".join(f"{p.topic}[{p.partition}] to {end}" for p, end in left.items())
                raise DeadlineExceeded(
                    f"the reader had not read {where} after {deadline_s:g} s; it stands still"
                )
            pause.wait(_POLL_S)
            waited += _POLL_S

    def close(self) -> None:
        self._stop.set()
        self._thread.join(10.0)

    def _run(self) -> None:
        try:
            reader = self._log.reader()
            try:
                reader.assign(self._log.beginning_offsets(self._partitions))
                while not self._stop.is_set():
                    seen = [sight(record) for record in reader.poll(1_000, _POLL_S)]
                    with self._lock:
                        self._sightings += seen
                        self._counts.update(one.topic for one in seen)
                        self._letters.update(
                            one.fact.identity for one in seen if isinstance(one.fact, SeenLetter)
                        )
                        self._positions = reader.positions()
            finally:
                reader.close()
        except RollwireError as failure:
            self._failure = failure
