"""Records that a processor set aside undecoded, since a worker had died of each: a replay must not decide by them either."""

from __future__ import annotations

from typing import Final

from rollwire.streams.dead_letter import Place, letter_of
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
