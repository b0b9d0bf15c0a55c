"""Group commit: requests leave their events here, one thread writes all that wait at once, and answers when the log has them.

So a broker's round trip is shared by all requests that came while the one before was under way. What was acknowledged
under the same id before is not written again where `Repeats` remembers it; the stream removes the others (law 4).
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from queue import Empty, SimpleQueue
from typing import Final, Literal

import structlog

from rollwire.producers.gateway.access import FeedbackKey, Repeats
from rollwire.producers.gateway.codes import GatewayCode
from rollwire.producers.gateway.faults import fault_of
from rollwire.producers.gateway.ledger import Ledger
from rollwire.producers.gateway.records import CONFLICT, Entry
from rollwire.schemas.errors import RollwireError
from rollwire.streams.seams.log import Outgoing, Writer

_log = structlog.get_logger()

NEW: Final = 0
REPEATED: Final = 1
CONFLICTING: Final = 2
Fate = Literal[0, 1, 2]
_WAKE_S: Final = 1.0
# A write costs both threads half a millisecond, however few events it has: where requests come thick, it waits for more.
_CROWD: Final = 32  # requests of the write before
_GATHER_S: Final = 0.002
_PATIENCE_S: Final = 0.5


class Ticket:
    """The events of one request, and what became of them: None = not known, () = all are new."""

    __slots__ = ("bytes", "deadline_s", "entries", "fates", "future")

    def __init__(
        self,
        entries: Sequence[Entry],
        size: int,
        deadline_s: float,
        future: asyncio.Future[Sequence[Fate] | None],
    ) -> None:
        self.entries = entries
        self.bytes = size
        self.deadline_s = deadline_s
        self.fates: Sequence[Fate] | None = None
        self.future = future


class Committer:
    """Made and used on one event loop; its thread ends with `close`."""

    def __init__(
        self,
        writer: Writer,
        repeats: Repeats,
        ledger: Ledger,
        *,
        queue_events: int,
        queue_bytes: int,
        commit_events: int,
        write_timeout_s: float,
    ) -> None:
        self._writer = writer
        self._repeats = repeats
        self._ledger = ledger
        self._queue_events = queue_events
        self._queue_bytes = queue_bytes
        self._commit_events = commit_events
        self._write_timeout_s = write_timeout_s
        self._queue: SimpleQueue[list[Ticket] | None] = SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self._arrived: list[Ticket] = []  # since the loop last came round
        self._open: dict[Ticket, None] = {}  # in order of arrival, so of deadline
        self.events = 0  # that wait or are under way
        self.bytes = 0
        self._failing = False  # the last write failed
        self._writing_s: float | None = None  # since when one is under way
        self._thread = threading.Thread(target=self._run, name="commit", daemon=True)
        self._thread.start()
        self._sweep = self._loop.call_later(0.1, self._overdue)

    def turns_away(self, events: int, size: int, now_s: float) -> GatewayCode | None:
        """Why so much would not be taken now; None = it is. A request that alone is above the bound passes when nothing
        waits; one at a time tries a log whose last write failed."""
        if self._failing and self._writing_s is not None and now_s - self._writing_s > _PATIENCE_S:
            return "unavailable"
        if self.events and (
            self.events + events > self._queue_events or self.bytes + size > self._queue_bytes
        ):
            return "overloaded"
        return None

    def submit(
        self, entries: Sequence[Entry], size: int, deadline_s: float
    ) -> asyncio.Future[Sequence[Fate] | None]:
        """The fates once all entries are in the log, or were before; () = all are new, None = that is not known."""
        ticket = Ticket(entries, size, deadline_s, self._loop.create_future())
        self.events += len(entries)
        self.bytes += size
        self._open[ticket] = None
        # One hand-over for all that the loop finds ready at once: each may wake the thread, which costs both.
        if not self._arrived:
            self._loop.call_soon(self._hand_over)
        self._arrived.append(ticket)
        return ticket.future

    def hurry(self, within_s: float) -> None:
        """Nobody waits for longer than that from now on."""
        latest_s = time.monotonic() + within_s
        for ticket in self._open:
            ticket.deadline_s = min(ticket.deadline_s, latest_s)

    async def close(self, timeout_s: float) -> None:
        """Waits for what is under way; what is not decided then gets None."""
        deadline_s = time.monotonic() + timeout_s
        while self._open and time.monotonic() < deadline_s:
            await asyncio.wait(
                [ticket.future for ticket in self._open], timeout=deadline_s - time.monotonic()
            )
            await asyncio.sleep(0)
        self._sweep.cancel()
        self._queue.put(None)
        for ticket in list(self._open):
            self._settle(ticket, None)
        await self._loop.run_in_executor(None, self._thread.join, max(0.1, deadline_s - time.monotonic()))

    # -- on the loop --------------------------------------------------------------------------------------------

    def _hand_over(self) -> None:
        self._queue.put(self._arrived)
        self._arrived = []

    def _settle(self, ticket: Ticket, fates: Sequence[Fate] | None) -> None:
        self._open.pop(ticket, None)
        if not ticket.future.done():
            ticket.future.set_result(fates)

    def _done(self, batch: Sequence[Ticket], seconds: float, written: int, failed: bool) -> None:
        self._failing = failed
        ledger = self._ledger
        ledger.commit.observe(seconds)
        ledger.commit_events.observe(written)
        for ticket in batch:
            self.events -= len(ticket.entries)
            self.bytes -= ticket.bytes
            if ticket.fates is not None and ticket.future.done():
                ledger.late += len(ticket.entries)
            self._settle(ticket, ticket.fates)

    def _overdue(self) -> None:
        now_s = time.monotonic()
        for ticket in list(self._open):
            if ticket.deadline_s > now_s:
                break
            self._settle(ticket, None)
        self._sweep = self._loop.call_later(0.1, self._overdue)

    # -- on the thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        crowded = stop = False
        waiting: deque[Ticket] = deque()
        while waiting or not stop:
            if not waiting:
                try:
                    arrived = self._queue.get(timeout=_WAKE_S)
                except Empty:
                    continue
                if arrived is None:
                    return
                waiting.extend(arrived)
                if crowded:
                    time.sleep(_GATHER_S)
            batch: list[Ticket] = []
            events = 0
            while events < self._commit_events:
                if not waiting and not stop and self._queue.qsize():
                    arrived = self._queue.get()
                    stop = arrived is None
                    waiting.extend(arrived or ())
                if not waiting:
                    break
                batch.append(waiting.popleft())
                events += len(batch[-1].entries)
            self._commit(batch)
            crowded = len(batch) >= _CROWD

    def _commit(self, batch: Sequence[Ticket]) -> None:
        began_s = time.monotonic()
        self._writing_s = began_s
        # Who was told "outcome unknown" will ask again: what is overdue need not be written.
        alive = [ticket for ticket in batch if ticket.deadline_s > began_s]
        digests: dict[FeedbackKey, bytes] = {}
        records: list[Outgoing] = []
        failed = True
        try:
            known = self._repeats.known([entry.key for ticket in alive for entry in ticket.entries])
            decided = [decide(ticket.entries, known, digests, records) for ticket in alive]
            if records:
                self._writer.write(records, self._write_timeout_s)
            failed = False
        except RollwireError as error:
            _log.warning("gateway.write_failed", events=len(records), error=str(error))
        except Exception as error:  # noqa: BLE001 - the edge of a thread that must outlive any fault
            _log.error("gateway.commit_failed", events=len(records), **fault_of(error))
        else:
            for ticket, fates in zip(alive, decided, strict=True):
                ticket.fates = fates
        self._writing_s = None
        self._loop.call_soon_threadsafe(self._done, batch, time.monotonic() - began_s, len(records), failed)
        if digests and not failed:
            self._repeats.remember(digests)  # only now (C84)


def decide(
    entries: Sequence[Entry],
    known: Mapping[FeedbackKey, bytes],
    digests: dict[FeedbackKey, bytes],
    records: list[Outgoing],
) -> Sequence[Fate]:
    """The fates of one request's events once `records` are written, to which those are added that must be; () = all new.

    `known` are acknowledged ids, `digests` those of this write so far. An id with other content is written as well, marked:
    its caller is told 409, and it is kept for the audit.
    """
    fates: list[Fate] = []
    new = True
    for entry in entries:
        before = known.get(entry.key) or digests.get(entry.key)
        if before is None:
            digests[entry.key] = entry.digest
            records.append(entry.record)
            fates.append(NEW)
            continue
        new = False
        if before == entry.digest:
            fates.append(REPEATED)
        else:
            records.append(entry.record._replace(headers=(*entry.record.headers, CONFLICT)))
            fates.append(CONFLICTING)
    return () if new else fates
