"""One stretch of a partition as Parquet files: rows are gathered by the hour, and written when the stretch ends."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
from blake3 import blake3

from rollwire.consumers.audit.hours import hour_of
from rollwire.consumers.audit.lake_plan import (
    FORMAT,
    STRETCH_BYTES,
    STRETCH_RECORDS,
    Digest,
    LakeFile,
    Stretch,
    file_key,
)
from rollwire.consumers.audit.lake_schema import DELETED, UNDECODED, positions, table_of
from rollwire.schemas.errors import Refused
from rollwire.schemas.records import Event
from rollwire.streams.emit import deletes
from rollwire.streams.seams.log import Record

# Arrow's own allocator gives memory back to the kernel after each file, and a third of the time of the first 100,000 rows went into
# getting it again. The C library's keeps it, as audits ask it to.
pa.set_memory_pool(pa.system_memory_pool())

EVENTS, UNDECODED_KIND, DELETED_KIND = "", "_undecoded/", "_deleted/"
_FEW: Final = 400
"""Rows of one conversion to columns: of many more the first have left the caches, and each conversion has its own cost."""


class Encoded(NamedTuple):
    key: str
    data: bytes
    described: LakeFile


class _Rows:
    """Of one kind and hour."""

    def __init__(self, kind: str, topic: str, partition: int) -> None:
        self.kind = kind
        self.topic = topic
        self.digest = Digest(partition)
        self._batches: list[Any] = []
        self._records: list[Record] = []
        self._events: list[Any] = []

    def add(self, records: Sequence[Record], events: Sequence[Any]) -> None:
        self.digest.add(records)
        self._records += records
        self._events += events
        if len(self._records) >= _FEW:
            self._convert()

    def table(self) -> Any:
        self._convert()
        # In one piece: where pages end must not depend on how records came.
        return pa.Table.from_batches(self._batches).combine_chunks()

    def _convert(self) -> None:
        records, events = self._records, self._events
        if not records:
            return
        if self.kind == EVENTS:
            self._batches.append(table_of(self.topic).batch(records, events))
        elif self.kind == DELETED_KIND:
            # Whoever deletes may write any key; where it is no text its bytes are told.
            keys = pa.array([_text(record.key) for record in records], pa.string())
            self._batches.append(pa.RecordBatch.from_arrays([*positions(records), keys], schema=DELETED))
        else:
            self._batches.append(_undecoded(records, events))
        self._records, self._events = [], []


class Gathered:
    """The rows of one stretch as they come. It ends when `full`, or where its range does."""

    def __init__(self, topic: str, partition: int, first: int) -> None:
        self.topic, self.partition, self.first = topic, partition, first
        self.rows = 0
        self.nbytes = 0
        self._by: dict[tuple[str, int], _Rows] = {}

    @property
    def full(self) -> bool:
        return self.rows >= STRETCH_RECORDS or self.nbytes >= STRETCH_BYTES

    def room(self, records: Sequence[Record]) -> int:
        """How many of them belong to this stretch, up to the one that fills it."""
        rows, nbytes = self.rows, self.nbytes
        if rows + len(records) < STRETCH_RECORDS and nbytes + _nbytes(records) < STRETCH_BYTES:
            return len(records)
        for number, record in enumerate(records, 1):
            rows += 1
            nbytes += len(record.value or b"")
            if rows >= STRETCH_RECORDS or nbytes >= STRETCH_BYTES:
                return number
        return len(records)

    def add(self, records: Sequence[Record], events: Sequence[Event | Refused]) -> None:
        self.rows += len(records)
        self.nbytes += _nbytes(records)
        hours = {hour_of(record.timestamp_ms) for record in records}
        if len(hours) == 1 and Refused not in set(map(type, events)):
            self._of(EVENTS, hours.pop()).add(records, events)
            return
        for record, event in zip(records, events, strict=True):
            kind = EVENTS
            if isinstance(event, Refused):
                kind = DELETED_KIND if deletes(record) else UNDECODED_KIND
            self._of(kind, hour_of(record.timestamp_ms)).add([record], [event])

    def tables(self, after: int) -> list[tuple[str, Any, str]]:
        """(key, table, digest) of each file; `after`: where the stretch ends."""
        made = [
            (
                file_key(kind, self.topic, hour, self.partition, self.first, after),
                rows.table(),
                rows.digest.hexdigest(),
            )
            for (kind, hour), rows in self._by.items()
        ]
        return sorted(made, key=lambda one: one[0])

    def stretch(self, after: int, files: Sequence[LakeFile]) -> Stretch:
        return Stretch(
            format=FORMAT,
            topic=self.topic,
            partition=self.partition,
            first=self.first,
            next=after,
            files=tuple(files),
        )

    def _of(self, kind: str, hour: int) -> _Rows:
        found = self._by.get((kind, hour))
        if found is None:
            found = self._by[kind, hour] = _Rows(kind, self.topic, self.partition)
        return found


def _nbytes(records: Sequence[Record]) -> int:
    return sum([len(record.value or b"") for record in records])


def encoded(key: str, table: Any, digest: str) -> Encoded:
    """A table as a Parquet file, the same bytes each time that this release of Arrow writes it."""
    out = io.BytesIO()
    pq.write_table(table, out, compression="zstd", compression_level=1)
    data = out.getvalue()
    described = LakeFile(
        key=key,
        rows=table.num_rows,
        bytes=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
        digest=digest,
    )
    return Encoded(key, data, described)


def _text(key: bytes | None) -> str | None:
    return None if key is None else key.decode(errors="backslashreplace")


def _undecoded(records: Sequence[Record], reasons: Sequence[Refused]) -> Any:
    # Their values stay where they are: nobody knows what stands in them.
    values = [record.value for record in records]
    columns = [
        *positions(records),
        pa.array([reason.reason for reason in reasons], pa.string()),
        pa.array([reason.detail for reason in reasons], pa.string()),
        pa.array([None if value is None else len(value) for value in values], pa.int64()),
        pa.array([None if value is None else blake3(value).hexdigest() for value in values], pa.string()),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=UNDECODED)
