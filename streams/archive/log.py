"""The archive and the log as one: positions below the log's beginning come from the archive, the others from the log."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, Literal, NamedTuple

from rollwire.schemas.catalogue import TOPICS
from rollwire.schemas.errors import TopicMismatch
from rollwire.streams.archive.archived_reader import ArchivedReader
from rollwire.streams.archive.stretches import Archive
from rollwire.streams.seams.log import Log, Reader, TopicPartition, TransactionalWriter, Writer
from rollwire.streams.seams.store import ObjectStore

_FETCHERS: Final = 4
_GONE_S: Final = 30.0


class Extent(NamedTuple):
    """The offsets of a partition that a log has: [begin, end)."""

    begin: int
    end: int


Source = Literal["archive", "log", "end", "lost"]
"""Who has a position: "end" = it is the end of a partition that the log does not have any more; "lost" = nobody."""


class ArchivedLog:
    """A `Log` that reads across the archive of the run `name` and its live log.

    - Where both have a position the log gives it; on compacted topics the archive, since it has every record.
    - A topic that the log does not have any more, or that begins anew there (its end is below what is archived), is read
      from the archive alone.
    - What neither has raises `OffsetLost` in a reader; `readable_from` says where reading can go on.
    - An archived object that does not read is set aside (`archive.aside`), and its offsets are lost unless the log has them.

    Writing, committing and asking for committed offsets are the live log's. `close` leaves the live log open.
    """

    def __init__(self, live: Log, store: ObjectStore, name: str) -> None:
        self.live = live
        self.archive = Archive(store, name)
        self._gone: dict[str, float] = {}  # archived topics that the log does not have, and when it was asked
        self._pool = ThreadPoolExecutor(_FETCHERS, thread_name_prefix="archive")

    def reader(self) -> Reader:
        return ArchivedReader(self, self._pool)

    def writer(self) -> Writer:
        return self.live.writer()

    def transactional_writer(self, transactional_id: str, timeout_s: float = 60.0) -> TransactionalWriter:
        return self.live.transactional_writer(transactional_id, timeout_s)

    def partitions(self, topic: str) -> int:
        archived = self.archive.partitions(topic)
        if archived and self._is_gone(topic):
            return archived
        try:
            return max(archived, self.live.partitions(topic))
        except TopicMismatch:
            if not archived:
                raise
            self._gone[topic] = time.monotonic()
            return archived

    def committed(self, group: str, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
        return self.live.committed(group, partitions)

    def beginning_offsets(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
        found: dict[TopicPartition, int] = {}
        for partition, extent in self.extents(partitions).items():
            archived = self.archive.begin(partition)
            begins = [b for b in (archived, None if extent is None else extent.begin) if b is not None]
            found[partition] = min(begins)
        return found

    def end_offsets(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
        return {p: self._end(p, extent) for p, extent in self.extents(partitions).items()}

    def written_offsets(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
        extents = self.extents(partitions)
        live = [p for p, extent in extents.items() if extent is not None]
        written = self.live.written_offsets(live) if live else {}
        return {p: written[p] if p in written else self._end(p, extents[p]) for p in extents}

    def readable_from(self, partition: TopicPartition, position: int) -> int | None:
        """The first offset from `position` on that can be read; None: there is none, nor will be."""
        self.archive.refresh([partition.topic])
        extent = self.extents([partition])[partition]
        if self.source(partition, position, extent) != "lost":
            return position
        later = [
            o for o in (self.archive.after(partition, position), extent and extent.begin) if o is not None
        ]
        return min((o for o in later if o >= position), default=None)

    def close(self) -> None:
        """Ends what fetches ahead."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    # -- for its readers ------------------------------------------------------------------------------------------

    def extents(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, Extent | None]:
        """What the live log has of each; None: nothing of what is archived. Raises `TopicMismatch` where neither knows
        a partition."""
        topics = {p.topic for p in partitions}
        asked = [p for p in partitions if not self._is_gone(p.topic)]
        try:
            begins = self.live.beginning_offsets(asked) if asked else {}
            ends = self.live.end_offsets(asked) if asked else {}
        except TopicMismatch:
            if len(topics) > 1:  # of which of them it is that is not there the log says nothing
                each = ([p for p in partitions if p.topic == topic] for topic in sorted(topics))
                return {p: extent for those in each for p, extent in self.extents(those).items()}
            if any(self.archive.end(p) is None for p in partitions):
                raise
            self._gone[partitions[0].topic] = time.monotonic()
            return dict.fromkeys(partitions)
        found: dict[TopicPartition, Extent | None] = {}
        for partition in partitions:
            archived = self.archive.end(partition)
            again = partition not in ends or (archived is not None and ends[partition] < archived)
            found[partition] = None if again else Extent(begins[partition], ends[partition])
        return found

    def _is_gone(self, topic: str) -> bool:
        """Whether the log was asked for this topic just now, and did not have it: a broker is asked for long, since a topic
        may be new."""
        return time.monotonic() - self._gone.get(topic, -_GONE_S) < _GONE_S

    def source(self, partition: TopicPartition, position: int, extent: Extent | None) -> Source:
        archived = self.archive.covering(partition, position) is not None
        if archived and (extent is None or position < extent.begin or compacted(partition.topic)):
            return "archive"
        if extent is not None:
            return "log" if position >= extent.begin else "lost"
        return "end" if position == self.archive.end(partition) else "lost"

    def _end(self, partition: TopicPartition, extent: Extent | None) -> int:
        return extent.end if extent is not None else self.archive.end(partition) or 0


def compacted(topic: str) -> bool:
    """Of such a topic the log keeps a part, wherever one stands in it."""
    return topic in TOPICS and TOPICS[topic].compacted
