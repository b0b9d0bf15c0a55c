"""Finds what a proof of one record needs: its head, its segment's records, in the log or in the archive."""

from __future__ import annotations

from rollwire.schemas.errors import HeadInvalid, LogError, ProofInvalid
from rollwire.streams.archive.heads import Head
from rollwire.streams.archive.layout import head_key
from rollwire.streams.archive.proofs import Proof, chain_before, make_proof
from rollwire.streams.archive.sealed import StoredHead, Trusted, epochs_of, opened, segments_of
from rollwire.streams.seams.clock import Clock
from rollwire.streams.seams.log import Log, Record, TopicPartition
from rollwire.streams.seams.scan import Range, read_ranges
from rollwire.streams.seams.store import ObjectStore


def prove(
    log: Log,
    store: ObjectStore,
    *,
    name: str,
    at: TopicPartition,
    offset: int,
    trusted: Trusted,
    with_record: bool = True,
    clock: Clock | None = None,
) -> Proof:
    """`log`: one that reads across the archive.

    Raises `ProofInvalid` where there is nothing to prove: not sealed yet, no record at this offset, or not the one that was
    sealed; and `HeadInvalid`, `KeyUnknown`, `SignatureInvalid`, `ArchiveCorrupt` and `ObjectMissing` of what is needed for it.
    """
    stored, head, before = _sealing(store, name, at, offset, trusted)
    table = segments_of(store, head)
    index = next(
        (i for i, s in enumerate(table) if (s.topic, s.partition) == at and s.first <= offset < s.next),
        None,
    )
    if index is None:
        raise ProofInvalid(f"{at.topic}[{at.partition}] at {offset:,} is in no segment of epoch {head.epoch}")
    segment = table[index]
    records: list[Record] = []
    try:
        for batch in read_ranges(log, {at: Range(segment.first, segment.next)}, clock=clock):
            records += batch
    except LogError as error:
        raise ProofInvalid(
            f"the records {segment.first:,} to {segment.next - 1:,} of {at.topic}[{at.partition}] are needed: {error}"
        ) from error
    return make_proof(
        stored.data,
        table,
        index,
        chain_before(table, index, before),
        records,
        offset,
        with_record=with_record,
    )


def _sealing(
    store: ObjectStore, name: str, at: TopicPartition, offset: int, trusted: Trusted
) -> tuple[StoredHead, Head, Head | None]:
    """The head whose epoch sealed the offset, and the one before it."""
    epochs = epochs_of(store, name)
    heads: dict[int, tuple[StoredHead, Head]] = {}

    def head_of(place: int) -> tuple[StoredHead, Head]:
        if place not in heads:
            key = head_key(name, epochs[place])
            stored = StoredHead(epochs[place], key, store.get(key))
            head = opened(stored, trusted)
            if (head.name, head.epoch) != (name, stored.epoch):
                raise HeadInvalid(f"{key}: it is the head of {head.name!r}, epoch {head.epoch}")
            heads[place] = stored, head
        return heads[place]

    low, high = 0, len(epochs)
    while low < high:
        middle = (low + high) // 2
        sealed = head_of(middle)[1].partition(at)
        if sealed is not None and offset < sealed.next:
            high = middle
        else:
            low = middle + 1
    if low == len(epochs):
        raise ProofInvalid(
            f"{at.topic}[{at.partition}] at {offset:,} is not sealed: `rollwire audit seal` seals it"
        )
    stored, head = head_of(low)
    return stored, head, head_of(low - 1)[1] if low else None
