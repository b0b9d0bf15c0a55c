"""The log of the simulation: the twin in memory behind the log's seam, with a fault at every call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from rollwire.ops.simulate.world import Process, World
from rollwire.schemas.errors import LogUnavailable, TransactionUnknown
from rollwire.streams.seams.forwarding import ForwardingLog, ForwardingReader, ForwardingWriter, Offsets
from rollwire.streams.seams.log import (
    Noted,
    Outgoing,
    Reader,
    Record,
    TopicPartition,
    TransactionalWriter,
    Writer,
)
from rollwire.streams.seams.log_memory import GroupOffset, Marker, MemoryLog
from rollwire.streams.seams.log_memory_write import MemoryTransactionalWriter, Transaction

TRANSACTION_TIMEOUT_US: Final = 15_000_000


class SimulatedLog(MemoryLog):
    """Shared by all processes. Nothing waits here: time is moved on instead."""

    def __init__(self, world: World, partitions: Mapping[str, int]) -> None:
        super().__init__(partitions, world.clock, hold_markers=True)
        self._world = world
        self._late: list[Transaction] = []  # whose commit is on its way for long

    def stir(self) -> None:
        """What happens by itself meanwhile: markers arrive in any order, late requests too, transactions time out."""
        world = self._world
        now_us = world.clock.now_us()
        for transaction in self.transactions():
            if transaction.state == "open" and now_us - transaction.begun_us > TRANSACTION_TIMEOUT_US:
                world.note(f"the transaction of {transaction.transactional_id} times out")
                self.time_out(transaction)
        while self._late and world.rng.random() < 0.5:
            self._arrive(self._late.pop())
        markers = self.markers()
        if markers:
            world.rng.shuffle(markers)
            for marker in markers:
                if world.healed or world.rng.random() >= world.faults.hold:
                    world.note(f"marker of {marker.transaction.transactional_id} at {_name(marker)}")
                    self.deliver(marker)

    def retire(self, topic: str, before_us: int, needed: Callable[[int], set[bytes | None]]) -> None:
        """What retention does: everything that was written before `before_us` and stands at the beginning is gone, up to
        the first key that is `needed` in its partition."""
        for place, at in self._partitions.items():
            if place.topic != topic:
                continue
            first, keys = at.begin, needed(place.partition)
            for entry in at.entries[: self._stable(place) - at.begin]:
                if entry is not None and (entry.timestamp_ms * 1_000 >= before_us or entry.key in keys):
                    break
                first += 1
            if first > at.begin:
                self._world.note(f"{topic}[{place.partition}] begins at {first}")
                self.trim(place, first)

    def keys_from(self, place: TopicPartition, offset: int) -> set[bytes | None]:
        """The keys of the records from `offset` on."""
        at = self._at(place)
        return {entry.key for entry in at.entries[offset - at.begin :] if entry is not None}

    def later(self, transaction: Transaction | None) -> None:
        """A commit that its sender gave up; it may still arrive before the transaction is ended otherwise."""
        if transaction is not None and self._world.rng.random() < 0.5:
            self._late.append(transaction)

    def settled(self, group: str, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
        """The committed offsets whose markers have arrived, without waiting for others."""
        found = {p: self._committed.get(GroupOffset(group, p)) for p in partitions}
        return {p: at for p, at in found.items() if at is not None}

    def committed_anywhere(self) -> dict[GroupOffset, tuple[int, str]]:
        """The committed offsets of all groups, with their notes."""
        return {key: (at, at.note if isinstance(at, Noted) else "") for key, at in self._committed.items()}

    def await_markers(self, markers: Sequence[Marker], timeout_s: float) -> None:
        world, process = self._world, self._world.current
        if any(marker.transaction.state == "open" for marker in markers):
            world.clock.advance(timeout_s)
            self.stir()
            return  # whoever asks looks again
        waiting = list(markers)
        world.rng.shuffle(waiting)
        for marker in waiting:
            if process is not None and world.point(process, "await_marker", "before"):
                world.clock.advance(timeout_s)
                raise LogUnavailable(f"no marker after {timeout_s:g} s")
            if marker.place not in marker.transaction.ended:
                world.note(f"marker of {marker.transaction.transactional_id} at {_name(marker)}")
                self.deliver(marker)

    def monotonic_s(self) -> float:
        return self._world.clock.monotonic_s()

    def wait(self, seconds: float) -> None:
        self._world.clock.advance(seconds + 1e-6)  # the clock counts microseconds: some time must pass
        self.stir()

    def _arrive(self, transaction: Transaction) -> None:
        if transaction.state == "open" and transaction in self.transactions():
            self._world.note(f"the commit of {transaction.transactional_id} arrives late")
            self.decide(transaction, "committed")


class ProcessLog(ForwardingLog):
    """The log as one process sees it; implements `rollwire.streams.seams.log.Log`."""

    def __init__(self, world: World, log: SimulatedLog, process: Process) -> None:
        super().__init__(log)
        self.world = world
        self.inner = log
        self.process = process

    def _ask(self, question: str, ask: Callable[[], Offsets]) -> Offsets:
        call = "end_offsets" if question == "written_offsets" else question  # one place where a process dies
        return self.world.effect(self.process, call, ask, LogUnavailable)

    def reader(self) -> Reader:
        return ProcessReader(self)

    def writer(self) -> Writer:
        return ProcessWriter(self)

    def transactional_writer(self, transactional_id: str, timeout_s: float = 60.0) -> TransactionalWriter:
        made = self.world.effect(
            self.process,
            "init_transactions",
            lambda: self.inner.take_over(transactional_id, timeout_s),
            LogUnavailable,
        )
        return ProcessTransactionalWriter(self, made)

    def close(self) -> None:
        """Nothing to release: the log is everybody's."""


class ProcessReader(ForwardingReader):
    """Sees of its partitions now these, now those: fetches of different brokers come as they come."""

    def __init__(self, log: ProcessLog) -> None:
        super().__init__(log.inner.reader())
        self._log = log
        self._paused: set[TopicPartition] = set()

    def assign(self, positions: Mapping[TopicPartition, int]) -> None:
        super().assign(positions)
        self._paused.clear()

    def pause(self, partitions: Sequence[TopicPartition]) -> None:
        self._paused.update(partitions)
        super().pause(partitions)

    def resume(self, partitions: Sequence[TopicPartition]) -> None:
        self._paused.difference_update(partitions)
        super().resume(partitions)

    def poll(self, max_records: int, timeout_s: float) -> list[Record]:
        world = self._log.world
        return world.effect(
            self._log.process, "poll", lambda: self._fetch(max_records, timeout_s), LogUnavailable
        )

    def _fetch(self, max_records: int, timeout_s: float) -> list[Record]:
        world = self._log.world
        if world.healed:
            return self._inner.poll(max_records, timeout_s)
        hidden = [p for p in self._inner.positions() if p not in self._paused and world.rng.random() < 0.35]
        self._inner.pause(hidden)
        try:
            return self._inner.poll(min(max_records, world.rng.randint(1, 12)), timeout_s)
        finally:
            self._inner.resume(hidden)


class ProcessWriter(ForwardingWriter):
    """A writer without transactions: where an answer was lost its user writes again, and there are two."""

    def __init__(self, log: ProcessLog) -> None:
        super().__init__(log.inner.writer())
        self._log = log

    def write(self, records: Sequence[Outgoing], timeout_s: float = 30.0) -> None:
        self._log.world.effect(
            self._log.process, "write", lambda: self._inner.write(records, timeout_s), LogUnavailable
        )


class ProcessTransactionalWriter:
    """Dead after the first doubt, as the adapter is (law 4). Offsets and end are two requests."""

    def __init__(self, log: ProcessLog, inner: MemoryTransactionalWriter) -> None:
        self._log = log
        self._inner = inner

    def begin(self) -> None:
        self._inner.begin()  # nothing is sent

    def write(self, records: Sequence[Outgoing]) -> None:
        world, process = self._log.world, self._log.process
        if not records:
            self._inner.write(records)
            return
        cut = world.rng.randint(0, len(records))  # the records go out in two requests

        def send() -> None:
            self._inner.write(records[:cut])
            if world.point(process, "write_rest", "before"):
                raise TransactionUnknown("write: a request was lost")
            self._inner.write(records[cut:])

        self._request("write_transactional", send)

    def commit(
        self,
        group: str,
        offsets: Mapping[TopicPartition, int],
        timeout_s: float = 30.0,
        *,
        also: Mapping[str, Mapping[TopicPartition, int]] | None = None,
    ) -> None:
        inner, sim = self._inner, self._log.inner
        offsets_of = {name: moved for name, moved in {group: offsets, **(also or {})}.items() if moved}
        self._request("send_offsets", lambda: inner.send_offsets(offsets_of, timeout_s))
        transaction = inner.transaction
        self._request("end_transaction", lambda: inner.end("committed"), late=lambda: sim.later(transaction))

    def abort(self) -> None:
        self._request("abort", self._inner.abort)

    def close(self) -> None:
        self._inner.close()

    def _request(self, call: str, act: Callable[[], None], late: Callable[[], None] | None = None) -> None:
        try:
            self._log.world.effect(self._log.process, call, act, TransactionUnknown, late=late)
        except TransactionUnknown:
            self._inner.close()
            raise
        except LogUnavailable as failure:
            self._inner.close()
            raise TransactionUnknown(str(failure)) from failure


def _name(marker: Marker) -> str:
    place = marker.place
    return place if isinstance(place, str) else f"{place.topic}[{place.partition}]"
