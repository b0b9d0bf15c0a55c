"""Faust's table of attribution: in memory, restored by Faust from its changelog, which the outbox writes.

Faust writes a changelog record by record, through a producer that takes a third of a millisecond for each. Here the records
of a second go out as one batch, and offsets are committed only when that is durable.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

import faust

from rollwire.streams.attribution.book import Write
from rollwire.streams.attribution.config import TABLE

_TOPIC_CONFIG: Final = {
    "min.cleanable.dirty.ratio": "0.1",
    "segment.ms": str(60 * 60 * 1_000),
    "segment.bytes": str(64 * 1024 * 1024),
    "delete.retention.ms": str(24 * 60 * 60 * 1_000),
}
"""Compacted early and in small pieces: most of it is done with after a window."""


class WindowTable(faust.Table[bytes, bytes]):
    """Entries by key. Set it by `put`: its changelog is written elsewhere."""

    def put(self, writes: Iterable[Write]) -> None:
        """The entries in memory, under the partitions that they are of."""
        store: Any = self.data
        entries, partitions = store.data, store._key_partition
        for partition, key, value in writes:
            if value is None:
                entries.pop(key, None)
                partitions.pop(key, None)
            else:
                entries[key] = value
                partitions[key] = partition

    def entries(self) -> Iterator[tuple[int, bytes, bytes]]:
        """(partition, key, value) of all."""
        store: Any = self.data
        for key, partition in store._key_partition.items():
            value = store.data.get(key)
            if value is not None:
                yield partition, key, value


def window_table(app: Any, partitions: int) -> WindowTable:
    plain: Any = faust.Schema(key_type=bytes, value_type=bytes, key_serializer="raw", value_serializer="raw")
    table: WindowTable = WindowTable(
        app,
        name=TABLE,
        partitions=partitions,
        schema=plain,
        key_type=bytes,
        value_type=bytes,
        extra_topic_configs=_TOPIC_CONFIG,
    )
    app.tables.add(table)
    return table
