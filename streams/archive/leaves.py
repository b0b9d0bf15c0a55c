"""The digests of the archive, each with a prefix of its own, so that none can be taken for another. Pure.

    leaf      blake3(00 | record)                    a record, as `encode_record` writes it
    content   blake3(06 | records)                   the records of a segment, end to end
    leaves    blake3(07 | leaves)                    the leaves of a segment, end to end
    segment   blake3(01 | header | content | leaves) both, and where the records stand
    chain     blake3(02 | chain before | segment)    a partition's segments up to this one
    start     blake3(05 | topic, partition, begin)   the chain before the first segment
    tree      blake3(03 | segment | chain) and blake3(04 | left | right)   see `tree`

All are 32 bytes. Content and leaves say the same of the same records: the one is hashed at the speed of memory, which is
what verifying takes; the other lets one record be proven without showing its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

import msgspec
from blake3 import blake3

from rollwire.streams.seams.log import Record

DIGEST_BYTES: Final = 32

_LARGE: Final = 1 << 16
"""Bytes from which on MessagePack writes a 32-bit length."""
_AT_ONCE: Final = 64 * 1024  # bytes that are hashed together
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


class Content:
    """The digest of records end to end, as they come."""

    def __init__(self) -> None:
        self._hash = blake3(b"\x06")
        self._buffer = (
            bytearray()
        )  # what is not hashed yet: many small records at once take a fraction of the time
        self.records = 0

    def take(self, records: Iterable[Record]) -> None:
        buffer, encode = self._buffer, _encoder.encode_into
        count = 0
        for _, _, offset, timestamp_ms, key, value, headers in records:
            if value is None or len(value) < _LARGE:
                encode((offset, timestamp_ms, key, headers, value), buffer, -1)
            else:
                encode((offset, timestamp_ms, key, headers, b""), buffer, -1)
                self._take_large(value)
            count += 1
        self.records += count
        if len(buffer) >= _AT_ONCE:
            self._flush()

    def take_encoded(self, body: bytes | memoryview) -> None:
        """One record as `encode_record` writes it."""
        self._buffer += body
        self.records += 1
        if len(self._buffer) >= _AT_ONCE:
            self._flush()

    def digest(self) -> bytes:
        self._flush()
        return self._hash.digest()

    def _take_large(self, value: bytes) -> None:
        """Puts `value` in the place of the empty one that was written last, without a copy of it."""
        self._buffer[-2:] = b"\xc6" + len(value).to_bytes(4, "big")
        self._flush()
        self._hash.update(value)

    def _flush(self) -> None:
        if self._buffer:
            self._hash.update(self._buffer)
            self._buffer.clear()


def leaves_digest(leaves: Iterable[bytes]) -> bytes:
    return blake3(b"\x07" + b"".join(leaves)).digest()


def segment_digest(
    topic: str,
    partition: int,
    first: int,
    next: int,
    records: int,
    first_ms: int,
    last_ms: int,
    content: bytes,
    leaves: bytes,
) -> bytes:
    """`content`: of `Content`; `leaves`: of `leaves_digest`."""
    header = encode_fields((topic, partition, first, next, records, first_ms, last_ms))
    return blake3(b"\x01" + header + content + leaves).digest()


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
