"""The log's seams handed on as they are: bases for whatever does something of its own at a few of the calls.

Subclasses override these; everything else goes to `_inner`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rollwire.streams.seams.log import (
    Log,
    Outgoing,
    Reader,
    Record,
    TopicPartition,
    TransactionalWriter,
    Writer,
)

Offsets = dict[TopicPartition, int]


class ForwardingReader:
    """Implements `Reader`."""

    def __init__(self, inner: Reader) -> None:
        self._inner = inner

    def assign(self, positions: Mapping[TopicPartition, int]) -> None:
        self._inner.assign(positions)

    def seek(self, partition: TopicPartition, offset: int) -> None:
        self._inner.seek(partition, offset)

    def pause(self, partitions: Sequence[TopicPartition]) -> None:
        self._inner.pause(partitions)

    def resume(self, partitions: Sequence[TopicPartition]) -> None:
        self._inner.resume(partitions)

    def poll(self, max_records: int, timeout_s: float) -> list[Record]:
        return self._inner.poll(max_records, timeout_s)

    def positions(self) -> Offsets:
        return self._inner.positions()

    def close(self) -> None:
        self._inner.close()


class ForwardingWriter:
    """Implements `Writer`."""

    def __init__(self, inner: Writer) -> None:
        self._inner = inner

    def write(self, records: Sequence[Outgoing], timeout_s: float = 30.0) -> None:
        self._inner.write(records, timeout_s)

    def close(self) -> None:
        self._inner.close()


class ForwardingTransactions:
    """Implements `TransactionalWriter`."""

    def __init__(self, inner: TransactionalWriter) -> None:
        self._inner = inner

    def begin(self) -> None:
        self._inner.begin()

    def write(self, records: Sequence[Outgoing]) -> None:
        self._inner.write(records)

    def commit(
        self,
        group: str,
        offsets: Mapping[TopicPartition, int],
        timeout_s: float = 30.0,
        *,
        also: Mapping[str, Mapping[TopicPartition, int]] | None = None,
    ) -> None:
        self._inner.commit(group, offsets, timeout_s, also=also)

    def abort(self) -> None:
        self._inner.abort()

    def close(self) -> None:
        self._inner.close()


class ForwardingLog:
    """Implements `Log`."""

    def __init__(self, inner: Log) -> None:
        self._inner = inner

    def _ask(self, question: str, ask: Callable[[], Offsets]) -> Offsets:
        """Asks the broker about offsets; `question` is the method's name. All such questions come by here."""
        return ask()

    def reader(self) -> Reader:
        return self._inner.reader()

    def writer(self) -> Writer:
        return self._inner.writer()

    def transactional_writer(self, transactional_id: str, timeout_s: float = 60.0) -> TransactionalWriter:
        return self._inner.transactional_writer(transactional_id, timeout_s)

    def partitions(self, topic: str) -> int:
        return self._inner.partitions(topic)

    def committed(self, group: str, partitions: Sequence[TopicPartition]) -> Offsets:
        return self._ask("committed", lambda: self._inner.committed(group, partitions))

    def beginning_offsets(self, partitions: Sequence[TopicPartition]) -> Offsets:
        return self._ask("beginning_offsets", lambda: self._inner.beginning_offsets(partitions))

    def end_offsets(self, partitions: Sequence[TopicPartition]) -> Offsets:
        return self._ask("end_offsets", lambda: self._inner.end_offsets(partitions))

    def written_offsets(self, partitions: Sequence[TopicPartition]) -> Offsets:
        return self._ask("written_offsets", lambda: self._inner.written_offsets(partitions))

    def close(self) -> None:
        self._inner.close()
