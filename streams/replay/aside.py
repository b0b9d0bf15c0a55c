"""Records that a processor set aside undecoded, since a worker had died of each: a replay must not decide by them either."""

from __future__ import annotations

from typing import Final

from rollwire.schemas.errors import Refused
from rollwire.schemas.records import DeadLetter
from rollwire.streams.dead_letter import Place, letter_of
from rollwire.streams.emit import decode_record
from rollwire.streams.seams.log import Log, Outgoing, Record
from rollwire.streams.seams.scan import scan

LETTERS: Final = "dead-letters"
_DEADLY: Final = "kills_worker"


def letter_place(record: Record) -> tuple[Place, str] | None:
    """Of a record of `dead-letters`: where the refused record stands, and the reason; by its headers alone."""
    try:
        letter = letter_of(Outgoing(record.topic, record.key, None, record.headers))
    except (KeyError, UnicodeDecodeError, ValueError):
        return None  # not written by us
    return None if letter is None else (letter.at, letter.reason)


def set_aside(log: Log) -> frozenset[Place]:
    """Reads `dead-letters` once."""
    found = (letter_place(record) for record in scan(log, [LETTERS], lost=lambda _: None))
    return frozenset(one[0] for one in found if one is not None and one[1] == _DEADLY)


def refusals_by(log: Log, processor: str) -> dict[Place, tuple[str, Record]]:
    """What a processor refused: the refused record's place -> the reason, and the dead letter."""
    found: dict[Place, tuple[str, Record]] = {}
    for record in scan(log, [LETTERS], lost=lambda _: None):
        try:
            event = decode_record(record)
        except Refused:
            continue
        if isinstance(event, DeadLetter) and event.refused_by == processor and event.reason != _DEADLY:
            source = event.source
            slim = record._replace(value=None, headers=())
            found.setdefault((source.topic, source.partition, source.offset), (event.reason, slim))
    return found
