"""Log and store as a process sees them that dies at one of its effects; what each call is called."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from rollwire.ops.chaos.weights.effects import Effects
from rollwire.schemas.codec import decode
from rollwire.schemas.records import FleetStatus, WeightLink, WeightVersion
from rollwire.streams.seams.forwarding import (
    ForwardingLog,
    ForwardingReader,
    ForwardingTransactions,
    ForwardingWriter,
    Offsets,
)
from rollwire.streams.seams.log import (
    Log,
    Outgoing,
    Reader,
    Record,
    TopicPartition,
    TransactionalWriter,
    Writer,
)
from rollwire.streams.seams.store import ObjectInfo, ObjectStore

_FOLDER_AT: Final = 2  # of "weights/<model>/<folder>/<digest>.<ending>"


class CrashStore:
    """Implements `rollwire.streams.seams.store.ObjectStore`."""

    def __init__(self, inner: ObjectStore, effects: Effects) -> None:
        self._inner = inner
        self._effects = effects

    def create(self, key: str, data: bytes) -> bool:
        return self._effects.around(f"put {folder_of(key)}", lambda: self._inner.create(key, data))

    def get(self, key: str, *, sha256: str | None = None) -> bytes:
        return self._effects.around(f"get {folder_of(key)}", lambda: self._inner.get(key, sha256=sha256))

    def get_range(self, key: str, start: int, end: int) -> bytes:
        return self._effects.around(f"get {folder_of(key)}", lambda: self._inner.get_range(key, start, end))

    def head(self, key: str) -> ObjectInfo | None:
        return self._effects.around(f"head {folder_of(key)}", lambda: self._inner.head(key))

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        return self._effects.around("list", lambda: self._inner.list(prefix))

    def delete(self, key: str) -> None:
        self._effects.around(f"delete {folder_of(key)}", lambda: self._inner.delete(key))

    def probe(self) -> None:
        self._inner.probe()


def folder_of(key: str) -> str:
    """What kind of object a key is of: `deltas`, `anchors`, `manifests`, ..."""
    parts = key.split("/")
    return parts[_FOLDER_AT] if len(parts) > _FOLDER_AT else parts[0]


def names_of(records: Sequence[Outgoing]) -> list[str]:
    """The effects that writing these records is: an event of a version, a way between versions, a report of a replica, or its topic."""
    return [_name_of(record) for record in records]


def _name_of(record: Outgoing) -> str:
    event = decode(record.topic, record.value, record.headers, record.key or b"")
    if isinstance(event, WeightVersion):
        return f"write version {event.version}"
    if isinstance(event, WeightLink):
        return f"link {event.kind} {event.base_version}>{event.version}"
    if isinstance(event, FleetStatus):
        return f"report {event.state} {event.wanted_version}"
    return f"write {record.topic}"


class CrashLog(ForwardingLog):
    """Implements `rollwire.streams.seams.log.Log`."""

    def __init__(self, inner: Log, effects: Effects) -> None:
        super().__init__(inner)
        self._effects = effects

    def _ask(self, question: str, ask: Callable[[], Offsets]) -> Offsets:
        self._effects.check()
        return ask()

    def reader(self) -> Reader:
        self._effects.check()
        return _CrashReader(super().reader(), self._effects)

    def writer(self) -> Writer:
        self._effects.check()
        return _CrashWriter(super().writer(), self._effects)

    def transactional_writer(self, transactional_id: str, timeout_s: float = 60.0) -> TransactionalWriter:
        made = self._effects.around(
            "take the transactional id", lambda: self._inner.transactional_writer(transactional_id, timeout_s)
        )
        return _CrashTransactions(made, self._effects)

    def partitions(self, topic: str) -> int:
        self._effects.check()
        return super().partitions(topic)


class _CrashReader(ForwardingReader):
    def __init__(self, inner: Reader, effects: Effects) -> None:
        super().__init__(inner)
        self._effects = effects

    def assign(self, positions: Mapping[TopicPartition, int]) -> None:
        self._effects.check()
        super().assign(positions)

    def seek(self, partition: TopicPartition, offset: int) -> None:
        self._effects.check()
        super().seek(partition, offset)

    def poll(self, max_records: int, timeout_s: float) -> list[Record]:
        self._effects.check()
        records = super().poll(max_records, timeout_s)
        self._effects.check()
        return records


class _CrashWriter(ForwardingWriter):
    def __init__(self, inner: Writer, effects: Effects) -> None:
        super().__init__(inner)
        self._effects = effects

    def write(self, records: Sequence[Outgoing], timeout_s: float = 30.0) -> None:
        self._effects.around(names_of(records), lambda: self._inner.write(records, timeout_s))


class _CrashTransactions(ForwardingTransactions):
    def __init__(self, inner: TransactionalWriter, effects: Effects) -> None:
        super().__init__(inner)
        self._effects = effects

    def begin(self) -> None:
        self._effects.around("begin", self._inner.begin)

    def write(self, records: Sequence[Outgoing]) -> None:
        self._effects.around(names_of(records), lambda: self._inner.write(records))

    def commit(
        self,
        group: str,
        offsets: Mapping[TopicPartition, int],
        timeout_s: float = 30.0,
        *,
        also: Mapping[str, Mapping[TopicPartition, int]] | None = None,
    ) -> None:
        self._effects.around("commit", lambda: self._inner.commit(group, offsets, timeout_s, also=also))

    def abort(self) -> None:
        self._effects.around("abort", self._inner.abort)
