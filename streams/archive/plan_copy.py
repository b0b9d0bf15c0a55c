"""What an archiver has to copy of a partition: sealed segments that no stretch covers. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

from rollwire.streams.archive.chain import Segment


class Todo(NamedTuple):
    """Neighbouring segments to copy. They are read whole, to be checked, and written from `write_from` on: what is below
    is in the archive."""

    segments: tuple[Segment, ...]
    write_from: int

    @property
    def next(self) -> int:
        return self.segments[-1].next


def to_copy(
    segments: Sequence[Segment],
    covered: Callable[[int], int],
    *,
    oldest_ms: int = -1,
    without: Collection[int] = (),
) -> Iterator[Todo]:
    """`covered` says up to where the archive goes on from an offset, without a hole. Segments with records from before
    `oldest_ms` are over their time already, those whose first offset is in `without` are not to be had."""
    run: list[Segment] = []
    write_from = 0
    index = 0
    while index < len(segments):
        segment = segments[index]
        upto = covered(segment.first)
        wanted = upto < segment.next and segment.first_ms >= oldest_ms and segment.first not in without
        if run and (not wanted or upto > segment.first):
            yield Todo(tuple(run), write_from)
            run = []
        if wanted:
            if not run:
                write_from = upto
            run.append(segment)
        # What is covered is passed over in one step: of a long history, most is.
        index = max(index + 1, bisect_right(segments, upto, key=lambda s: s.next))
    if run:
        yield Todo(tuple(run), write_from)
