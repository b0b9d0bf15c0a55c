"""Reads what a follower must know from the log: versions, further ways between them, promotions."""

from __future__ import annotations

from typing import Final, Self

import structlog

from rollwire.schemas.errors import Refused, TopicMismatch
from rollwire.schemas.records import Event
from rollwire.streams.emit import decode_record
from rollwire.streams.seams.log import Log, TopicPartition

_VERSIONS: Final = TopicPartition("weight-versions", 0)
_OTHERS: Final = ("weight-links", "evaluations")
_log = structlog.get_logger()


class Tail:
    """From the beginning of the topics on. Of one thread; raises what the log raises: then make a new one."""

    def __init__(self, log: Log) -> None:
        partitions = [_VERSIONS, *_there(log)]
        self._reader = log.reader()
        try:
            self._reader.assign(log.beginning_offsets(partitions))
            self._ends = log.end_offsets(partitions)
        except BaseException:
            self._reader.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._reader.close()

    def poll(self, timeout_s: float) -> list[Event]:
        events: list[Event] = []
        for record in self._reader.poll(1_000, timeout_s):
            try:
                events.append(decode_record(record))
            except Refused as error:  # whoever consumes transactionally has it in dead-letters
                _log.warning(
                    "weights.event_refused", topic=record.topic, offset=record.offset, reason=error.reason
                )
        return events

    @property
    def caught_up(self) -> bool:
        """Whether all that stood there when this was made is read. Before, nothing should be acted on: what looks newest
        may be long since replaced."""
        if self._ends:
            at = self._reader.positions()
            self._ends = {p: end for p, end in self._ends.items() if at[p] < end}
        return not self._ends


def _there(log: Log) -> list[TopicPartition]:
    """A stack that was provisioned before these topics were thought of is followed without them."""
    found: list[TopicPartition] = []
    for topic in _OTHERS:
        try:
            found += [TopicPartition(topic, p) for p in range(log.partitions(topic))]
        except TopicMismatch as error:
            _log.warning("weights.topic_missing", error=str(error))
    return found
