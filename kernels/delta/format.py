"""The bytes of a delta shard, version 2. All numbers are little-endian.

    offset  size
    0       4     magic "RWDL"
    4       1     format version: 2
    5       1     coder that was asked for: 1 = gap, 2 = context; each chunk says which it has
    6       2     zero
    8       4     index of this shard
    12      4     number of shards of the delta, 1 or more
    16      32    base digest: `StateDigest` of the state that the delta applies to
    48      32    result digest: `StateDigest` of the state that it gives
    80      4     elements of a chunk: `CHUNK_ELEMENTS`
    84      4     limit: bytes of the largest payload
    88      8     limit: changed elements of this shard
    96      8     limit: bytes of all payloads
    104     8     T: bytes of the table as packed
    112     8     U: bytes of the table unpacked
    120     16    checksum: the first 16 bytes of blake3 over everything before it, and the packed table
    136     T     table: one zstd frame around MessagePack of `Table`
    136+T         payloads, end to end, in the table's order

Head = everything before the payloads: enough to know which byte ranges a slice needs. A chunk covers the fixed elements
[k C, (k + 1) C) of its tensor; chunks without a change are left out, each chunk is in one shard only. A payload is decoded by itself, from the
chunk before the delta (see `gap`, `context`). Each chunk carries the first 8 bytes of its payload's blake3, and its
incremental sum *after* the delta: a slice replica takes these sums for the chunks that it does not hold, and so knows
the whole result's digest without its bytes.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

import msgspec
from blake3 import blake3

from rollwire.kernels.delta import frames
from rollwire.kernels.tensors import CHUNK_ELEMENTS, LANE_BYTES, chunk_count
from rollwire.schemas.errors import DeltaCorrupt

MAGIC: Final = b"RWDL"
FORMAT_VERSION: Final = 2
CODER_GAP: Final = 1
CODER_CONTEXT: Final = 2
CODERS: Final = {"gap": CODER_GAP, "context": CODER_CONTEXT}
MAX_TABLE_BYTES: Final = 256 << 20
FLOATS: Final = frozenset({"F8_E4M3", "F8_E5M2", "F16", "BF16", "F32", "F64"})  # sign, exponent, mantissa

_PRELUDE = struct.Struct("<4sBBHII32s32sIIQQQQ16s")
PRELUDE_BYTES: Final = _PRELUDE.size
_CHECKSUM_AT: Final = PRELUDE_BYTES - 16
_MAX_ELEMENTS: Final = 1 << 62
_RATIO: Final = 1000  # a table unpacks to this many times its packed size, at most


class Row(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """One tensor's changed chunks; the lists run side by side."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[int, ...]  # their numbers, ascending
    coders: bytes  # one byte each
    changed: tuple[int, ...]  # elements
    sizes: tuple[int, ...]  # bytes of the payloads
    checksums: bytes  # 8 each
    sums: bytes  # 16 each: the chunk's incremental sum after the delta


class Table(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    rows: tuple[Row, ...]


class Chunk(NamedTuple):
    """One changed chunk, as a row holds it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunk: int
    coder: int
    changed: int
    total: int  # its incremental sum after the delta
    payload: bytes


class Head(NamedTuple):
    """The head of a shard, whose checksum held and whose table is sound in itself; it may still not fit the state at hand."""

    shard: int
    shards: int
    coder: int
    base: str  # hex
    result: str  # hex
    changed: int
    head_bytes: int
    size: int  # of the whole shard
    rows: tuple[Row, ...]


_decoder = msgspec.msgpack.Decoder(Table, strict=True)
_encoder = msgspec.msgpack.Encoder()


def payload_checksum(payload: bytes | memoryview) -> bytes:
    return blake3(payload).digest(length=8)


def write_shard(
    index: int, shards: int, coder: int, base: str, result: str, chunks: list[Chunk]
) -> tuple[bytes, int]:
    """The shard, and the bytes of its head. `chunks`: in order of name and number."""
    rows: list[Row] = []
    at = 0
    while at < len(chunks):
        first = chunks[at]
        end = at
        while end < len(chunks) and chunks[end].name == first.name:
            end += 1
        mine = chunks[at:end]
        rows.append(
            Row(
                first.name,
                first.dtype,
                first.shape,
                tuple(c.chunk for c in mine),
                bytes(c.coder for c in mine),
                tuple(c.changed for c in mine),
                tuple(len(c.payload) for c in mine),
                b"".join(payload_checksum(c.payload) for c in mine),
                b"".join(c.total.to_bytes(16, "little") for c in mine),
            )
        )
        at = end
    table = _encoder.encode(Table(tuple(rows)))
    packed = frames.pack(table)
    prelude = _PRELUDE.pack(
        MAGIC,
        FORMAT_VERSION,
        coder,
        0,
        index,
        shards,
        bytes.fromhex(base),
        bytes.fromhex(result),
        CHUNK_ELEMENTS,
        max(len(c.payload) for c in chunks),
        sum(c.changed for c in chunks),
        sum(len(c.payload) for c in chunks),
        len(packed),
        len(table),
        bytes(16),
    )[:_CHECKSUM_AT]
    head = prelude + _checksum(prelude, packed) + packed
    return b"".join([head, *(c.payload for c in chunks)]), len(head)


def read_head(prefix: bytes | memoryview) -> Head:
    """The head of a shard from its first bytes: as many as the head has, or more.

    Raises `DeltaCorrupt` for anything that is not a whole, undamaged head of a version known here.
    """
    if len(prefix) < PRELUDE_BYTES:
        raise DeltaCorrupt(
            f"a delta shard of {len(prefix)} bytes is shorter than its header ({PRELUDE_BYTES})"
        )
    (
        magic,
        version,
        coder,
        zero,
        index,
        shards,
        base,
        result,
        elements,
        largest,
        changed,
        payloads,
        packed,
        raw,
        checksum,
    ) = _PRELUDE.unpack_from(prefix)
    if magic != MAGIC or zero:
        raise DeltaCorrupt("not a delta shard: wrong magic")
    if version != FORMAT_VERSION:
        hint = "upgrade this software" if version > FORMAT_VERSION else "publish an anchor again"
        raise DeltaCorrupt(f"delta format version {version}; this release reads {FORMAT_VERSION}: {hint}")
    if coder not in CODERS.values():
        raise DeltaCorrupt(f"delta coder {coder}; this release reads {CODERS}: upgrade this software")
    view = memoryview(prefix)
    end = PRELUDE_BYTES + packed
    if raw > min(MAX_TABLE_BYTES, _RATIO * packed) or not index < shards or elements != CHUNK_ELEMENTS:
        raise DeltaCorrupt(
            f"impossible header: shard {index} of {shards}, chunks of {elements}, table of {packed} ({raw}) bytes"
        )
    if end > len(prefix):
        raise DeltaCorrupt(f"a delta shard is cut: {len(prefix)} bytes of a head of {end}")
    if checksum != _checksum(view[:_CHECKSUM_AT], view[PRELUDE_BYTES:end]):
        raise DeltaCorrupt("the head of a delta shard is damaged: its checksum does not hold")
    try:
        table = _decoder.decode(frames.unpack(view[PRELUDE_BYTES:end], raw))
    except msgspec.MsgspecError as error:
        raise DeltaCorrupt(f"the table of a delta shard does not decode: {error}") from error
    found_changed = found_payloads = found_largest = 0
    names: set[str] = set()
    for row in table.rows:
        _check_row(row)
        if row.name in names:
            raise DeltaCorrupt(f"{row.name}: twice in the table of a shard")
        names.add(row.name)
        found_changed += sum(row.changed)
        found_payloads += sum(row.sizes)
        found_largest = max(found_largest, *row.sizes)
    if (found_changed, found_payloads, found_largest) != (changed, payloads, largest):
        raise DeltaCorrupt("the table of a delta shard is not within the limits of its header")
    return Head(index, shards, coder, base.hex(), result.hex(), changed, end, end + payloads, table.rows)


def _check_row(row: Row) -> None:
    """The table's numbers, against one another: whatever is allocated for a row is bounded by its shape."""
    count = len(row.chunks)
    elements = 1
    for n in row.shape:
        elements *= n
        if not 0 <= elements <= _MAX_ELEMENTS:
            raise DeltaCorrupt(f"{row.name}: an impossible shape {row.shape[:8]}")
    lane = LANE_BYTES.get(row.dtype, 8)  # an unknown dtype is named when it meets the state
    sound = (
        count > 0
        and len(row.shape) <= 255
        and len(row.coders) == len(row.changed) == len(row.sizes) == count
        and len(row.checksums) == 8 * count
        and len(row.sums) == 16 * count
        and all(a < b for a, b in zip(row.chunks, row.chunks[1:], strict=False))
        and row.chunks[0] >= 0
        and row.chunks[-1] < chunk_count(elements)
    )
    if not sound:
        raise DeltaCorrupt(f"{row.name}: an impossible row in the table of a shard")
    for chunk, changed, size in zip(row.chunks, row.changed, row.sizes, strict=True):
        covered = min(CHUNK_ELEMENTS, elements - chunk * CHUNK_ELEMENTS)
        # A change takes a bit of payload at least, and no coder more than 40 bytes and the element for one.
        if not (0 < changed <= covered and changed <= 8 * size and size <= 64 + changed * (40 + lane)):
            raise DeltaCorrupt(
                f"{row.name}: chunk {chunk} of {covered} elements with {changed} changes in {size} bytes"
            )


def _checksum(head: bytes | memoryview, table: bytes | memoryview) -> bytes:
    hasher = blake3(head)
    hasher.update(table)
    return hasher.digest(length=16)
