"""Settles dead letters: replays them, or drops them, exactly once whatever happens in between.

One transaction a batch: the replayed records and the mark that settles their letters. Whoever settles takes over one
transactional id (`<prefix>dlq`) *before* it reads the marks, so that a predecessor's transaction is finished and no
other one can begin: what it then finds unmarked was not replayed. After any doubt about a transaction the marks are
read anew by a new producer (law 4).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import Final, NamedTuple

from rollwire.ops.dlq.letters import Letter, events, read_marks
from rollwire.schemas.catalogue import TOPICS
from rollwire.schemas.errors import DeadlineExceeded, LogError, LogUnavailable, Refused, TransactionUnknown
from rollwire.schemas.records import DeadLetter
from rollwire.streams.dead_letter import cut
from rollwire.streams.emit import outgoing
from rollwire.streams.seams.clock import Clock
from rollwire.streams.seams.limits import check_size, record_bytes
from rollwire.streams.seams.log import Log, Outgoing, TransactionalWriter
from rollwire.streams.settlement import Action, LetterAt, Settlement, mark, replay

BATCH_LETTERS: Final = 250
BATCH_BYTES: Final = 4 << 20
_DOUBTS: Final = 5  # failures without a settled letter between them, before the last one is raised
_TRANSACTION_S: Final = 30.0
_SOURCE: Final = "rollwire/dlq"
# Refusals that `pack` writes beside the group's fate: a second fate would break "one fate a group".
_FATED: Final = ("version_future", "lineage_abandoned")


class Failure(NamedTuple):
    at: LetterAt
    why: str


class Outcome(NamedTuple):
    settled: int
    failures: tuple[Failure, ...]


class Order(NamedTuple):
    """What is to be done. `why` and `by` stand in the mark."""

    action: Action
    why: str
    by: str


class _Batch:
    def __init__(self) -> None:
        self.records: list[Outgoing] = []
        self.letters: list[LetterAt] = []
        self.bytes = 0

    @property
    def full(self) -> bool:
        return len(self.letters) >= BATCH_LETTERS or self.bytes >= BATCH_BYTES


def flaw(letter: Letter) -> str | None:
    """Why a letter cannot be replayed as it was; None = it can."""
    if letter.source.topic not in TOPICS:
        return f"its topic {letter.source.topic!r} is no topic of the catalogue"
    if letter.source.topic == "groups" and letter.reason in _FATED:
        return "its group has its fate, and meets no second one"
    if letter.source.topic == "groups" and any(done.action == "replayed" for done in letter.marks):
        # A restarted `pack` knows of no fate below its offsets: a second copy could be trained a second time.
        return "its group was replayed before: it has its fate, waits for it, or was refused anew as a newer letter"
    return None


def settle(
    log: Log,
    prefix: str,
    chosen: Iterable[Letter],
    order: Order,
    clock: Clock,
    tell: Callable[[int], None] = lambda _: None,
) -> Outcome:
    """Settles the letters that were chosen and have no more marks than they had then. `tell`: so many are settled now.

    `prefix` is that of the transactional id. Raises `Fenced` where someone else settles at the same time, `LogUnavailable`
    or `TransactionUnknown` when the broker does not come back; the batches before then are settled.
    """
    wanted = {letter.at: letter for letter in chosen}
    failures = {
        at: Failure(at, why) for at, one in wanted.items() if (why := _cannot(one, order)) is not None
    }
    settled: set[LetterAt] = set()
    doubts = 0
    while True:
        before = len(settled)
        try:
            with contextlib.closing(log.transactional_writer(f"{prefix}dlq", _TRANSACTION_S)) as writer:
                # A trainer writes notices too, and a transaction of its own may be open before the last mark.
                marks = read_marks(log, hidden=True)
                # More marks than when it was chosen: a transaction of ours in doubt, or someone else, settled it.
                settled |= {at for at, one in wanted.items() if len(marks.get(at, ())) > len(one.marks)}
                tell(len(settled))
                left = {at: one for at, one in wanted.items() if at not in settled and at not in failures}
                _run(log, writer, left, order, clock, settled, failures, tell)
        except (TransactionUnknown, LogUnavailable, DeadlineExceeded) as error:
            doubts = 1 if len(settled) > before else doubts + 1
            if doubts >= _DOUBTS:
                raise LogUnavailable(f"{len(settled):,} letters are {order.action}; then: {error}") from error
        else:
            return Outcome(len(settled), tuple(failures.values()))


def _cannot(letter: Letter, order: Order) -> str | None:
    return flaw(letter) if order.action == "replayed" else None


def _run(
    log: Log,
    writer: TransactionalWriter,
    left: Mapping[LetterAt, Letter],
    order: Order,
    clock: Clock,
    settled: set[LetterAt],
    failures: dict[LetterAt, Failure],
    tell: Callable[[int], None],
) -> None:
    batch = _Batch()
    found: set[LetterAt] = set()
    at_us = 0

    def commit() -> None:
        nonlocal batch, at_us
        if not batch.letters:
            return
        at_us = max(clock.now_us(), at_us + 1)  # a notice's time is part of its id
        done = mark(Settlement(order.action, tuple(batch.letters), order.why, order.by, at_us))
        _transaction(writer, [*batch.records, outgoing(done, source=_SOURCE, time_us=at_us)])
        settled.update(batch.letters)
        tell(len(settled))
        batch = _Batch()

    for record, event in events(log) if left else ():
        at = LetterAt(record.partition, record.offset)
        letter = left.get(at)
        if letter is None or event is None:
            continue
        found.add(at)
        if order.action == "replayed":
            again = replay(event, at, letter.replayed + 1)
            if (why := _unfit(again, event)) is not None:
                failures[at] = Failure(at, why)
                continue
            batch.records.append(again)
            batch.bytes += record_bytes(again)
        batch.letters.append(at)
        if batch.full:
            commit()
    commit()
    for at in left.keys() - found:
        failures[at] = Failure(at, "it has left `dead-letters` by retention")


def _unfit(again: Outgoing, event: DeadLetter) -> str | None:
    if (why := cut(event)) is not None:
        return f"{why}: it cannot be written as it was"
    try:
        check_size(again)
    except Refused as refused:
        return refused.detail
    return None


def _transaction(writer: TransactionalWriter, records: list[Outgoing]) -> None:
    writer.begin()
    try:
        writer.write(records)
    except (KeyboardInterrupt, Refused):
        # Left open it would hold every reader back until its time-out.
        with contextlib.suppress(LogError):
            writer.abort()
        raise
    writer.commit("", {}, _TRANSACTION_S)
