"""Writes a history as a lake of Parquet files: exactly once, and after a kill it goes on where the dead one stood.

The order is the promise: the plan of a round first (which offsets it exports), then of each stretch its files, then the manifest
that says the stretch is complete. A file without such a manifest belongs to an attempt that died: the next one writes the same
bytes, or replaces them where they differ (another release of Arrow, records that compaction took meanwhile).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import msgspec

from rollwire.consumers.audit.lake_plan import (
    FORMAT,
    LAKE,
    ROUNDS,
    STRETCHES,
    Lake,
    Range,
    Round,
    Stretch,
    file_of,
    finished,
    next_round,
    parse_stretch_key,
    round_key,
)
from rollwire.consumers.audit.lake_share import Share, summed_up, write_ranges
from rollwire.consumers.audit.lake_stretches import Place, Told
from rollwire.consumers.audit.lake_write import DELETED_KIND, UNDECODED_KIND
from rollwire.schemas.errors import (
    ArchiveCorrupt,
    ConfigError,
    ObjectConflict,
    ObjectMissing,
)
from rollwire.streams.findings import Finding
from rollwire.streams.seams.clock import Clock
from rollwire.streams.seams.log import Log, TopicPartition
from rollwire.streams.seams.places import existing_partitions
from rollwire.streams.seams.store import ObjectStore

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
    share: Share | None = None,
) -> Exported:
    """Finishes what an earlier call left, then exports everything up to where the topics end now.

    `root`: what stands before every key ("" or ending in "/"). `sized` is told how many offsets there are to export, `told` how
    many records were read. `share`: processes that write it too. Raises `ConfigError` where the lake is another run's or of other
    times, `AuditError` where one of the processes ends.
    """
    lake = Lake(format=FORMAT, name=name, from_ms=from_ms, to_ms=to_ms)
    _settled(store, root, lake)
    place = Place(log, store, root, lake, clock)
    rounds = read_rounds(store, root)
    state = finished(rounds, map(parse_stretch_key, _keys(store, root, STRETCHES)))
    sized(_size(state.pending))
    written = [write_ranges(place, state.pending, told, share)]
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
        written.append(write_ranges(place, planned.ranges, told, share))
    return Exported(len(rounds), *summed_up(written))


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
    partitions = existing_partitions(log, topics)
    return log.beginning_offsets(partitions), log.end_offsets(partitions)


def _size(ranges: Sequence[Range]) -> int:
    return sum(one.next - one.first for one in ranges)


def _keys(store: ObjectStore, root: str, folder: str) -> list[str]:
    return [info.key.removeprefix(root) for info in store.list(root + folder)]
