"""Writes planned ranges as stretches: of each its files, then the manifest that says it is complete."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, NamedTuple

import msgspec

from rollwire.consumers.audit.lake_plan import Lake, LakeFile, Range, Stretch, stretch_key
from rollwire.consumers.audit.lake_read import planned_batches
from rollwire.consumers.audit.lake_write import Encoded, Gathered, encoded
from rollwire.schemas.errors import ObjectConflict, Refused
from rollwire.streams.bulk import BulkDecoder
from rollwire.streams.emit import deletes
from rollwire.streams.findings import Finding, gap, undecodable
from rollwire.streams.seams.clock import Clock
from rollwire.streams.seams.log import Log, Record, TopicPartition
from rollwire.streams.seams.scan import Lost
from rollwire.streams.seams.store import ObjectStore

Told = Callable[[str, int], None]  # topic, records more
_WAITING: Final = 2  # stretches that wait for their place in the store


class Place(NamedTuple):
    """What is read, and where the lake stands."""

    log: Log
    store: ObjectStore
    root: str
    lake: Lake
    clock: Clock | None = None


class Written(NamedTuple):
    stretches: int
    files: int
    rows: int
    nbytes: int  # of files
    findings: tuple[Finding, ...]


class Writing:
    """The state of one call. Stretches are encoded and stored by a thread of its own, in their order."""

    def __init__(self, place: Place, told: Told) -> None:
        self._log, self._store, self._root, self._lake, self._clock = place
        self._told = told
        self._decoder = BulkDecoder()
        self._findings: list[Finding] = []
        self._stretches = self._files = self._rows = self._nbytes = 0

    def written(self) -> Written:
        return Written(self._stretches, self._files, self._rows, self._nbytes, tuple(self._findings))

    def ranges(self, ranges: Sequence[Range]) -> None:
        by_topic: dict[str, list[Range]] = defaultdict(list)
        for one in ranges:
            by_topic[one.topic].append(one)
        for topic, some in by_topic.items():
            # Of several rounds that were left, each has its own ends.
            while some:
                now: dict[int, Range] = {}
                for one in some:
                    now.setdefault(one.partition, one)
                some = [one for one in some if one not in now.values()]
                self._topic(topic, tuple(now.values()))

    def _topic(self, topic: str, ranges: Sequence[Range]) -> None:
        starts = {TopicPartition(topic, one.partition): one.first for one in ranges}
        ends = {TopicPartition(topic, one.partition): one.next for one in ranges}
        open_ = {one: Gathered(topic, one.partition, first) for one, first in starts.items()}
        with ThreadPoolExecutor(1, thread_name_prefix="lake") as pool:
            waiting: list[Future[Stretch]] = []

            def close(gathered: Gathered, after: int) -> None:
                waiting.append(pool.submit(self._store_stretch, gathered, after))
                while len(waiting) > _WAITING:
                    self._count(waiting.pop(0).result())

            batches = planned_batches(
                self._log, topic, starts, ends, lake=self._lake, lost=self._lost, clock=self._clock
            )
            for partition, records in batches:
                self._told(topic, len(records))
                events = self._decode(records)
                while records:
                    gathered = open_[partition]
                    count = gathered.room(records)
                    gathered.add(records[:count], events[:count])
                    if gathered.full:
                        after = records[count - 1].offset + 1
                        open_[partition] = Gathered(topic, partition.partition, after)
                        close(gathered, after)
                    records, events = records[count:], events[count:]
            for partition, gathered in open_.items():
                if gathered.first < ends[partition]:
                    close(gathered, ends[partition])
            for future in waiting:
                self._count(future.result())

    def _decode(self, records: list[Record]) -> list[Any]:
        events = self._decoder.decode(records)
        for record, event in zip(records, events, strict=True):
            if isinstance(event, Refused) and not deletes(record):
                self._findings.append(undecodable(record, event, "its place stands in _undecoded/"))
        return events

    def _store_stretch(self, gathered: Gathered, after: int) -> Stretch:
        described: list[LakeFile] = []
        for key, table, digest in gathered.tables(after):
            made = encoded(key, table, digest)
            self._put(made)
            described.append(made.described)
        stretch = gathered.stretch(after, described)
        key = stretch_key(gathered.topic, gathered.partition, gathered.first, after)
        self._store.create(self._root + key, msgspec.json.encode(stretch))
        return stretch

    def _put(self, made: Encoded) -> None:
        key = self._root + made.key
        try:
            self._store.create(key, made.data)
        except ObjectConflict:
            # No manifest names it: left by a call that died.
            self._store.delete(key)
            self._store.create(key, made.data)

    def _count(self, stretch: Stretch) -> None:
        self._stretches += 1
        self._files += len(stretch.files)
        self._rows += stretch.rows
        self._nbytes += sum(file.bytes for file in stretch.files)

    def _lost(self, lost: Lost) -> None:
        self._findings.append(gap(lost.partition.topic, lost.partition.partition, lost.first, lost.next))
