"""Seals what was written since the last epoch: segments, chain, tree, and a signed head that names the one before.

One sealer is enough; a second one does no harm. Tables and marks are content-addressed, a head is created once, so of two
sealers that come to one epoch the first wins, and the other goes on from there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import structlog

from rollwire.schemas.catalogue import TOPICS
from rollwire.schemas.errors import (
    DeadlineExceeded,
    HeadInvalid,
    LogUnavailable,
    ObjectConflict,
    OffsetLost,
    RollwireError,
    StoreUnavailable,
)
from rollwire.schemas.records import OffsetRange
from rollwire.schemas.release import code_version
from rollwire.streams.archive.chain import Chain, Segment
from rollwire.streams.archive.heads import FORMAT, Expired, Head, PartitionHead, Signer, sign, trusted_keys
from rollwire.streams.archive.layout import head_key, marks_key, table_key
from rollwire.streams.archive.leaves import tree_leaf
from rollwire.streams.archive.marks import Marks, pack_marks
from rollwire.streams.archive.sealed import (
    StoredHead,
    Trusted,
    claim_of,
    newest_head,
    opened,
    pack_table,
    sha256_of,
)
from rollwire.streams.archive.tree import root_of
from rollwire.streams.seams.clock import Clock
from rollwire.streams.seams.log import Log, TopicPartition
from rollwire.streams.seams.places import existing_partitions
from rollwire.streams.seams.scan import Range, read_ranges
from rollwire.streams.seams.store import HoldingStore, ObjectStore

EPOCH_RECORDS: Final = 1_000_000
"""More is left for the next epoch: what a sealer holds in memory is bounded by it."""

UNSEALED: Final = "gone before it was sealed"
"""The policy of records that retention deleted while no sealer ran."""

PASSING: Final = (DeadlineExceeded, LogUnavailable, StoreUnavailable)
"""What a later attempt may not meet any more."""

_RACES: Final = 8
_logger = structlog.get_logger("rollwire.seal")


class Gathered(NamedTuple):
    """What an epoch seals."""

    segments: tuple[Segment, ...]  # by topic, partition, first
    marks: tuple[Marks, ...]
    partitions: tuple[PartitionHead, ...]  # all, also those without anything new
    unsealed: tuple[Expired, ...]


def seal_epoch(
    log: Log,
    store: ObjectStore,
    signer: Signer,
    *,
    name: str,
    clock: Clock,
    topics: Sequence[str] | None = None,
    expired: Sequence[Expired] = (),
    archived: Sequence[OffsetRange] = (),
    trusted: Trusted | None = None,
    max_records: int = EPOCH_RECORDS,
    lock_s: float = 0.0,
    progress: Callable[[int], None] = lambda _: None,
) -> Head | None:
    """Seals all decided records behind the newest head; None where there are none, and nothing else to say.

    `topics`: by default those of the catalogue that exist. `expired`: what policies deleted since. `archived`: what the
    archive holds by now (of a partition that is not named: what it held before); from then on nobody can take it out
    unseen. `trusted`: whose heads are gone on from; by default the signer's own. `lock_s`: for so long nobody can delete the
    epoch's objects, where the store has an object lock. `progress` is told how many records were read since it was told
    last.

    Raises `HeadInvalid`, `KeyUnknown` or `SignatureInvalid` where the newest head is not one to go on from, and what log
    and store raise.
    """
    trusted = trusted_keys(signer.public) if trusted is None else trusted
    for race in range(_RACES):
        newest = newest_head(store, name)
        before = None if newest is None else _trusted_head(newest, name, trusted)
        try:
            gathered = _gather(log, before, topics, clock, max_records, progress)
        except OffsetLost:
            if race == _RACES - 1:
                raise
            continue  # retention went on while it was read: from what is left
        was_held = before.archived if before else ()
        in_archive = _held(was_held, archived)
        if not gathered.segments and not expired and in_archive == was_held:
            return None
        try:
            head = _write(store, signer, name, newest, gathered, tuple(expired), in_archive, clock)
        except ObjectConflict:
            _logger.info("seal.raced", name=name, epoch=newest.epoch + 1 if newest else 1)
            continue
        if lock_s:
            _lock(store, head, head.sealed_us + round(lock_s * 1e6))
        return head
    raise ObjectConflict(
        f"{_RACES} epochs of {name!r} were sealed by somebody else meanwhile: let one sealer run"
    )


def run_sealer(
    log: Log,
    store: ObjectStore,
    signer: Signer,
    *,
    name: str,
    clock: Clock,
    stop: threading.Event,
    every_s: float = 60.0,
    topics: Sequence[str] | None = None,
    trusted: Trusted | None = None,
    lock_s: float = 0.0,
    sealed: Callable[[Head], None] = lambda _: None,
    progress: Callable[[int], None] = lambda _: None,
) -> None:
    """Seals every `every_s` seconds until `stop`; what is there at the end is sealed as well. `sealed` is told of each
    head, `progress` how many records were read since it was told last. A broker or a store that is away is waited for:
    nothing is lost by sealing later."""
    while True:
        last = stop.is_set()
        try:
            while head := seal_epoch(
                log,
                store,
                signer,
                name=name,
                clock=clock,
                topics=topics,
                trusted=trusted,
                lock_s=lock_s,
                progress=progress,
            ):
                sealed(head)
                if stop.is_set() and not last:
                    break
        except RollwireError as error:
            if last or not isinstance(error, PASSING):
                raise
            _logger.warning("seal.later", name=name, error=str(error))
        if last:
            return
        stop.wait(every_s)


def _lock(store: ObjectStore, head: Head, until_us: int) -> None:
    keys = (head.table.key, head.marks.key, head_key(head.name, head.epoch))
    if not isinstance(store, HoldingStore) or not all(store.hold(key, until_us) for key in keys):
        _logger.warning("seal.not_locked", epoch=head.epoch, advice="switch on the bucket's object lock")


def _held(before: Sequence[OffsetRange], now: Sequence[OffsetRange]) -> tuple[OffsetRange, ...]:
    told = {(r.topic, r.partition) for r in now}
    held = [*(r for r in before if (r.topic, r.partition) not in told), *now]
    return tuple(sorted(held, key=lambda r: (r.topic, r.partition, r.start)))


def _trusted_head(stored: StoredHead, name: str, trusted: Trusted) -> Head:
    head = opened(stored, trusted)
    if (head.name, head.epoch) != (name, stored.epoch):
        raise HeadInvalid(
            f"{stored.key}: it says {head.name!r}, epoch {head.epoch}: run `rollwire audit verify`"
        )
    return head


def _gather(
    log: Log,
    before: Head | None,
    topics: Sequence[str] | None,
    clock: Clock,
    max_records: int,
    progress: Callable[[int], None],
) -> Gathered:
    partitions = existing_partitions(log, sorted(TOPICS if topics is None else topics))
    begins, ends = log.beginning_offsets(partitions), log.end_offsets(partitions)
    known = {} if before is None else {p.at: p for p in before.partitions}
    ranges: dict[TopicPartition, Range] = {}
    chains: dict[TopicPartition, Chain] = {}
    for at in partitions:
        head = known.get(at)
        first = begins[at] if head is None else max(head.next, begins[at])
        if first < ends[at]:
            ranges[at] = Range(first, ends[at])
            chains[at] = Chain(at, first, None if head is None else bytes.fromhex(head.chain))
        elif head is not None and ends[at] < head.next:
            _logger.warning(
                "seal.cut", topic=at.topic, partition=at.partition, end=ends[at], sealed=head.next
            )
    segments: list[Segment] = []
    read = 0
    for batch in read_ranges(log, ranges, clock=clock):
        for record in batch:
            segment = chains[TopicPartition(record.topic, record.partition)].add(record)
            if segment is not None:
                segments.append(segment)
        read += len(batch)
        progress(len(batch))
        if read >= max_records:
            break
    segments += [last for chain in chains.values() if (last := chain.close()) is not None]
    segments.sort(key=lambda s: (s.topic, s.partition, s.first))
    heads = {**known, **_heads(known, segments)}
    return Gathered(
        tuple(segments),
        tuple(chains[at].marks for at in sorted(chains)),
        tuple(heads[at] for at in sorted(heads)),
        tuple(_unsealed(known, ranges, segments, clock.now_us())),
    )


def _heads(
    known: dict[TopicPartition, PartitionHead], segments: Sequence[Segment]
) -> dict[TopicPartition, PartitionHead]:
    found: dict[TopicPartition, PartitionHead] = {}
    for segment in segments:
        at = TopicPartition(segment.topic, segment.partition)
        so_far = found.get(at) or known.get(at)
        found[at] = PartitionHead(
            topic=segment.topic,
            partition=segment.partition,
            begin=so_far.begin if so_far else segment.first,
            next=segment.next,
            records=segment.records + (so_far.records if so_far else 0),
            segments=1 + (so_far.segments if so_far else 0),
            chain=segment.chain.hex(),
        )
    return found


def _unsealed(
    known: dict[TopicPartition, PartitionHead],
    ranges: dict[TopicPartition, Range],
    segments: Sequence[Segment],
    now_us: int,
) -> list[Expired]:
    """What lies between the last epoch and the first record that is still there: told where something follows it."""
    found: list[Expired] = []
    for at in sorted({TopicPartition(s.topic, s.partition) for s in segments}):
        first = known[at].next if at in known else 0
        if first < ranges[at].first:
            found.append(
                Expired(
                    topic=at.topic,
                    partition=at.partition,
                    first=first,
                    next=ranges[at].first,
                    policy=UNSEALED,
                    at_us=now_us,
                )
            )
    return found


def _write(
    store: ObjectStore,
    signer: Signer,
    name: str,
    newest: StoredHead | None,
    gathered: Gathered,
    expired: tuple[Expired, ...],
    archived: tuple[OffsetRange, ...],
    clock: Clock,
) -> Head:
    epoch = 1 if newest is None else newest.epoch + 1
    table, marks = pack_table(gathered.segments), pack_marks(gathered.marks)
    table_sha, marks_sha = sha256_of(table), sha256_of(marks)
    head = Head(
        format=FORMAT,
        name=name,
        epoch=epoch,
        previous="" if newest is None else newest.digest,
        sealed_us=clock.now_us(),
        root=root_of([tree_leaf(s.digest, s.chain) for s in gathered.segments]).hex(),
        size=len(gathered.segments),
        table=claim_of(table_key(name, epoch, table_sha), table, table_sha),
        marks=claim_of(marks_key(name, epoch, marks_sha), marks, marks_sha),
        partitions=gathered.partitions,
        expired=(*gathered.unsealed, *expired),
        archived=archived,
        key_id=signer.key_id,
        code_version=code_version(),
    )
    store.create(head.table.key, table)
    store.create(head.marks.key, marks)
    # Written last: an epoch without its head never was.
    store.create(head_key(name, epoch), sign(head, signer))
    return head
