"""Group commit: what is written, answered and remembered, and in which order (C69, C70, C84)."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from rollwire.producers.gateway.access import FeedbackKey, LocalRepeats, Repeats
from rollwire.producers.gateway.commit import CONFLICTING, NEW, REPEATED, Committer, decide
from rollwire.producers.gateway.ledger import Ledger
from rollwire.producers.gateway.records import Entry
from rollwire.schemas.errors import LogUnavailable
from rollwire.streams.seams.log import Outgoing

TIMEOUT_S = 30.0


def entry(name: str, content: int = 0, tenant: str = "acme") -> Entry:
    return Entry(
        (tenant, name), bytes([content + 1] * 16), "client", Outgoing("user-feedback", b"k", name.encode())
    )


class GatedWriter:
    """Writes when it is let; what it wrote, and how much at a time."""

    def __init__(self) -> None:
        self.written: list[list[Outgoing]] = []
        self.gate = threading.Event()
        self.fails = False
        self.waiting = threading.Event()

    def write(self, records: Sequence[Outgoing], timeout_s: float = 30.0) -> None:
        self.waiting.set()
        assert self.gate.wait(TIMEOUT_S)
        self.waiting.clear()
        if self.fails:
            raise LogUnavailable("the broker is away")
        self.written.append(list(records))

    def close(self) -> None:
        """Nothing is held."""

    @property
    def values(self) -> list[bytes | None]:
        return [record.value for records in self.written for record in records]


class SpiedRepeats(LocalRepeats):
    """Notes what had been written when something was remembered."""

    def __init__(self, writer: GatedWriter) -> None:
        super().__init__()
        self._writer = writer
        self.after: list[int] = []

    def remember(self, digests: Any) -> None:
        self.after.append(len(self._writer.values))
        super().remember(digests)


@asynccontextmanager
async def committing(
    writer: GatedWriter, ledger: Ledger, repeats: Repeats | None = None, **changed: Any
) -> AsyncIterator[Committer]:
    limits = {"queue_events": 100, "queue_bytes": 10_000, "commit_events": 50, "write_timeout_s": 5.0}
    committer = Committer(writer, repeats or LocalRepeats(), ledger, **(limits | changed))
    try:
        yield committer
    finally:
        writer.gate.set()
        await committer.close(TIMEOUT_S)


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


def later(seconds: float = TIMEOUT_S) -> float:
    return time.monotonic() + seconds


def test_what_comes_during_a_write_is_the_next_one() -> None:
    async def scenario() -> None:
        writer, ledger = GatedWriter(), Ledger()
        async with committing(writer, ledger) as committer:
            first = committer.submit([entry("a")], 10, later())
            await until(writer.waiting.is_set)
            others = [committer.submit([entry(name)], 10, later()) for name in "bcd"]
            assert not first.done()
            writer.gate.set()
            assert [await one for one in (first, *others)] == [()] * 4
        assert [len(records) for records in writer.written] == [1, 3]
        assert (committer.events, committer.bytes) == (0, 0)

    asyncio.run(scenario())


def test_c84_an_id_is_remembered_only_after_the_broker_has_it() -> None:
    async def scenario() -> None:
        writer, ledger = GatedWriter(), Ledger()
        repeats = SpiedRepeats(writer)
        async with committing(writer, ledger, repeats) as committer:
            writer.gate.set()
            writer.fails = True
            assert await committer.submit([entry("a")], 10, later()) is None
            assert repeats.after == []
            writer.fails = False
            assert await committer.submit([entry("a")], 10, later()) == ()
            assert await committer.submit([entry("a")], 10, later()) == [REPEATED]
        assert repeats.after == [1]
        assert writer.values == [b"a"]

    asyncio.run(scenario())


def test_c69_who_waited_too_long_is_told_so_and_the_late_acknowledgement_is_counted() -> None:
    async def scenario() -> None:
        writer, ledger = GatedWriter(), Ledger()
        async with committing(writer, ledger) as committer:
            under_way = committer.submit([entry("a"), entry("b")], 10, later())
            await until(writer.waiting.is_set)
            queued = committer.submit([entry("c")], 10, later())
            committer.hurry(0.0)
            assert await under_way is None
            assert await queued is None
            assert committer.events == 3
            writer.gate.set()
            await until(lambda: committer.events == 0)
        assert writer.values == [b"a", b"b"]
        assert ledger.late == 2

    asyncio.run(scenario())


def test_a_full_queue_and_an_absent_log_turn_away() -> None:
    async def scenario() -> None:
        writer, ledger = GatedWriter(), Ledger()
        async with committing(writer, ledger, queue_events=2) as committer:
            assert committer.turns_away(1_000, 1_000_000, time.monotonic()) is None  # alone, it may be larger
            committer.submit([entry("a"), entry("b")], 10, later())
            assert committer.turns_away(1, 1, time.monotonic()) == "overloaded"
            await until(writer.waiting.is_set)
            writer.fails = True
            writer.gate.set()
            await until(lambda: committer.events == 0)
            writer.gate.clear()
            assert committer.turns_away(1, 1, time.monotonic()) is None  # somebody has to try
            tried = committer.submit([entry("c")], 1, later())
            await until(writer.waiting.is_set)
            assert committer.turns_away(1, 1, time.monotonic() + 1.0) == "unavailable"
            writer.fails = False
            writer.gate.set()
            assert await tried == ()
            assert committer.turns_away(1, 1, time.monotonic() + 1.0) is None

    asyncio.run(scenario())


def test_a_fault_in_the_commit_thread_is_an_unknown_outcome_and_not_its_end() -> None:
    class Broken(LocalRepeats):
        broken = True

        def known(self, ids: Sequence[FeedbackKey]) -> Any:
            if self.broken:
                raise ZeroDivisionError
            return super().known(ids)

    async def scenario() -> None:
        writer, ledger, repeats = GatedWriter(), Ledger(), Broken()
        writer.gate.set()
        async with committing(writer, ledger, repeats) as committer:
            assert await committer.submit([entry("a")], 1, later()) is None
            repeats.broken = False
            assert await committer.submit([entry("a")], 1, later()) == ()

    asyncio.run(scenario())


def test_told_to_hurry_nobody_waits_for_longer() -> None:
    async def scenario() -> None:
        writer, ledger = GatedWriter(), Ledger()
        async with committing(writer, ledger) as committer:
            slow = committer.submit([entry("a")], 1, later())
            committer.hurry(0.1)
            assert await slow is None

    asyncio.run(scenario())


entries = st.builds(entry, st.sampled_from("abc"), st.integers(0, 2), st.sampled_from(["acme", "other"]))


@given(st.lists(st.lists(entries, max_size=4), max_size=4), st.lists(entries, max_size=3))
def test_c70_the_first_content_of_an_id_counts_and_every_other_is_kept(
    requests: list[list[Entry]], before: list[Entry]
) -> None:
    known = {one.key: one.digest for one in before}
    digests: dict[FeedbackKey, bytes] = {}
    records: list[Outgoing] = []
    first = dict(known)
    written = 0
    for request in requests:
        fates = decide(request, known, digests, records) or [NEW] * len(request)
        for one, fate in zip(request, fates, strict=True):
            new = one.key not in first
            same = first.setdefault(one.key, one.digest) == one.digest
            assert fate == (NEW if new else REPEATED if same else CONFLICTING)
        written += sum(fate != REPEATED for fate in fates)
    assert len(records) == written
    assert all(
        record.headers == (("refused", b"conflicting_repeat"),) for record in records if record.headers
    )
    assert sum(bool(record.headers) for record in records) == written - len(digests)
    assert digests == {key: digest for key, digest in first.items() if key not in known}
