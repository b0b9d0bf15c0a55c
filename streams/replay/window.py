"""Which part of a history is replayed, and what a replay makes of it. Pure."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Final, NamedTuple

from rollwire.schemas.errors import Refused
from rollwire.schemas.ids import opened_us
from rollwire.streams.replay.source import Timed
from rollwire.streams.seams.log import Outgoing, Record

EVER_US: Final = 2**62
_EPOCH: Final = datetime.fromisoformat("1970-01-01T00:00:00+00:00")


class Made(NamedTuple):
    """What a processor said at a moment of the history."""

    at_us: int
    output: Outgoing


class Window(NamedTuple):
    """From one moment to before another, by the broker's time; and from one offset to before another, of every partition.

    A group that was opened before it does not count: it would lack members.
    """

    from_us: int = 0
    to_us: int = EVER_US
    from_offset: int = 0
    to_offset: int = EVER_US

    def over(self, timed: Timed) -> bool:
        """Whether a record, and all that come later, are behind it."""
        return timed.at_us >= self.to_us

    def holds(self, timed: Timed) -> bool:
        """Whether a record of a group counts."""
        record = timed.record
        if self.over(timed) or not self.from_offset <= record.offset < self.to_offset:
            return False
        if not self.from_us:
            return True
        try:
            return opened_us((record.key or b"").decode(errors="replace")) >= self.from_us
        except Refused:
            return timed.at_us >= self.from_us  # no group's: refused by whoever reads it

    def end_us(self, last_us: int) -> int:
        """How far time passes: to the end, or to the last record where that is not said."""
        return last_us if self.to_us == EVER_US else self.to_us


def shadowed(record: Record) -> Record:
    """A record that a replay wrote, with the moment of the history that it was said at: its own timestamp tells when it was
    replayed."""
    for name, value in record.headers:
        if name == "ce_time" and value is not None:
            return record._replace(timestamp_ms=_time_us(value) // 1_000)
    return record


def _time_us(written: bytes) -> int:
    return (datetime.fromisoformat(written.decode()) - _EPOCH) // timedelta(microseconds=1)
