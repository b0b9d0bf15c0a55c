"""Fetching ahead: in parallel, within its bound, and never anything else than what was asked for."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator

import pytest

from rollwire.consumers.weights.fetched import FetchedStore
from rollwire.schemas.errors import ObjectMissing
from rollwire.schemas.records import LinkObject
from rollwire.streams.seams.store_memory import MemoryStore

WAIT = 30.0


class SlowStore(MemoryStore):
    """Answers when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.changed = threading.Condition()
        self.asked: list[str] = []
        self.open = True

    def get(self, key: str, *, sha256: str | None = None) -> bytes:
        with self.changed:
            self.asked.append(key)
            self.changed.notify_all()
            assert self.changed.wait_for(lambda: self.open, WAIT)
        return super().get(key, sha256=sha256)

    def wait_asked(self, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.asked) >= count, WAIT)

    def answer(self, open_: bool) -> None:
        with self.changed:
            self.open = open_
            self.changed.notify_all()


def put(store: MemoryStore, count: int, size: int = 100) -> list[LinkObject]:
    entries: list[LinkObject] = []
    for number in range(count):
        data = bytes([number]) * size
        entry = LinkObject(
            key=f"object-{number}", size=size, sha256=hashlib.sha256(data).hexdigest(), head_bytes=0
        )
        store.create(entry.key, data)
        entries.append(entry)
    return entries


@pytest.fixture
def slow() -> Iterator[SlowStore]:
    store = SlowStore()
    yield store
    store.answer(open_=True)


def test_what_is_expected_comes_in_parallel_and_in_order(slow: SlowStore) -> None:
    entries = put(slow, 6)
    slow.answer(open_=False)
    store = FetchedStore(slow, threads=4)
    store.expect(entries)
    slow.wait_asked(4)
    slow.answer(open_=True)
    for number, entry in enumerate(entries):
        assert store.get(entry.key, sha256=entry.sha256) == bytes([number]) * 100
    assert sorted(slow.asked) == [entry.key for entry in entries]  # each once
    assert store.read_bytes == 600
    store.close()


def test_no_more_waits_than_the_bound_allows(slow: SlowStore) -> None:
    entries = put(slow, 6)
    store = FetchedStore(slow, threads=6, ahead_bytes=250)
    store.expect(entries)
    slow.wait_asked(2)
    assert slow.asked == [entry.key for entry in entries[:2]]
    for entry in entries[:3]:
        store.get(entry.key, sha256=entry.sha256)
    slow.wait_asked(5)
    assert len(slow.asked) == 5
    large = FetchedStore(slow, ahead_bytes=10)
    large.expect(entries)
    assert large.get(entries[0].key, sha256=entries[0].sha256) == bytes(100)
    large.expect_all(entries)
    slow.wait_asked(5 + 6)
    store.close()
    large.close()


def test_what_is_not_expected_is_asked_for_and_counted(slow: SlowStore) -> None:
    entries = put(slow, 2)
    store = FetchedStore(slow)
    store.expect(entries[:1])
    assert store.get(entries[1].key, sha256=entries[1].sha256) == b"\x01" * 100
    assert store.get(entries[0].key) == bytes(100)  # by no digest: not what was expected
    assert store.get_range(entries[0].key, 10, 30) == bytes(20)
    assert store.read_bytes == 220
    store.close()


def test_a_failure_is_the_askers(slow: SlowStore) -> None:
    entries = put(slow, 1)
    gone = LinkObject(key="gone", size=3, sha256="0" * 64, head_bytes=0)
    store = FetchedStore(slow)
    store.expect([gone, *entries])
    with pytest.raises(ObjectMissing):
        store.get("gone", sha256="0" * 64)
    assert store.get(entries[0].key, sha256=entries[0].sha256) == bytes(100)
    store.expect(())
    store.close()
