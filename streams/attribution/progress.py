"""How far the two topics were read, as a watermark in the records' own time: everything before it was read. Pure.

A record's time is the broker's clock when it was appended, so it never falls within a partition: having read a record of time t
proves that all before t were. Where nothing comes any more, having read all that was written when the end was asked for proves it
up to the moment of asking, less the difference that the two clocks may have.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

Place = Literal["next", "again", "unknown"]
"""The next record to process; one that was; or there may be others before it that were not."""


class Input(NamedTuple):
    """One partition of one of the topics. `topic` is without the prefix."""

    topic: str
    partition: int


class _Read:
    __slots__ = ("next", "until_us")

    def __init__(self, offset: int) -> None:
        self.next = offset  # everything before is processed
        self.until_us = 0  # everything of an earlier time is processed


class Progress:
    """Thread-confined."""

    def __init__(self) -> None:
        self._read: dict[Input, _Read] = {}

    def start(self, positions: Iterable[tuple[Input, int]]) -> None:
        """From now on these inputs are read, from these offsets, and no others."""
        self._read = {input_: _Read(offset) for input_, offset in positions}

    def place(self, input_: Input, offset: int, follows: int | None) -> Place:
        """Where a record stands that was delivered. `follows`: from there to `offset` is no other one; None = not known."""
        read = self._read.get(input_)
        if read is None:
            return "unknown"
        if offset < read.next:
            return "again"
        if offset == read.next or (follows is not None and follows <= read.next):
            return "next"
        return "unknown"

    def taken(self, input_: Input, offset: int, at_us: int) -> None:
        """A record was processed."""
        read = self._read.get(input_)
        if read is None:
            read = self._read[input_] = _Read(offset)
        read.next = offset + 1
        read.until_us = max(read.until_us, at_us)

    def next_offset(self, input_: Input) -> int | None:
        read = self._read.get(input_)
        return None if read is None else read.next

    def inputs(self) -> list[Input]:
        return list(self._read)

    def partitions(self) -> set[int]:
        return {input_.partition for input_ in self._read}

    def caught_up(self, input_: Input, position: int, end: int, asked_us: int) -> None:
        """`end` is where the input ended at `asked_us` by this machine's clock, its margin already taken off; nothing stands
        between what was processed and `position`. Proves nothing where `position` is before `end`."""
        read = self._read.get(input_)
        if read is not None and read.next >= position >= end and asked_us > read.until_us:
            read.until_us = asked_us

    def skip(self, input_: Input, seen: int, position: int) -> None:
        """Between `seen`, if that is still the next offset, and `position` stand no records (marks of transactions)."""
        read = self._read.get(input_)
        if read is not None and read.next == seen < position:
            read.next = position

    def watermark_us(self, partition: int, topics: Iterable[str]) -> int:
        """Everything of the partition before this time was processed, in all of `topics`."""
        reads = [self._read.get(Input(topic, partition)) for topic in topics]
        return min((0 if read is None else read.until_us for read in reads), default=0)
