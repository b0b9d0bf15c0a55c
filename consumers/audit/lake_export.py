"""Writes a history as a lake of Parquet files: exactly once, and after a kill it goes on where the dead one stood.

The order is the promise: the plan of a round first (which offsets it exports), then of each stretch its files, then the manifest
that says the stretch is complete. A file without such a manifest belongs to an attempt that died: the next one writes the same
bytes, or replaces them where they differ (another release of Arrow, records that compaction took meanwhile).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from rollwire.consumers.audit.lake_plan import (
    FORMAT,
    LAKE,
    ROUNDS,
    STRETCHES,
    Lake,
    LakeFile,
    Range,
    Round,
    Stretch,
    file_of,
    finished,
    next_round,
    parse_stretch_key,
    round_key,
    stretch_key,
)
from rollwire.consumers.audit.lake_read import planned_batches
from rollwire.consumers.audit.lake_write import DELETED_KIND, UNDECODED_KIND, Encoded, Gathered, encoded
from rollwire.schemas.errors import (
    ArchiveCorrupt,
    ConfigError,
    ObjectConflict,
    ObjectMissing,
    Refused,
)
from rollwire.schemas.records import Position
from rollwire.streams.bulk import BulkDecoder
from rollwire.streams.emit import deletes
from rollwire.streams.findings import Finding, Kind, at, gap
from rollwire.streams.seams.clock import Clock
from rollwire.streams.seams.log import Log, Record, TopicPartition
from rollwire.streams.seams.places import existing, partitions_of
from rollwire.streams.seams.scan import Lost
from rollwire.streams.seams.store import ObjectStore

Told = Callable[[str, int], None]  # topic, records more
_WAITING: Final = 2  # stretches that wait for their place in the store
_T = TypeVar("_T", bound=msgspec.Struct)


class Exported(NamedTuple):
    rounds: int  # that the lake has now
    stretches: int  # written by this call
    files: int
    rows: int
    nbytes: int  # of files
    findings: tuple[Finding, ...]


def export(
    log: Log,
    store: ObjectStore,
    *,
    name: str,
    topics: Sequence[str],
    from_ms: int | None = None,
    to_ms: int | None = None,
    root: str = "",
    told: Told = lambda _topic, _records: None,
    sized: Callable[[int], None] = lambda _offsets: None,
    clock: Clock | None = None,
) -> Exported:
    """Finishes what an earlier call left, then exports everything up to where the topics end now.

    `root`: what stands before every key ("" or ending in "/"). `sized` is told how many offsets there are to export, `told` how
    many records were read. Raises `ConfigError` where the lake is another run's or of other
    times.
    """
    lake = Lake(format=FORMAT, name=name, from_ms=from_ms, to_ms=to_ms)
    _settled(store, root, lake)
    writing = _Writing(log, store, root, lake, told, clock)
    rounds = read_rounds(store, root)
    state = finished(rounds, map(parse_stretch_key, _keys(store, root, STRETCHES)))
    sized(_size(state.pending))
    writing.ranges(state.pending)
    if state.pending:
        _sweep(store, root, state.pending)
    begins, ends = _extents(log, topics)
    planned = next_round(len(rounds) + 1, state.positions, begins, ends)
    if planned is not None:
        try:
            store.create(root + round_key(planned.round), msgspec.json.encode(planned))
        except ObjectConflict as error:
            raise ConfigError("another export writes into this lake: let it end first") from error
        rounds = (*rounds, planned)
        sized(_size(planned.ranges))
        writing.ranges(planned.ranges)
    return Exported(
        len(rounds), writing.stretches, writing.files, writing.rows, writing.nbytes, tuple(writing.findings)
    )


def unnamed_files(store: ObjectStore, root: str) -> dict[str, Range]:
    """Files that stand where data does and that no manifest names, each with the offsets that its name says."""
    keys = [
        key
        for folder in ("topic=", UNDECODED_KIND, DELETED_KIND)
        for key in _keys(store, root, folder)
        if key.endswith(".parquet")
    ]
    named = {file.key for stretch in read_stretches(store, root) for file in stretch.files}
    return {key: file_of(key) or Range("", 0, 0, 0) for key in keys if key not in named}


def _sweep(store: ObjectStore, root: str, done: Sequence[Range]) -> None:
    """Deletes what a dead call left of ranges that are exported by now: where compaction or another release let stretches end
    elsewhere its files have other names, and whoever reads the folder would read their rows twice."""
    for key, left in unnamed_files(store, root).items():
        if any(
            (one.topic, one.partition) == (left.topic, left.partition)
            and one.first <= left.first
            and left.next <= one.next
            for one in done
        ):
            store.delete(root + key)


def read_rounds(store: ObjectStore, root: str) -> tuple[Round, ...]:
    return tuple(read_json(store, root + key, Round) for key in _keys(store, root, ROUNDS))


def read_stretches(store: ObjectStore, root: str) -> tuple[Stretch, ...]:
    return tuple(read_json(store, root + key, Stretch) for key in _keys(store, root, STRETCHES))


def read_lake(store: ObjectStore, root: str) -> Lake | None:
    try:
        return read_json(store, root + LAKE, Lake)
    except ObjectMissing:
        return None


def read_json(store: ObjectStore, key: str, kind: type[_T]) -> _T:
    """Raises `ArchiveCorrupt` where it does not read, `ObjectMissing`."""
    try:
        return msgspec.json.decode(store.get(key), type=kind)
    except msgspec.DecodeError as error:
        raise ArchiveCorrupt(f"{key!r} of the lake does not read: {error}") from error


class _Writing:
    """The state of one call. Stretches are encoded and stored by a thread of its own, in their order."""

    def __init__(
        self, log: Log, store: ObjectStore, root: str, lake: Lake, told: Told, clock: Clock | None
    ) -> None:
        self._log, self._store, self._root, self._lake = log, store, root, lake
        self._told, self._clock = told, clock
        self._decoder = BulkDecoder()
        self.findings: list[Finding] = []
        self.stretches = self.files = self.rows = self.nbytes = 0

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
                self.findings.append(_undecodable(record, event))
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
        self.stretches += 1
        self.files += len(stretch.files)
        self.rows += stretch.rows
        self.nbytes += sum(file.bytes for file in stretch.files)

    def _lost(self, lost: Lost) -> None:
        self.findings.append(gap(lost.partition.topic, lost.partition.partition, lost.first, lost.next))


def _settled(store: ObjectStore, root: str, lake: Lake) -> None:
    """Raises `ConfigError` where the lake is there already and is another one."""
    known = read_lake(store, root)
    if known is None:
        try:
            store.create(root + LAKE, msgspec.json.encode(lake))
        except ObjectConflict:
            known = read_lake(store, root)
    if known is not None and known != lake:
        raise ConfigError(
            f"this lake has {_words(known)}; asked is {_words(lake)}: export the other into a folder of its own"
        )


def _words(lake: Lake) -> str:
    times = [f"{word} {ms}" for word, ms in (("from", lake.from_ms), ("to", lake.to_ms)) if ms is not None]
    return f"run {lake.name!r} (format {lake.format}) {' '.join(times) or 'of all times'}"


def _extents(
    log: Log, topics: Sequence[str]
) -> tuple[Mapping[TopicPartition, int], Mapping[TopicPartition, int]]:
    partitions = partitions_of(log, existing(log, topics))
    return log.beginning_offsets(partitions), log.end_offsets(partitions)


def _size(ranges: Sequence[Range]) -> int:
    return sum(one.next - one.first for one in ranges)


def _keys(store: ObjectStore, root: str, folder: str) -> list[str]:
    return [info.key.removeprefix(root) for info in store.list(root + folder)]


def _undecodable(record: Record, refused: Refused) -> Finding:
    return Finding(
        kind=Kind.SCHEMA_UNKNOWN if refused.reason == "unknown_schema" else Kind.UNDECODABLE,
        where=at(record.topic, record.partition, record.offset),
        detail=f"{refused.reason}: {refused.detail}; its place stands in _undecoded/",
        position=Position(topic=record.topic, partition=record.partition, offset=record.offset),
    )
