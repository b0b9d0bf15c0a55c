"""What the archive of a run holds, and how its records are fetched: in runs of frames, the next one on its way."""

from __future__ import annotations

import re
import threading
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from itertools import accumulate, chain, pairwise
from typing import Final, NamedTuple, TypeVar

from rollwire.schemas.errors import ObjectMissing
from rollwire.streams.archive.layout import records_folder, stretch_key
from rollwire.streams.archive.objects import (
    HEAD_BYTES,
    FrameInfo,
    StretchHeader,
    corrupt,
    decode_record,
    read_header,
    unpack_frame,
)
from rollwire.streams.seams.log import Record, TopicPartition
from rollwire.streams.seams.store import ObjectInfo, ObjectStore

_T = TypeVar("_T")
_RUN_BYTES: Final = 1024 * 1024  # stored bytes that are fetched at once
_NAME: Final = re.compile(r"(\d+)/(\d{20})-(\d{20})-([0-9a-f]{16})\.seg")


class Stretch(NamedTuple):
    """One object of the archive: the offsets [first, next) of a partition."""

    partition: TopicPartition
    first: int
    next: int
    key: str
    size: int  # bytes


class Packed(NamedTuple):
    """A frame as it is stored."""

    stretch: Stretch
    frame: FrameInfo
    stored: memoryview

    def bodies(self) -> list[memoryview]:
        """Its records, as they were sealed. Raises `ArchiveCorrupt`."""
        return unpack_frame(self.stored, self.frame, self.stretch.key)


class _Listed:
    """The stretches of a partition, by first offset, and which of those up to each goes furthest."""

    def __init__(self, stretches: tuple[Stretch, ...]) -> None:
        self.stretches = stretches
        self.firsts = [s.first for s in stretches]
        self.furthest: list[Stretch] = list(accumulate(stretches, _further))


class Archive:
    """The archived stretches of the run `name`, listed topic by topic as they are asked for. Thread-safe."""

    def __init__(self, store: ObjectStore, name: str) -> None:
        self.store = store
        self.name = name
        self._lock = threading.Lock()
        self._listed: dict[str, dict[TopicPartition, _Listed]] = {}
        self._bad: dict[str, str] = {}  # key to what is wrong with it

    def partitions(self, topic: str) -> int:
        """One more than the highest that is archived; 0: nothing of this topic is."""
        return max((p.partition + 1 for p in self._of(topic)), default=0)

    def stretches(self, partition: TopicPartition) -> tuple[Stretch, ...]:
        """By their first offset. Two archivers may have cut differently: stretches may overlap."""
        at = self._of(partition.topic).get(partition)
        return () if at is None else at.stretches

    def refresh(self, topics: Sequence[str]) -> None:
        """Looks into the store again when one of `topics` is asked for next."""
        with self._lock:
            for topic in topics:
                self._listed.pop(topic, None)

    def set_aside(self, partition: TopicPartition, key: str, why: str) -> None:
        """From now on this object is as if it were not there: it does not read."""
        with self._lock:
            self._bad[key] = why
        self.refresh([partition.topic])

    @property
    def aside(self) -> dict[str, str]:
        """Object key to what is wrong with it."""
        with self._lock:
            return dict(self._bad)

    def covering(self, partition: TopicPartition, position: int) -> Stretch | None:
        """The one that holds `position` and goes furthest."""
        at = self._of(partition.topic).get(partition)
        if at is None:
            return None
        upto = bisect_right(at.firsts, position)
        furthest = at.furthest[upto - 1] if upto else None
        return furthest if furthest is not None and furthest.next > position else None

    def begin(self, partition: TopicPartition) -> int | None:
        at = self._of(partition.topic).get(partition)
        return None if at is None else at.firsts[0]

    def end(self, partition: TopicPartition) -> int | None:
        at = self._of(partition.topic).get(partition)
        return None if at is None else at.furthest[-1].next

    def after(self, partition: TopicPartition, position: int) -> int | None:
        """The first archived offset from `position` on."""
        if self.covering(partition, position) is not None:
            return position
        at = self._of(partition.topic).get(partition)
        if at is None:
            return None
        upto = bisect_right(at.firsts, position)
        return at.firsts[upto] if upto < len(at.firsts) else None

    def packed(self, partition: TopicPartition, position: int, pool: Executor | None = None) -> PackedFrames:
        """The frames that hold `position` and what follows, up to the first hole; the first may begin before it. With
        a `pool`, what comes next is fetched meanwhile. Raises `ArchiveCorrupt` and what the store raises.
        """
        return PackedFrames(self, partition, position, pool)

    def records(
        self, partition: TopicPartition, first: int, next: int, pool: Executor | None = None
    ) -> Iterator[Record]:
        """The archived records of [first, next), up to the first hole. Raises as `packed`."""
        for packed in self.packed(partition, first, pool):
            if packed.frame.first >= next:
                return
            for body in packed.bodies():
                record = decode_record(body, partition, packed.stretch.key)
                if first <= record.offset < next:
                    yield record

    def _of(self, topic: str) -> dict[TopicPartition, _Listed]:
        with self._lock:
            known = self._listed.get(topic)
            bad = set(self._bad)
        if known is None:
            found = listed(self.store, self.name, topic)
            known = {p: _Listed(good) for p, those in found.items() if (good := _without(those, bad))}
            with self._lock:
                self._listed[topic] = known
        return known


class PackedFrames:
    """An iterator of frames, see `Archive.packed`. Once it is exhausted, `upto` is where the archive's first hole begins."""

    def __init__(
        self, archive: Archive, partition: TopicPartition, position: int, pool: Executor | None
    ) -> None:
        self._archive = archive
        self.upto = position
        runs = self._runs(partition)
        self._frames = chain.from_iterable(runs if pool is None else _ahead(runs, pool))

    def __iter__(self) -> Iterator[Packed]:
        return self

    def __next__(self) -> Packed:
        return next(self._frames)

    def _runs(self, partition: TopicPartition) -> Iterator[list[Packed]]:
        while (stretch := self._archive.covering(partition, self.upto)) is not None:
            yield from self._fetched(stretch, self.upto)
            self.upto = stretch.next

    def _fetched(self, stretch: Stretch, position: int) -> Iterator[list[Packed]]:
        head = self._get(stretch, 0, min(stretch.size, HEAD_BYTES))
        header, at = read_header(head, stretch.key)
        _belongs(header, stretch)
        run: list[tuple[FrameInfo, int]] = []
        run_bytes = 0
        for frame, upto in zip(header.frames, _ends(header), strict=True):
            if upto > position:
                if run and run_bytes + frame.stored > _RUN_BYTES:
                    yield self._run(stretch, run, head)
                    run, run_bytes = [], 0
                run.append((frame, at))
                run_bytes += frame.stored
            at += frame.stored
        if run:
            yield self._run(stretch, run, head)

    def _run(self, stretch: Stretch, run: list[tuple[FrameInfo, int]], head: bytes) -> list[Packed]:
        start, end = run[0][1], run[-1][1] + run[-1][0].stored
        if end > stretch.size:
            raise corrupt(stretch.key, f"{stretch.size:,} bytes, its header tells of {end:,}: cut off")
        data = memoryview(head)[start:end] if end <= len(head) else None
        if data is None:
            data = memoryview(self._get(stretch, start, end))
        return [Packed(stretch, frame, data[at - start : at - start + frame.stored]) for frame, at in run]

    def _get(self, stretch: Stretch, start: int, end: int) -> bytes:
        try:
            data = self._archive.store.get_range(stretch.key, start, end)
        except ObjectMissing as failure:
            raise corrupt(stretch.key, "the object was listed and is not there any more") from failure
        if len(data) != end - start:
            raise corrupt(stretch.key, f"{len(data):,} bytes came of {end - start:,} asked for")
        return data


def listed(store: ObjectStore, name: str, topic: str) -> dict[TopicPartition, tuple[Stretch, ...]]:
    """The stretches of a topic that stand in the store, by partition and first offset."""
    folder = records_folder(name, topic)
    found: dict[TopicPartition, list[Stretch]] = {}
    for info in _objects(store, folder):
        named = _NAME.fullmatch(info.key.removeprefix(folder))
        if named is None:
            continue
        partition = TopicPartition(topic, int(named[1]))
        stretch = Stretch(partition, int(named[2]), int(named[3]), info.key, info.size)
        if stretch.key == stretch_key(name, partition, stretch.first, stretch.next, named[4]):
            found.setdefault(partition, []).append(stretch)
    return {p: tuple(sorted(those, key=lambda s: (s.first, s.next))) for p, those in found.items()}


def _objects(store: ObjectStore, folder: str) -> Iterator[ObjectInfo]:
    with suppress(ObjectMissing):  # a bucket that was never made
        yield from store.list(folder)


def _further(a: Stretch, b: Stretch) -> Stretch:
    return b if b.next > a.next else a


def _without(those: tuple[Stretch, ...], bad: set[str]) -> tuple[Stretch, ...]:
    return tuple(s for s in those if s.key not in bad)


def _ends(header: StretchHeader) -> list[int]:
    """Where each frame's offsets end: at the next one's first."""
    return [b.first for _, b in pairwise(header.frames)] + [header.next][: len(header.frames)]


def _belongs(header: StretchHeader, stretch: Stretch) -> None:
    at = TopicPartition(header.topic, header.partition)
    if (at, header.first, header.next) != (stretch.partition, stretch.first, stretch.next):
        raise corrupt(
            stretch.key,
            f"it holds {at.topic}[{at.partition}] from {header.first:,} to {header.next:,}: "
            "another stretch stands under this name",
        )


def _ahead(items: Iterator[_T], pool: Executor) -> Iterator[_T]:
    """The same items; the next is made while one is used."""

    def advance() -> _T | None:
        return next(items, None)

    coming = pool.submit(advance)
    while (item := coming.result()) is not None:
        coming = pool.submit(advance)
        yield item
