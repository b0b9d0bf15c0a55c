"""What of a run is sealed: heads, tables and marks, as the store has them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import Final, NamedTuple

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from rollwire.schemas.errors import ArchiveCorrupt, DeltaCorrupt
from rollwire.schemas.records import Claim
from rollwire.streams.archive.chain import Segment
from rollwire.streams.archive.heads import Head, head_digest, read_head, read_unverified
from rollwire.streams.archive.layout import epoch_of, head_key, heads_folder
from rollwire.streams.archive.marks import Marks, unpack_marks
from rollwire.streams.seams.log import TopicPartition
from rollwire.streams.seams.store import ObjectStore

Trusted = Mapping[str, Ed25519PublicKey]
"""Public keys by their ids."""

MAX_TABLE_BYTES: Final = 1 << 30
_AT_ONCE: Final = 8  # objects fetched at a time
_segments: Final = msgspec.msgpack.Decoder(tuple[Segment, ...])


class StoredHead(NamedTuple):
    """The object of a head, whatever is in it."""

    epoch: int  # of its key
    key: str
    data: bytes

    @property
    def digest(self) -> str:
        return head_digest(self.data)


class Sealed(NamedTuple):
    """Everything that is sealed: the newest head and all segments, in their order. `head` is None where nothing is."""

    head: Head | None
    segments: Mapping[TopicPartition, tuple[Segment, ...]]


NOTHING: Final = Sealed(None, MappingProxyType({}))


def epochs_of(store: ObjectStore, name: str) -> list[int]:
    """Of which there are heads, ascending."""
    found = (epoch_of(name, info.key) for info in store.list(heads_folder(name)))
    return sorted(epoch for epoch in found if epoch is not None)


def heads_of(store: ObjectStore, name: str, *, after: int = 0) -> Iterator[StoredHead]:
    """The heads of epochs behind `after`, ascending; none of them is looked into."""

    def fetched(epoch: int) -> StoredHead:
        key = head_key(name, epoch)
        return StoredHead(epoch, key, store.get(key))

    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="heads") as pool:
        yield from pool.map(fetched, [e for e in epochs_of(store, name) if e > after])


def newest_head(store: ObjectStore, name: str) -> StoredHead | None:
    epochs = epochs_of(store, name)
    if not epochs:
        return None
    key = head_key(name, epochs[-1])
    return StoredHead(epochs[-1], key, store.get(key))


def opened(stored: StoredHead, trusted: Trusted | None) -> Head:
    """`trusted=None`: believed as it is. Raises `HeadInvalid`, `KeyUnknown`, `SignatureInvalid`."""
    return read_unverified(stored.data) if trusted is None else read_head(stored.data, trusted)


def pack_table(segments: Sequence[Segment]) -> bytes:
    return msgspec.msgpack.encode(segments)


def claim_of(key: str, data: bytes, sha256: str) -> Claim:
    return Claim(key=key, size=len(data), sha256=sha256)


def sha256_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def unpack_table(data: bytes, where: str) -> tuple[Segment, ...]:
    """Raises `ArchiveCorrupt`."""
    try:
        return _segments.decode(data)
    except msgspec.DecodeError as error:
        raise ArchiveCorrupt(f"{where}: the table of segments does not read: {error}", where) from error


def segments_of(store: ObjectStore, head: Head) -> tuple[Segment, ...]:
    """The segments that `head`'s epoch sealed, by topic, partition and first offset. Raises `ObjectMissing`,
    `ArchiveCorrupt`."""
    return unpack_table(_claimed(store, head.table), head.table.key)


def marks_of(store: ObjectStore, head: Head) -> dict[TopicPartition, Marks]:
    """Of the records that `head`'s epoch sealed. Raises `ObjectMissing`, `ArchiveCorrupt`."""
    return unpack_marks(_claimed(store, head.marks), head.marks.key)


def check_marks(store: ObjectStore, head: Head) -> None:
    """Raises `ObjectMissing` or `ArchiveCorrupt` where they are not those that `head` names."""
    _claimed(store, head.marks)


def _claimed(store: ObjectStore, claim: Claim) -> bytes:
    if claim.size > MAX_TABLE_BYTES:
        raise ArchiveCorrupt(f"{claim.key}: {claim.size:,} bytes are no table", claim.key)
    try:
        return store.get(claim.key, sha256=claim.sha256)
    except DeltaCorrupt as error:
        raise ArchiveCorrupt(
            f"{claim.key}: it is not the object that its head names: {error}", claim.key
        ) from error


def sealed(
    store: ObjectStore, name: str, *, trusted: Trusted | None = None, known: Sealed = NOTHING
) -> Sealed:
    """All that is sealed by now; epochs that `known` has are not read again. `trusted=None`: heads are believed.

    It is for who works with sealed segments; whether all of it holds is `verify`'s to find out. Raises `HeadInvalid`,
    `KeyUnknown`, `SignatureInvalid`, `ArchiveCorrupt`, `ObjectMissing` at the first thing that is wrong.
    """
    newest, segments = known.head, {at: list(those) for at, those in known.segments.items()}
    heads = [opened(stored, trusted) for stored in heads_of(store, name, after=newest.epoch if newest else 0)]
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="tables") as pool:
        for head, table in zip(heads, pool.map(lambda h: segments_of(store, h), heads), strict=True):
            for segment in table:
                segments.setdefault(TopicPartition(segment.topic, segment.partition), []).append(segment)
            newest = head
    return Sealed(newest, MappingProxyType({at: tuple(those) for at, those in segments.items()}))
