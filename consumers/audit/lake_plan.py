"""What an export decided before it wrote data, and what it finished: the objects under `_manifest/` of a lake, and their keys. Pure.

_manifest/lake.json                                  whose history it is, and the times it is limited to
_manifest/rounds/<n>.json                            of every partition the offsets that round n exports; written before its data
_manifest/stretches/<topic>/<partition>-<first>-<next>.json   a stretch is complete: its files, their rows and digests
topic=<t>/hour=<UTC hour>/<partition>-<first>-<next>.parquet
_undecoded/topic=..., _deleted/topic=...             the same for records that are no events

All are create-only. Where a stretch ends follows from the records alone, so that whoever resumes cuts where the dead one would have.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec
import numpy as np
from blake3 import blake3

from rollwire.consumers.audit.hours import hour_name
from rollwire.schemas.errors import ArchiveCorrupt
from rollwire.streams.seams.log import Record, TopicPartition

FORMAT: Final = 1
LAKE: Final = "_manifest/lake.json"
ROUNDS: Final = "_manifest/rounds/"
STRETCHES: Final = "_manifest/stretches/"

STRETCH_BYTES: Final = 32 << 20
STRETCH_RECORDS: Final = 100_000
"""A stretch ends behind the record that fills it."""

_MOD: Final = 1 << 128
_FILE: Final = re.compile(
    r"(?:_undecoded/|_deleted/)?topic=([^/]+)/hour=[^/]+/(\d+)-(\d{20})-(\d{20})\.parquet"
)


class Lake(msgspec.Struct, frozen=True, kw_only=True):
    format: int
    name: str  # of the run
    from_ms: int | None  # records of this broker's time and later; None: from the beginning
    to_ms: int | None  # records before this time


class Range(msgspec.Struct, frozen=True):
    topic: str
    partition: int
    first: int
    next: int


class Round(msgspec.Struct, frozen=True, kw_only=True):
    format: int
    round: int
    ranges: tuple[Range, ...]


class LakeFile(msgspec.Struct, frozen=True, kw_only=True):
    key: str
    rows: int
    bytes: int
    sha256: str
    digest: str  # of the rows' records: see `Digest`, 32 hex digits


class Stretch(msgspec.Struct, frozen=True, kw_only=True):
    format: int
    topic: str
    partition: int
    first: int
    next: int
    files: tuple[LakeFile, ...]

    @property
    def rows(self) -> int:
        return sum(file.rows for file in self.files)

    @property
    def digest(self) -> str:
        return summed(file.digest for file in self.files)


class Finished(NamedTuple):
    """What of the rounds is done."""

    positions: dict[TopicPartition, int]  # where each partition goes on
    pending: tuple[Range, ...]  # what is planned and not done, in the order of the rounds


class Digest:
    """Of records of one partition in their order: blake3 of their values end to end, and of their places and lengths, 128 bits.

    The same for the same records, however many are added at a time.
    """

    def __init__(self, partition: int) -> None:
        self._partition = partition
        self._values = blake3()
        self._places = blake3()

    def add(self, records: Sequence[Record]) -> None:
        values = [record.value for record in records]
        self._values.update(b"".join([value for value in values if value is not None]))
        lengths = [-1 if value is None else len(value) for value in values]
        self._places.update(np.array([[record.offset for record in records], lengths], "<i8").T.tobytes())

    def hexdigest(self) -> str:
        head = self._partition.to_bytes(4, "big")
        return blake3(head + self._places.digest() + self._values.digest()).hexdigest(16)


def summed(digests: Iterable[str]) -> str:
    """Of several digests one: the sum modulo 2^128, whatever their order."""
    return f"{sum(int(digest, 16) for digest in digests) % _MOD:032x}"


def round_key(number: int) -> str:
    return f"{ROUNDS}{number:012d}.json"


def stretch_key(topic: str, partition: int, first: int, next: int) -> str:
    return f"{STRETCHES}{topic}/{partition}-{first:020d}-{next:020d}.json"


def file_key(kind: str, topic: str, hour: int, partition: int, first: int, next: int) -> str:
    """`kind`: "" for events, `_undecoded/` and `_deleted/` for what is none."""
    return f"{kind}topic={topic}/hour={hour_name(hour)}/{partition}-{first:020d}-{next:020d}.parquet"


def file_of(key: str) -> Range | None:
    """The offsets that a data file's key says it holds; None: no export names files so."""
    named = _FILE.fullmatch(key)
    return Range(named[1], int(named[2]), int(named[3]), int(named[4])) if named else None


def finished(rounds: Iterable[Round], done: Iterable[tuple[TopicPartition, int, int]]) -> Finished:
    """Compares what is planned with the stretches that are there: (partition, first, next)."""
    stretches: dict[tuple[TopicPartition, int], int] = {(at, first): next for at, first, next in done}
    positions: dict[TopicPartition, int] = {}
    pending: list[Range] = []
    for one in rounds:
        for planned in one.ranges:
            partition, at = TopicPartition(planned.topic, planned.partition), planned.first
            while at < planned.next and (partition, at) in stretches:
                at = stretches[partition, at]
            positions[partition] = planned.next
            if at < planned.next:
                pending.append(Range(planned.topic, planned.partition, at, planned.next))
    return Finished(positions, tuple(pending))


def next_round(
    number: int,
    positions: Mapping[TopicPartition, int],
    begins: Mapping[TopicPartition, int],
    ends: Mapping[TopicPartition, int],
) -> Round | None:
    """Everything from where the rounds before ended (a new partition: its beginning) to the ends; None: nothing new."""
    ranges = [
        Range(at.topic, at.partition, positions.get(at, begins[at]), end)
        for at, end in sorted(ends.items())
        if positions.get(at, begins[at]) < end
    ]
    return Round(format=FORMAT, round=number, ranges=tuple(ranges)) if ranges else None


def parse_stretch_key(key: str) -> tuple[TopicPartition, int, int]:
    """Raises `ArchiveCorrupt` for what is no key of a stretch."""
    try:
        topic, name = key.removeprefix(STRETCHES).removesuffix(".json").split("/")
        partition, first, after = name.split("-")
        return TopicPartition(topic, int(partition)), int(first), int(after)
    except ValueError as error:
        raise ArchiveCorrupt(f"{key!r} does not name a stretch: who put it into the lake?") from error
