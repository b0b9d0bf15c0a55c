"""The digests of the archive, each with a prefix of its own, so that none can be taken for another. Pure.

    leaf      blake3(00 | record)                    a record, as `encode_record` writes it
    segment   blake3(01 | header | leaves)           the records of a segment, and where they stand
    chain     blake3(02 | chain before | segment)    a partition's segments up to this one
    start     blake3(05 | topic, partition, begin)   the chain before the first segment
    tree      blake3(03 | segment | chain) and blake3(04 | left | right)   see `tree`

All are 32 bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec
from blake3 import blake3

from rollwire.streams.seams.log import Record

DIGEST_BYTES: Final = 32

_LARGE: Final = 1 << 16
"""Bytes from which on MessagePack writes a 32-bit length."""
_encoder: Final = msgspec.msgpack.Encoder()
encode_fields: Final[Callable[[tuple[object, ...]], bytes]] = _encoder.encode
"""MessagePack of (offset, timestamp_ms, key, headers, value): for loops in which a call more counts."""


def encode_record(record: Record) -> bytes:
    """MessagePack of [offset, timestamp_ms, key, [[name, value], ...], value]: the one form in which a record is sealed and
    archived. Topic and partition stand in the segment's header."""
    return encode_fields((record.offset, record.timestamp_ms, record.key, record.headers, record.value))


def leaf_of_fields(
    offset: int,
    timestamp_ms: int,
    key: bytes | None,
    headers: tuple[tuple[str, bytes | None], ...],
    value: bytes | None,
) -> bytes:
    """`leaf_of` of `encode_record` of these, without a copy of a large value."""
    if value is None or len(value) < _LARGE:
        return blake3(b"\x00" + encode_fields((offset, timestamp_ms, key, headers, value))).digest()
    # The value comes last, behind its length: all before it is written with an empty one (c4 00) and that taken off.
    before = encode_fields((offset, timestamp_ms, key, headers, b""))[:-2]
    length = b"\xc6" + len(value).to_bytes(4, "big")
    hashed = blake3(b"\x00" + before + length)
    hashed.update(value)
    return hashed.digest()


def leaf_of(encoded: bytes | memoryview) -> bytes:
    """Of a record as `encode_record` gives it."""
    return blake3(b"\x00" + encoded).digest()


def segment_digest(
    topic: str,
    partition: int,
    first: int,
    next: int,
    records: int,
    first_ms: int,
    last_ms: int,
    leaves: bytes,
) -> bytes:
    """`leaves`: the leaves of the segment's records, end to end."""
    header = encode_fields((topic, partition, first, next, records, first_ms, last_ms))
    return blake3(b"\x01" + header + leaves).digest()


def chain_of(before: bytes, digest: bytes) -> bytes:
    """A chain that goes on by a segment with this digest."""
    return blake3(b"\x02" + before + digest).digest()


def chain_start(topic: str, partition: int, begin: int) -> bytes:
    """The chain of a partition before its first segment, whose first offset is `begin`."""
    return blake3(b"\x05" + encode_fields((topic, partition, begin))).digest()


def tree_leaf(digest: bytes, chain: bytes) -> bytes:
    return blake3(b"\x03" + digest + chain).digest()


def tree_node(left: bytes, right: bytes) -> bytes:
    return blake3(b"\x04" + left + right).digest()


def empty_root() -> bytes:
    """The root of a tree without leaves."""
    return blake3(b"").digest()
