"""Proofs of single records: right at every position, refused with anything else in the middle (C86)."""

from __future__ import annotations

import random
from typing import NamedTuple

import msgspec
import pytest

from rollwire.schemas.errors import AuditError, KeyUnknown, ProofInvalid, SignatureInvalid
from rollwire.streams.archive.heads import LocalSigner, new_signing_key, read_unverified, sign, trusted_keys
from rollwire.streams.archive.leaves import encode_record, leaf_of, leaf_of_fields, tree_leaf, tree_node
from rollwire.streams.archive.proofs import Proof, chain_before, check_proof, make_proof, write_proof
from rollwire.streams.archive.prove import prove
from rollwire.streams.archive.sealed import Trusted, heads_of, segments_of
from rollwire.streams.archive.sealer import seal_epoch
from rollwire.streams.archive.tree import path_of, root_from, root_of
from rollwire.streams.seams.clock import ManualClock
from rollwire.streams.seams.log import Outgoing, Record, TopicPartition
from rollwire.streams.seams.log_memory import MemoryLog
from rollwire.streams.seams.store_memory import MemoryStore

AT = TopicPartition("rollouts", 0)
SIGNER = LocalSigner(new_signing_key())
STRANGER = LocalSigner(new_signing_key())
TRUSTED: Trusted = trusted_keys(SIGNER.public)


class Past(NamedTuple):
    log: MemoryLog
    store: MemoryStore
    proofs: tuple[Proof, ...]  # of every record of `AT`


@pytest.fixture(scope="module")
def past() -> Past:
    """1,000 events in five epochs, among others of other partitions."""
    clock = ManualClock()
    log, store = MemoryLog({"rollouts": 2, "rewards": 3}, clock), MemoryStore(clock)
    for part in range(5):
        writer = log.transactional_writer("w")
        writer.begin()
        writer.write([Outgoing("rollouts", b"key", b"%d" % i, (("n", b"%d" % part),), 0) for i in range(200)])
        writer.write([Outgoing("rewards", b"%d" % i, b"r") for i in range(50 * part)])
        writer.commit("g", {})
        clock.advance(1.0)
        assert seal_epoch(log, store, SIGNER, name="run", clock=clock, topics=["rollouts", "rewards"])
    proofs = []
    before = None
    for stored in heads_of(store, "run"):
        head = read_unverified(stored.data)
        table = segments_of(store, head)
        for index, segment in enumerate(table):
            if (segment.topic, segment.partition) != AT:
                continue
            entries = log._partitions[AT].entries[segment.first : segment.next]
            records = [e for e in entries if e is not None]
            chain = chain_before(table, index, before)
            proofs += [make_proof(stored.data, table, index, chain, records, r.offset) for r in records]
        before = head
    return Past(log, store, tuple(proofs))


def test_c86_every_position_of_a_chain_of_1000_is_proven(past: Past) -> None:
    assert len(past.proofs) == 1_000
    for i, proof in enumerate(past.proofs):
        proven = check_proof(write_proof(proof), TRUSTED)
        entry = past.log._partitions[AT].entries[proven.offset]
        assert entry is not None
        assert proven.record is not None
        assert (proven.record.value, proven.record.headers) == (entry.value, entry.headers)
        assert proven.head.epoch == i // 200 + 1


def forged_hex(digest: str, chance: random.Random) -> str:
    data = bytearray.fromhex(digest)
    data[chance.randrange(32)] ^= 1 << chance.randrange(8)
    return data.hex()


def test_c86_a_proof_with_anything_forged_in_its_middle_is_refused(past: Past) -> None:
    chance = random.Random(3)
    for proof in past.proofs[::7]:
        forged: list[Proof] = []
        for field in ("leaves", "path"):
            some: tuple[str, ...] = getattr(proof, field)
            for i in {0, len(some) // 2, len(some) - 1} if some else ():
                changed = (*some[:i], forged_hex(some[i], chance), *some[i + 1 :])
                forged.append(msgspec.structs.replace(proof, **{field: changed}))
            forged.append(msgspec.structs.replace(proof, **{field: some[:-1]}))
            forged.append(msgspec.structs.replace(proof, **{field: (*some, "00" * 32)}))
        for field in ("first", "next", "first_ms", "last_ms", "index", "tree_index", "offset", "partition"):
            forged.append(msgspec.structs.replace(proof, **{field: getattr(proof, field) + 1}))
        forged.append(msgspec.structs.replace(proof, chain_before=forged_hex(proof.chain_before, chance)))
        forged.append(msgspec.structs.replace(proof, topic="rewards"))
        forged.append(msgspec.structs.replace(proof, leaf=forged_hex(proof.leaf, chance)))
        assert proof.record is not None
        forged.append(msgspec.structs.replace(proof, record=proof.record[:-1] + b"!"))
        for wrong in forged:
            if wrong == proof:
                continue
            with pytest.raises(AuditError):
                check_proof(write_proof(wrong), TRUSTED)


def test_c86_a_record_of_another_offset_or_its_leaf_alone_proves_nothing(past: Past) -> None:
    one, other = past.proofs[500], past.proofs[501]
    with pytest.raises(ProofInvalid, match="not the one that the leaf"):
        check_proof(write_proof(msgspec.structs.replace(one, record=other.record)), TRUSTED)
    moved = msgspec.structs.replace(other, offset=one.offset)
    with pytest.raises(ProofInvalid, match="was sealed at"):
        check_proof(write_proof(moved), TRUSTED)


def test_a_proof_without_its_record_proves_the_leaf(past: Past) -> None:
    bare = msgspec.structs.replace(past.proofs[42], record=None)
    proven = check_proof(write_proof(bare), TRUSTED)
    entry = past.log._partitions[AT].entries[proven.offset]
    assert entry is not None
    assert proven.record is None
    assert proven.leaf == leaf_of(encode_record(entry))


def test_c86_a_proof_without_its_record_proves_no_other_offset(past: Past) -> None:
    """Where a segment has no holes, the place of a leaf says its offset."""
    first = next(i for i, p in enumerate(past.proofs) if p.next - p.first == len(p.leaves))
    bare = msgspec.structs.replace(past.proofs[first], record=None)
    assert check_proof(write_proof(bare), TRUSTED).offset == bare.offset
    for offset in range(bare.first - 1, bare.next + 1):
        if offset == bare.offset:
            continue
        with pytest.raises(ProofInvalid, match="does not hold the offset"):
            check_proof(write_proof(msgspec.structs.replace(bare, offset=offset)), TRUSTED)


def test_the_head_in_a_proof_is_checked(past: Past) -> None:
    proof = past.proofs[10]
    with pytest.raises(KeyUnknown):
        check_proof(write_proof(proof), trusted_keys(STRANGER.public))
    head = msgspec.structs.replace(read_unverified(proof.head.encode()), root="00" * 32)
    by_stranger = msgspec.structs.replace(proof, head=sign(head, STRANGER).decode())
    with pytest.raises(SignatureInvalid):
        check_proof(write_proof(by_stranger), TRUSTED)
    by_us = msgspec.structs.replace(proof, head=sign(head, SIGNER).decode())
    with pytest.raises(ProofInvalid, match="does not lead to the root"):
        check_proof(write_proof(by_us), TRUSTED)


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b'{"format":1}', b"\xff" * 50])
def test_what_is_no_proof_is_refused(data: bytes) -> None:
    with pytest.raises(ProofInvalid):
        check_proof(data, TRUSTED)


def test_a_proof_is_found_by_position_alone(past: Past, monkeypatch: pytest.MonkeyPatch) -> None:
    def proof_at(offset: int, *, topic: str = "rollouts", with_record: bool = True) -> Proof:
        return prove(
            past.log,
            past.store,
            name="run",
            at=TopicPartition(topic, 0),
            offset=offset,
            trusted=TRUSTED,
            with_record=with_record,
        )

    for proof in past.proofs[::97]:
        assert proof_at(proof.offset) == proof
    assert proof_at(past.proofs[0].offset, with_record=False).record is None
    control = past.proofs[199].offset + 1
    with pytest.raises(ProofInvalid, match="no record stands"):
        proof_at(control)
    with pytest.raises(ProofInvalid, match="is not sealed"):
        proof_at(5_000)
    with pytest.raises(ProofInvalid, match="is not sealed"):
        proof_at(0, topic="groups")
    entries = past.log._partitions[AT].entries
    assert entries[3] is not None
    forged = entries[3]._replace(value=b"forged")
    monkeypatch.setattr(past.log._partitions[AT], "entries", [*entries[:3], forged, *entries[4:]])
    with pytest.raises(ProofInvalid, match="is not what was sealed"):
        proof_at(3)


# -- trees ---------------------------------------------------------------------------------------------------------------


def rfc_root(leaves: list[bytes]) -> bytes:
    """RFC 6962, section 2.1, as it is written."""
    if len(leaves) == 1:
        return leaves[0]
    split = 1
    while split * 2 < len(leaves):
        split *= 2
    return tree_node(rfc_root(leaves[:split]), rfc_root(leaves[split:]))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8, 9, 31, 33, 64, 100])
def test_trees_have_the_shape_of_rfc_6962(size: int) -> None:
    digests = [(bytes([i]) * 32, bytes([255 - i]) * 32) for i in range(size)]
    leaves = [tree_leaf(*pair) for pair in digests]
    root = root_of(leaves)
    assert root == rfc_root(leaves)
    for i, pair in enumerate(digests):
        path = path_of(leaves, i)
        assert root_from(*pair, i, size, path) == root
        for wrong in range(size):
            # At another index the same path leads elsewhere, or is none.
            if wrong != i:
                assert root_from(*pair, wrong, size, path) != root


def test_a_node_is_not_taken_for_a_leaf() -> None:
    leaves = [tree_leaf(bytes([i]) * 32, bytes(32)) for i in range(4)]
    above = [tree_node(leaves[0], leaves[1]), tree_node(leaves[2], leaves[3])]
    assert root_of(leaves) == tree_node(*above)
    # As a tree of two, whose "segments" were the concatenated children, it would lead to the same root with one prefix for
    # both.
    assert root_from(leaves[0], leaves[1], 0, 2, [above[1]]) != root_of(leaves)


@pytest.mark.parametrize("size", [None, 0, 1, 255, 256, 65_535, 65_536, 70_000, 3_000_000])
def test_a_leaf_is_the_same_however_it_is_hashed(size: int | None) -> None:
    value = None if size is None else random.Random(size).randbytes(size)
    record = Record("t", 0, 123_456, 1_767_225_600_000, b"key", value, (("a", b"b"), ("c", None)))
    assert leaf_of_fields(*record[2:5], record.headers, record.value) == leaf_of(encode_record(record))
    assert leaf_of(memoryview(encode_record(record))) == leaf_of(encode_record(record))


def test_no_two_records_are_encoded_alike() -> None:
    records = [
        Record("t", 0, 1, 2, key, value, headers)
        for key in (None, b"", b"a")
        for value in (None, b"", b"a")
        for headers in ((), (("a", None),), (("a", b""),), (("", b"a"),), (("a", b"a"), ("a", b"a")))
    ]
    assert len({encode_record(record) for record in records}) == len(records)
