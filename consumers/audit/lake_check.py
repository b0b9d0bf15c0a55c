"""Holds a lake against the history that it was made from: every stretch of every round, its files, its rows, their digests."""

from __future__ import annotations

import hashlib
import io
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow.parquet as pq  # type: ignore[import-untyped]

from rollwire.consumers.audit.lake_export import (
    read_lake,
    read_rounds,
    read_stretches,
    unnamed_files,
)
from rollwire.consumers.audit.lake_plan import Lake, LakeFile, Range, Stretch, finished, summed
from rollwire.consumers.audit.lake_read import planned_batches
from rollwire.consumers.audit.lake_stretches import Told
from rollwire.consumers.audit.lake_write import Gathered
from rollwire.schemas.catalogue import TOPICS
from rollwire.schemas.errors import ConfigError, ObjectMissing, TopicMismatch
from rollwire.schemas.records import Position
from rollwire.streams.bulk import BulkDecoder
from rollwire.streams.findings import Finding, Kind, Report, at
from rollwire.streams.seams.clock import Clock
from rollwire.streams.seams.log import Log, TopicPartition
from rollwire.streams.seams.scan import Lost
from rollwire.streams.seams.store import ObjectStore


def check(
    log: Log,
    store: ObjectStore,
    *,
    name: str,
    root: str = "",
    told: Told = lambda _topic, _records: None,
    clock: Clock | None = None,
) -> Report:
    """Reads the lake and the history again. `results` has `export.rows_equal` and `export.digests_equal` (1 or 0).

    Raises `ConfigError` where there is no lake, or that of another run.
    """
    lake = read_lake(store, root)
    if lake is None or lake.name != name:
        raise ConfigError(f"no lake of run {name!r} is there" + (f", one of {lake.name!r}" if lake else ""))
    checking = _Checking(log, store, root, lake, told, clock)
    stretches = read_stretches(store, root)
    by_topic: dict[str, list[Stretch]] = defaultdict(list)
    for stretch in stretches:
        by_topic[stretch.topic].append(stretch)
    for topic, some in sorted(by_topic.items()):
        checking.topic(topic, some)
    checking.unnamed(unnamed_files(store, root))
    pending = finished(
        read_rounds(store, root), ((TopicPartition(s.topic, s.partition), s.first, s.next) for s in stretches)
    ).pending
    notes = [
        f"{one.topic}[{one.partition}] from {one.first:,} to {one.next:,} is planned and not exported yet: "
        "run the export again"
        for one in pending
    ]
    return Report(
        command="audit export --check",
        findings=tuple(checking.findings),
        checked={
            "stretches": len(stretches),
            "files": sum(len(s.files) for s in stretches),
            "rows": checking.lake_rows,
        },
        notes=(*checking.notes, *notes),
        digests={topic: summed(s.digest for s in some) for topic, some in sorted(by_topic.items())},
        results={
            "export.rows_equal": float(checking.rows_equal),
            "export.digests_equal": float(checking.digests_equal),
        },
    )


class _Checking:
    def __init__(
        self, log: Log, store: ObjectStore, root: str, lake: Lake, told: Told, clock: Clock | None
    ) -> None:
        self._log, self._store, self._root, self._lake = log, store, root, lake
        self._told, self._clock = told, clock
        self._decoder = BulkDecoder()
        self.findings: list[Finding] = []
        self.notes: list[str] = []
        self.lake_rows = 0
        self.rows_equal = self.digests_equal = True

    def topic(self, topic: str, stretches: Sequence[Stretch]) -> None:
        try:
            self._log.partitions(topic)
        except TopicMismatch:
            self.notes.append(
                f"{topic} is not in the log any more: its {len(stretches):,} stretches stand alone"
            )
            return
        lost: list[Lost] = []
        queues: dict[TopicPartition, list[Stretch]] = defaultdict(list)
        for stretch in sorted(stretches, key=lambda one: (one.partition, one.first)):
            queues[TopicPartition(topic, stretch.partition)].append(stretch)
        starts = {one: some[0].first for one, some in queues.items()}
        ends = {one: some[-1].next for one, some in queues.items()}
        now = {one: Gathered(topic, one.partition, some[0].first) for one, some in queues.items()}

        def turn(partition: TopicPartition) -> None:
            stretch = queues[partition].pop(0)
            self._compare(stretch, now[partition], lost)
            if queues[partition]:
                now[partition] = Gathered(topic, partition.partition, queues[partition][0].first)

        batches = planned_batches(
            self._log, topic, starts, ends, lake=self._lake, lost=lost.append, clock=self._clock
        )
        for partition, records in batches:
            self._told(topic, len(records))
            while records:
                stretch = queues[partition][0]
                inside = [record for record in records if record.offset < stretch.next]
                if inside:
                    now[partition].add(inside, self._decoder.decode(inside))
                records = records[len(inside) :]
                if records:
                    turn(partition)
        for partition, left in queues.items():
            while left:
                turn(partition)

    def unnamed(self, files: Mapping[str, Range]) -> None:
        """Whoever reads the folder reads them too."""
        for key, range_ in files.items():
            self.rows_equal = False
            self.findings.append(
                Finding(
                    kind=Kind.UNACCOUNTED,
                    where=key,
                    detail="no manifest names this file: another put it there, or an export that was killed; run the export again",
                    position=Position(topic=range_.topic, partition=range_.partition, offset=range_.first)
                    if range_.topic
                    else None,
                )
            )

    def _compare(self, stretch: Stretch, gathered: Gathered, lost: Sequence[Lost]) -> None:
        expected = {key: (table, digest) for key, table, digest in gathered.tables(stretch.next)}
        gone = TOPICS[stretch.topic].compacted or any(
            one.partition == (stretch.topic, stretch.partition)
            and one.first < stretch.next
            and one.next > stretch.first
            for one in lost
        )
        for file in stretch.files:
            self.lake_rows += file.rows
            table, digest = expected.pop(file.key, (None, ""))
            found = self._file(stretch, file)
            if found is None:
                self.rows_equal = self.digests_equal = False
                continue
            rows = 0 if table is None else table.num_rows
            if gone and rows < file.rows:
                # What is left must be in the lake as it is in the log.
                self.notes.append(
                    f"{file.key}: {file.rows - rows:,} of {file.rows:,} rows stand in the lake alone: "
                    "retention or compaction took the records"
                )
                if table is not None:
                    left = set(table.column("_offset").to_pylist())
                    offsets = found.column("_offset").to_pylist()
                    found = found.take([row for row, offset in enumerate(offsets) if offset in left])
                    self._same(stretch, file, table, found)
                continue
            if rows != file.rows:
                self.rows_equal = False
            if digest != file.digest:
                self.digests_equal = False
            if rows != file.rows or digest != file.digest:
                self._note(
                    Kind.DIGEST_DIFFERS,
                    stretch,
                    file,
                    f"{file.rows:,} rows with digest {file.digest} were exported, the history has {rows:,} with "
                    f"{digest or 'none'}: `rollwire audit verify` says which is right",
                )
            elif table is not None:
                self._same(stretch, file, table, found)
        for key, (table, _) in expected.items():
            self.rows_equal = False
            self._note(
                Kind.UNACCOUNTED,
                stretch,
                None,
                f"{table.num_rows:,} records stand in no file; {key} should have them",
            )

    def _file(self, stretch: Stretch, file: LakeFile) -> Any:
        """The table of a file; None, and a finding, where it is gone or not what was written."""
        try:
            data = self._store.get(self._root + file.key)
        except ObjectMissing:
            self._note(Kind.OBJECT_MISSING, stretch, file, "the file is gone: export into a new folder")
            return None
        if hashlib.sha256(data).hexdigest() != file.sha256:
            self._note(
                Kind.OBJECT_CORRUPT, stretch, file, f"{len(data):,} bytes are not the {file.bytes:,} written"
            )
            return None
        return pq.ParquetFile(io.BytesIO(data)).read()

    def _same(self, stretch: Stretch, file: LakeFile, table: Any, found: Any) -> None:
        wrong = next(_differing(table, found), None)
        if wrong is not None:
            self.digests_equal = False
            self._note(
                Kind.DIGEST_DIFFERS, stretch, file, f"column {wrong!r} is not what the events decode to today"
            )

    def _note(self, kind: Kind, stretch: Stretch, file: LakeFile | None, detail: str) -> None:
        self.findings.append(
            Finding(
                kind=kind,
                where=file.key if file else at(stretch.topic, stretch.partition, stretch.first),
                detail=detail,
                position=Position(topic=stretch.topic, partition=stretch.partition, offset=stretch.first),
            )
        )


def _differing(table: Any, found: Any) -> Iterator[str]:
    """Columns of one that the other has otherwise. A schema that grew since then has more."""
    for name in found.column_names:
        if name not in table.column_names:
            yield name
            continue
        ours, theirs = table.column(name), found.column(name)
        # Arrow has no NaN equal to itself; as Python writes them they are.
        if not ours.equals(theirs) and repr(ours.to_pylist()) != repr(theirs.to_pylist()):
            yield name
