"""The bytes of a delta shard, version 1. All numbers are little-endian.

    offset  size
    0       4     magic "RWDL"
    4       1     format version: 1
    5       1     coder: 1 = gap
    6       2     zero
    8       4     index of this shard
    12      4     number of shards of the delta, 1 or more
    16      32    base digest: `StateDigest` of the state that the delta applies to
    48      32    result digest: `StateDigest` of the state that it gives
    80      8     T: bytes of the table as packed
    88      8     U: bytes of the table unpacked
    96      16    checksum: the first 16 bytes of blake3 over everything else in the shard
    112     T     table: one zstd frame around MessagePack of `Table`
    112+T         blocks: one zstd frame each, end to end, sizes from the table

A **piece** is a run of at most `PIECE_ELEMENTS` elements of one tensor; pieces without a change are left out. A **block**
holds consecutive pieces, packed together so that small tensors share their statistics. Gap coder, the content of a
block of pieces p (each with `changed` elements, of which `wide` have a wide gap, and lanes of `lane` bytes):

    gaps      for each p: `changed` bytes. Unchanged elements before this one, counted from the previous changed
              one (from the piece's start for the first); 255 = 255 and more, see wide
    wide      for each p: `wide` u4: the gap minus 255, for each 255 in gaps
    planes    for k = 0..7, for each p with lane > k: `changed` bytes, byte k of each value

A value is zigzag(new - old) modulo 2^(8 lane) and never 0; `old` and `new` are the elements' bits, for floating-point
dtypes as sign-ordered integers, so that neighbours differ by 1 ULP across 0 as well: bits with the sign bit set are
inverted, others get their sign bit set. Every step is a bijection on bit patterns, so -0.0 and NaN payloads are exact.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

import msgspec
from blake3 import blake3

from rollwire.kernels.delta import frames
from rollwire.kernels.tensors import LANE_BYTES
from rollwire.schemas.errors import DeltaCorrupt

MAGIC: Final = b"RWDL"
FORMAT_VERSION: Final = 1
CODER_GAP: Final = 1
PIECE_ELEMENTS: Final = 1 << 20
MAX_TABLE_BYTES: Final = 256 << 20
FLOATS: Final = frozenset({"F8_E4M3", "F8_E5M2", "F16", "BF16", "F32", "F64"})  # sign, exponent, mantissa

_PRELUDE = struct.Struct("<4sBBHII32s32sQQ16s")
PRELUDE_BYTES: Final = _PRELUDE.size
_CHECKSUM_AT: Final = PRELUDE_BYTES - 16


class Piece(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int  # flat element index in its tensor
    count: int  # elements covered
    changed: int
    wide: int

    @property
    def lane(self) -> int:
        return LANE_BYTES[self.dtype]

    @property
    def raw_bytes(self) -> int:
        return self.changed * (1 + self.lane) + 4 * self.wide


class Block(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    pieces: tuple[Piece, ...]
    packed: int  # bytes of its frame

    @property
    def raw_bytes(self) -> int:
        return sum(piece.raw_bytes for piece in self.pieces)


class Table(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    blocks: tuple[Block, ...]


class Shard(NamedTuple):
    """A shard whose checksum held and whose table is sound in itself; it may still not fit the state at hand."""

    number: int
    shards: int
    base: str  # hex
    result: str  # hex
    blocks: tuple[Block, ...]
    frames: tuple[memoryview, ...]  # one per block


_table_decoder = msgspec.msgpack.Decoder(Table, strict=True)


def write_shard(index: int, shards: int, base: str, result: str, blocks: list[tuple[Block, bytes]]) -> bytes:
    table = msgspec.msgpack.encode(Table(tuple(block for block, _ in blocks)))
    packed = frames.pack(table)
    prelude = _PRELUDE.pack(
        MAGIC,
        FORMAT_VERSION,
        CODER_GAP,
        0,
        index,
        shards,
        bytes.fromhex(base),
        bytes.fromhex(result),
        len(packed),
        len(table),
        bytes(16),
    )
    body = b"".join([packed, *(frame for _, frame in blocks)])
    return prelude[:_CHECKSUM_AT] + _checksum(prelude[:_CHECKSUM_AT], body) + body


def read_shard(data: bytes) -> Shard:
    """Raises `DeltaCorrupt` for anything that is not a whole, undamaged shard of a version known here."""
    if len(data) < PRELUDE_BYTES:
        raise DeltaCorrupt(f"a delta shard of {len(data)} bytes is shorter than its header ({PRELUDE_BYTES})")
    magic, version, coder, zero, index, shards, base, result, packed, raw, checksum = _PRELUDE.unpack_from(
        data
    )
    if magic != MAGIC or zero:
        raise DeltaCorrupt("not a delta shard: wrong magic")
    if version != FORMAT_VERSION:
        raise DeltaCorrupt(f"delta format version {version}; this release reads {FORMAT_VERSION}")
    if coder != CODER_GAP:
        raise DeltaCorrupt(f"delta coder {coder}; this release reads {CODER_GAP} (gap)")
    view = memoryview(data)
    if checksum != _checksum(view[:_CHECKSUM_AT], view[PRELUDE_BYTES:]):
        raise DeltaCorrupt("a delta shard is damaged: its checksum does not hold")
    if not index < shards or raw > MAX_TABLE_BYTES or packed > len(data) - PRELUDE_BYTES:
        raise DeltaCorrupt(f"impossible header: shard {index} of {shards}, table of {packed} ({raw}) bytes")
    start = PRELUDE_BYTES + packed
    try:
        table = _table_decoder.decode(frames.unpack(view[PRELUDE_BYTES:start], raw))
    except msgspec.MsgspecError as error:
        raise DeltaCorrupt(f"the table of a delta shard does not decode: {error}") from error
    cut: list[memoryview] = []
    for block in table.blocks:
        if block.packed < 0 or start + block.packed > len(data):
            raise DeltaCorrupt("a block of a delta shard ends beyond the shard")
        cut.append(view[start : start + block.packed])
        start += block.packed
    if start != len(data):
        raise DeltaCorrupt(f"{len(data) - start} bytes after the last block of a delta shard")
    return Shard(index, shards, base.hex(), result.hex(), table.blocks, tuple(cut))


def _checksum(head: bytes | memoryview, body: bytes | memoryview) -> bytes:
    hasher = blake3(head)
    hasher.update(body)
    return hasher.digest(length=16)
