"""Dead letters of feedback that was read a while ago: the table keeps no content, so the records are read again from the log."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Final

import structlog

from rollwire.schemas.errors import LogUnavailable, OffsetLost, Refused
from rollwire.streams.attribution.fold import Refusal
from rollwire.streams.dead_letter import dead_letter
from rollwire.streams.seams.log import Log, Outgoing, Record, TopicPartition

REFUSED_BY: Final = "attribution"
FEEDBACK: Final = "user-feedback"

_FAR: Final = 500  # records that are read past rather than sought over
_PATIENCE_S: Final = 20.0
_logger = structlog.get_logger("rollwire.attribution")


def refused_letter(record: Record, reason: str, detail: str, at_us: int) -> Outgoing:
    """The same bytes whenever it is made: a repeat after a crash is dropped by its id."""
    return dead_letter(record, Refused(reason, detail), refused_by=REFUSED_BY, time_us=at_us)


def letters_of(log: Log, refusals: Sequence[tuple[int, Refusal]]) -> list[Outgoing]:
    """The dead letters of records of `user-feedback`, by (partition, refusal). Raises `LogError`.

    A record that is no longer in the log (its retention is shorter than the rules' horizon) is said, and left out.
    """
    by_partition: dict[int, dict[int, Refusal]] = defaultdict(dict)
    for partition, refusal in refusals:
        by_partition[partition][refusal.offset] = refusal
    made: list[Outgoing] = []
    for partition, wanted in by_partition.items():
        for run in _runs(sorted(wanted)):
            for record in _read(log, TopicPartition(FEEDBACK, partition), run):
                refusal = wanted[record.offset]
                made.append(refused_letter(record, refusal.reason, refusal.detail, refusal.at_us))
    return made


def _runs(offsets: Iterable[int]) -> list[list[int]]:
    """Ascending offsets in runs without large holes."""
    runs: list[list[int]] = []
    for offset in offsets:
        if runs and offset - runs[-1][-1] <= _FAR:
            runs[-1].append(offset)
        else:
            runs.append([offset])
    return runs


def _read(log: Log, partition: TopicPartition, offsets: Sequence[int]) -> list[Record]:
    wanted = frozenset(offsets)
    found: list[Record] = []
    reader = log.reader()
    deadline = time.monotonic() + _PATIENCE_S
    try:
        reader.assign({partition: offsets[0]})
        while reader.positions()[partition] <= offsets[-1]:
            found.extend(record for record in reader.poll(1_000, 0.5) if record.offset in wanted)
            if time.monotonic() > deadline:
                raise LogUnavailable(
                    f"{FEEDBACK}[{partition.partition}] was not read up to {offsets[-1]} in {_PATIENCE_S:g} s"
                )
    except OffsetLost as lost:
        _logger.error("attribution.letters_lost", partition=partition.partition, error=str(lost))
    finally:
        reader.close()
    return found
