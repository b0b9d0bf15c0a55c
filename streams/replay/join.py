"""The join of one partition that closes no group by itself: it is told when, and with which cut. For replays of the past.

What becomes of a group depends on its records alone, those in time, in the order of each input. So it may be read further
than the live join had been: a group that is whole, or past its deadline, stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from rollwire.schemas.records import Cut
from rollwire.streams.assemble import Assembler
from rollwire.streams.assemble_config import JoinConfig
from rollwire.streams.assemble_group import OpenGroup
from rollwire.streams.emit import take
from rollwire.streams.seams.log import Outgoing, Record

_TIDY: Final = 1_000  # records between two clearings of what closed groups left behind


class Join(Assembler):
    """`feed`'s outputs are refusals alone; `close` gives a group's outcome and its mark."""

    def __init__(self, partition: int, config: JoinConfig) -> None:
        super().__init__(partition, config)
        self.start(dict.fromkeys(self.inputs, 0), {})
        self._given: Cut | None = None
        self._fed = 0
        self.traced = config.traced

    def read_on(self, record: Record) -> list[Outgoing]:
        """Takes a record. Its own time is the clock: it was read no earlier."""
        self._fed += 1
        if self._fed % _TIDY == 0:
            self.committable()
        return self.feed([take(record)], record.timestamp_ms * 1_000)

    def whole(self, group_id: str) -> bool:
        """Whether nothing can come any more that would change the outcome of an open group."""
        group = self._open.get(group_id)
        return group is not None and group.whole(traces=self.traced)

    def is_open(self, group_id: str) -> bool:
        return group_id in self._open

    def deadline_us(self, group_id: str) -> int:
        """When the deadline of an open group strikes."""
        return self._open[group_id].deadline_us + self._grace_us

    def open_ids(self) -> tuple[str, ...]:
        """In the order in which they were opened."""
        return tuple(self._open)

    def close(self, group_id: str, cut: Cut) -> list[Outgoing]:
        """Decides an open group with this cut: its group or fate, and its mark. Raises `KeyError` for one that is not open."""
        self._given = cut
        outputs: list[Outgoing] = []
        super()._close(self._open[group_id], cut.clock_us, outputs)
        return outputs

    def drop(self, group_ids: Iterable[str]) -> None:
        """Forgets open groups that nobody asks for."""
        for group_id in group_ids:
            if group_id in self._open:
                self._forget_open(self._open[group_id])

    def _close(self, group: OpenGroup, clock_us: int, outputs: list[Outgoing]) -> None:
        """Not by itself."""

    def _cut(self, clock_us: int) -> Cut:
        return self._given if self._given is not None else super()._cut(clock_us)
