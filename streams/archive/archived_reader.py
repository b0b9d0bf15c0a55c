"""The reader of `ArchivedLog`: partitions move from the archive to the log as their positions do."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from typing import TYPE_CHECKING

from rollwire.schemas.errors import ArchiveCorrupt, LogError, OffsetLost
from rollwire.streams.archive.objects import decode_record
from rollwire.streams.archive.stretches import PackedFrames
from rollwire.streams.seams.log import Reader, Record, TopicPartition

if TYPE_CHECKING:
    from rollwire.streams.archive.log import ArchivedLog, Extent, Source


class _Tail:
    """What is archived of one partition from a position on: frames as they come, of the last one what is not taken."""

    def __init__(self, partition: TopicPartition, frames: PackedFrames) -> None:
        self._partition = partition
        self._frames = frames
        self._key = ""
        self._bodies: list[memoryview] = []
        self._at = 0

    def take(self, position: int, count: int, into: list[Record]) -> bool:
        """Appends up to `count` records from `position` on; False: that were the last ones. Raises `ArchiveCorrupt`
        where it comes to what does not read."""
        while count > 0:
            if self._at == len(self._bodies):
                packed = next(self._frames, None)
                if packed is None:
                    return False
                self._bodies, self._at, self._key = packed.bodies(), 0, packed.stretch.key
            part = self._bodies[self._at : self._at + count]
            for body in part:
                record = decode_record(body, self._partition, self._key)
                self._at += 1
                if record.offset >= position:
                    into.append(record)
                    position = record.offset + 1
                    count -= 1
        return True

    @property
    def upto(self) -> int:
        """Where the hole begins that ended it."""
        return self._frames.upto


class ArchivedReader:
    """See `Reader`. Its positions are its own: the live reader's are told, never asked, when one is lost."""

    def __init__(self, log: ArchivedLog, pool: Executor) -> None:
        self._log = log
        self._pool = pool
        self._live: Reader | None = None
        self._positions: dict[TopicPartition, int] = {}
        self._extents: dict[TopicPartition, Extent | None] = {}
        self._sources: dict[TopicPartition, Source] = {}
        self._tails: dict[TopicPartition, _Tail] = {}
        self._paused: set[TopicPartition] = set()

    def assign(self, positions: Mapping[TopicPartition, int]) -> None:
        for partition, offset in positions.items():
            _check(partition, offset)
        self._extents = self._log.extents(list(positions)) if positions else {}
        self._positions = dict(positions)
        self._paused.clear()
        self._tails.clear()
        self._sources = {p: self._source(p) for p in positions}
        self._reassign()

    def seek(self, partition: TopicPartition, offset: int) -> None:
        _check(partition, offset)
        if partition not in self._positions:
            raise LogError(
                f"{partition.topic}/{partition.partition} is not assigned: assign it before seeking"
            )
        self._positions[partition] = offset
        self._tails.pop(partition, None)
        before, now = self._sources[partition], self._source(partition)
        self._sources[partition] = now
        if now == before == "log" and self._live is not None:
            self._live.seek(partition, offset)
        elif "log" in (before, now):
            self._reassign()

    def pause(self, partitions: Sequence[TopicPartition]) -> None:
        self._paused.update(partitions)
        if self._live is not None and (those := self._of_log(partitions)):
            self._live.pause(those)

    def resume(self, partitions: Sequence[TopicPartition]) -> None:
        self._paused.difference_update(partitions)
        if self._live is not None and (those := self._of_log(partitions)):
            self._live.resume(those)

    def poll(self, max_records: int, timeout_s: float) -> list[Record]:
        deadline = time.monotonic() + timeout_s
        for partition in self._active("lost"):
            self._lose(partition)
        taken: list[Record] = []
        before = dict(self._positions)
        for partition in self._active("archive"):
            if len(taken) < max_records:
                self._from_archive(partition, max_records - len(taken), taken)
        left = max(0.0, deadline - time.monotonic())
        if taken or self._positions != before or self._active("lost"):
            return taken
        if self._live is not None and self._active("log"):
            return self._from_log(self._live, max_records, left)
        threading.Event().wait(left)  # nothing will ever come
        return []

    def positions(self) -> dict[TopicPartition, int]:
        return dict(self._positions)

    def close(self) -> None:
        self._tails.clear()
        self._positions, self._sources = {}, {}
        if self._live is not None:
            self._live.close()
            self._live = None

    def _from_archive(self, partition: TopicPartition, count: int, taken: list[Record]) -> None:
        position, had = self._positions[partition], len(taken)
        tail = self._tails.get(partition)
        if tail is None:
            tail = _Tail(partition, self._log.archive.packed(partition, position, self._pool))
            self._tails[partition] = tail
        bad: ArchiveCorrupt | None = None
        more = False
        try:
            more = tail.take(position, count, taken)
        except ArchiveCorrupt as failure:
            bad = failure  # what came before it is good
        if len(taken) > had:
            self._positions[partition] = taken[-1].offset + 1
        if more:
            return
        del self._tails[partition]
        if bad is None:
            self._positions[partition] = max(self._positions[partition], tail.upto)
        else:
            # The object is not asked again: its offsets are the log's, or lost.
            self._log.archive.set_aside(partition, bad.key, str(bad))
        self._look_again([partition])

    def _from_log(self, live: Reader, max_records: int, timeout_s: float) -> list[Record]:
        try:
            taken = live.poll(max_records, timeout_s)
        except OffsetLost:
            # Retention went on meanwhile: what it took is in the archive by now, or lost.
            those = [p for p, source in self._sources.items() if source == "log"]
            self._log.archive.refresh(sorted({p.topic for p in those}))
            if not self._look_again(those):
                raise
            return []
        self._positions |= live.positions()
        return taken

    def _active(self, source: Source) -> list[TopicPartition]:
        return [p for p, one in self._sources.items() if one == source and p not in self._paused]

    def _lose(self, partition: TopicPartition) -> None:
        """Raises `OffsetLost`, unless the archive has got it meanwhile."""
        self._log.archive.refresh([partition.topic])
        if self._look_again([partition]) and self._sources[partition] != "lost":
            return
        position = self._positions[partition]
        bad = "; ".join(self._log.archive.aside.values())
        raise OffsetLost(
            f"{partition.topic}/{partition.partition}: offset {position} is neither in the log nor in the archive "
            f"of {self._log.archive.name!r}{': ' + bad if bad else ''}; decide on a new position"
        )

    def _look_again(self, partitions: Sequence[TopicPartition]) -> bool:
        """Asks anew who has the positions; True where it is another than before."""
        self._extents |= self._log.extents(partitions)
        before = dict(self._sources)
        self._sources |= {p: self._source(p) for p in partitions}
        changed = [p for p in partitions if before[p] != self._sources[p]]
        if any("log" in (before[p], self._sources[p]) for p in changed):
            self._reassign()
        return bool(changed)

    def _reassign(self) -> None:
        """The live reader reads what is the log's, from our positions."""
        those = {p: self._positions[p] for p, source in self._sources.items() if source == "log"}
        if self._live is None:
            if not those:
                return
            self._live = self._log.live.reader()
        self._live.assign(those)
        if paused := self._of_log(list(self._paused)):
            self._live.pause(paused)

    def _source(self, partition: TopicPartition) -> Source:
        return self._log.source(partition, self._positions[partition], self._extents[partition])

    def _of_log(self, partitions: Sequence[TopicPartition]) -> list[TopicPartition]:
        return [p for p in partitions if self._sources.get(p) == "log"]


def _check(partition: TopicPartition, offset: int) -> None:
    if offset < 0:
        raise LogError(f"{partition.topic}/{partition.partition}: {offset} is not an offset")
