"""Proofs that a record was sealed, each checked alone with the public key: no log, no store. Pure.

    record -> its leaf -> the leaves of its segment, with the digest of its content -> the segment's digest -> the chain -> the tree's leaf -> audit path
    -> root -> signed head

Every step is computed, none is believed; whatever stands in the middle and is not what was sealed leads to another root.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from rollwire.schemas.errors import ProofInvalid
from rollwire.streams.archive.chain import Segment
from rollwire.streams.archive.heads import Head, read_head, read_unverified
from rollwire.streams.archive.leaves import (
    DIGEST_BYTES,
    Content,
    chain_of,
    chain_start,
    encode_record,
    leaf_of,
    leaves_digest,
    segment_digest,
    tree_leaf,
)
from rollwire.streams.archive.sealed import Trusted
from rollwire.streams.archive.tree import path_of, root_from
from rollwire.streams.seams.log import Record, TopicPartition

FORMAT: Final = 1
MAX_PROOF_BYTES: Final = 64 * 1024 * 1024


class Proof(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    format: int
    topic: str
    partition: int
    offset: int
    record: (
        bytes | None
    )  # as `leaves.encode_record` writes it; None: it is left out, and `leaf` stands for it
    leaf: str  # hex
    index: int  # of the record in its segment
    leaves: tuple[str, ...]  # hex; of all records of the segment
    first: int  # of the segment, as its digest has it
    next: int
    first_ms: int
    last_ms: int
    content: str  # hex; of the segment's records, end to end
    chain_before: str  # hex
    tree_index: int  # of the segment in its epoch
    path: tuple[str, ...]  # hex; from the segment's sibling up
    head: str  # the object of the head, as it stands in the store


class Proven(NamedTuple):
    """What a right proof says."""

    head: Head
    at: TopicPartition
    offset: int
    leaf: bytes
    record: Taken | None


class Taken(msgspec.Struct, frozen=True, array_like=True):
    """A record as it was sealed."""

    offset: int
    timestamp_ms: int
    key: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]
    value: bytes | None


_taken: Final = msgspec.msgpack.Decoder(Taken)


def chain_before(table: Sequence[Segment], index: int, before: Head | None) -> bytes:
    """The chain that segment `index` of an epoch's table goes on from; `before`: the head of the epoch before."""
    segment = table[index]
    place = TopicPartition(segment.topic, segment.partition)
    if index and (table[index - 1].topic, table[index - 1].partition) == place:
        return table[index - 1].chain
    was = before.partition(place) if before is not None else None
    return bytes.fromhex(was.chain) if was else chain_start(place.topic, place.partition, segment.first)


def make_proof(
    head: bytes,
    table: Sequence[Segment],
    index: int,
    before: bytes,
    records: Sequence[Record],
    offset: int,
    *,
    with_record: bool = True,
) -> Proof:
    """`head`: the object. `records`: those of segment `index` of `table`; `before`: the chain before it. Raises `ProofInvalid`
    where `offset` is none of the records', or they are not those that were sealed."""
    segment = table[index]
    place = next((i for i, record in enumerate(records) if record.offset == offset), None)
    if place is None:
        raise ProofInvalid(f"no record stands at {segment.topic}[{segment.partition}] at {offset:,}")
    leaves = [leaf_of(encode_record(record)) for record in records]
    content = Content()
    content.take(records)
    proof = Proof(
        format=FORMAT,
        topic=segment.topic,
        partition=segment.partition,
        offset=offset,
        record=encode_record(records[place]) if with_record else None,
        leaf=leaves[place].hex(),
        index=place,
        leaves=tuple(leaf.hex() for leaf in leaves),
        first=segment.first,
        next=segment.next,
        first_ms=segment.first_ms,
        last_ms=segment.last_ms,
        content=content.digest().hex(),
        chain_before=before.hex(),
        tree_index=index,
        path=tuple(d.hex() for d in path_of([tree_leaf(s.digest, s.chain) for s in table], index)),
        head=head.decode(),
    )
    if not _leads(proof, read_unverified(head)):
        raise ProofInvalid(
            f"the segment of {segment.topic}[{segment.partition}] at {offset:,} is not what was sealed: "
            "`rollwire audit verify` says what is wrong"
        )
    return proof


def write_proof(proof: Proof) -> bytes:
    return msgspec.json.format(msgspec.json.encode(proof), indent=1) + b"\n"


def check_proof(data: bytes, trusted: Trusted) -> Proven:
    """Raises `ProofInvalid`, and `HeadInvalid`, `KeyUnknown` or `SignatureInvalid` for the head in it."""
    if len(data) > MAX_PROOF_BYTES:
        raise ProofInvalid(f"{len(data):,} bytes are no proof")
    try:
        proof = msgspec.json.decode(data, type=Proof)
    except msgspec.DecodeError as error:
        raise ProofInvalid(f"this does not read as a proof: {error}") from error
    if proof.format != FORMAT:
        raise ProofInvalid(f"format {proof.format} is not known here: upgrade, and check it then")
    head = read_head(proof.head.encode(), trusted)
    leaf = _digest(proof.leaf)
    record: Taken | None = None
    if proof.record is not None:
        if leaf_of(proof.record) != leaf:
            raise ProofInvalid("the record is not the one that the leaf was made of")
        try:
            record = _taken.decode(proof.record)
        except msgspec.DecodeError as error:
            raise ProofInvalid(f"the record does not read: {error}") from error
        if record.offset != proof.offset:
            raise ProofInvalid(f"the record was sealed at {record.offset:,}, not at {proof.offset:,}")
    if not 0 <= proof.index < len(proof.leaves) or proof.leaves[proof.index] != proof.leaf:
        raise ProofInvalid("the record's leaf is not where the proof says, among those of its segment")
    # Records ascend by one or more, so many before it and behind it leave no other offset where a segment has no holes.
    if not proof.first + proof.index <= proof.offset <= proof.next - (len(proof.leaves) - proof.index):
        raise ProofInvalid("the segment does not hold the offset at this place among its records")
    if not _leads(proof, head):
        raise ProofInvalid(f"it does not lead to the root that the head of epoch {head.epoch} signs")
    return Proven(head, TopicPartition(proof.topic, proof.partition), proof.offset, leaf, record)


def _leads(proof: Proof, head: Head) -> bool:
    digest = segment_digest(
        proof.topic,
        proof.partition,
        proof.first,
        proof.next,
        len(proof.leaves),
        proof.first_ms,
        proof.last_ms,
        _digest(proof.content),
        leaves_digest(map(_digest, proof.leaves)),
    )
    chain = chain_of(_digest(proof.chain_before), digest)
    root = root_from(digest, chain, proof.tree_index, head.size, [_digest(d) for d in proof.path])
    return root is not None and root.hex() == head.root


def _digest(hex: str) -> bytes:
    try:
        digest = bytes.fromhex(hex)
    except ValueError:
        digest = b""
    if len(digest) != DIGEST_BYTES or digest.hex() != hex:
        raise ProofInvalid(f"{hex[:80]!r} is no digest of {DIGEST_BYTES} bytes")
    return digest
