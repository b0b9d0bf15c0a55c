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
chunk before the delta (see `gap`, `context`). Each chunk carries a checksum of its payload, and its
incremental sum *after* the delta: a slice replica takes these sums for the chunks that it does not hold, and so knows
the whole result's digest without its bytes.

A payload's checksum is the sum modulo 2^64 of mix_lo(i, w) (see `digest`) over its 64-bit words w, number i, the last filled up with
zeros: any damage within a word shows for certain, since mix_lo maps words one to one.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from itertools import pairwise
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from rollwire.kernels.delta import frames
from rollwire.kernels.digest import jit, lanes, mix_lo
from rollwire.kernels.tensors import CHUNK_ELEMENTS, LANE_BYTES
from rollwire.schemas.errors import DeltaCorrupt, FormatUnknown

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


class Table(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """The changed chunks, in columns: by tensor in order of name, and by number. K chunks, packed side by side."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    counts: tuple[int, ...]  # changed chunks of each tensor
    numbers: bytes  # K chunk numbers, K counts of changed elements, K payload sizes: u4, first all lowest bytes of each
    coders: bytes  # K
    checksums: bytes  # 8 K
    sums: bytes  # 16 K


class Columns(NamedTuple):
    """A table's chunks, checked: T tensors, K chunks."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    tensor_K: NDArray[np.int64]  # which tensor
    chunk_K: NDArray[np.int64]
    elements_K: NDArray[np.int64]  # that the chunk covers
    coder_K: NDArray[np.uint8]
    changed_K: NDArray[np.int64]
    size_K: NDArray[np.int64]  # of the payload, bytes
    offset_K: NDArray[np.int64]  # of the payload, from the end of the head
    checksum_K: NDArray[np.uint64]
    sums: bytes  # 16 each

    def total(self, k: int) -> int:
        """The incremental sum of chunk k after the delta."""
        return int.from_bytes(self.sums[16 * k : 16 * k + 16], "little")


class Chunk(NamedTuple):
    """One changed chunk, as a row holds it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunk: int
    coder: int
    changed: int
    total: int  # its incremental sum after the delta
    checksum: int  # of the payload
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
    columns: Columns


_decoder = msgspec.msgpack.Decoder(Table, strict=True)
_encoder = msgspec.msgpack.Encoder()


def _checksum_of(payload: NDArray[np.uint8]) -> np.uint64:
    total = np.uint64(0)
    whole = payload.size >> 3
    for i in range(whole):
        word = np.uint64(0)
        for k in range(8):
            word |= np.uint64(payload[8 * i + k]) << np.uint64(8 * k)
        total += mix_lo(np.uint64(i), word)
    if payload.size & 7:
        word = np.uint64(0)
        for k in range(payload.size & 7):
            word |= np.uint64(payload[8 * whole + k]) << np.uint64(8 * k)
        total += mix_lo(np.uint64(whole), word)
    return total


checksum_of: Callable[..., Any] = jit(f"uint64({lanes(1)})")(_checksum_of)  # of a contiguous array of bytes


def payload_checksum(payload: bytes | bytearray | memoryview) -> int:
    return int(checksum_of(np.frombuffer(payload, np.uint8)))


def write_shard(
    index: int, shards: int, coder: int, base: str, result: str, chunks: list[Chunk]
) -> tuple[bytes, int]:
    """The shard, and the bytes of its head. `chunks`: in order of name and number."""
    names, dtypes, shapes, number, coders, changed, totals, checksums, payloads = zip(*chunks, strict=True)
    firsts = [0, *(i + 1 for i, (a, b) in enumerate(pairwise(names)) if a != b)]
    sizes = [len(payload) for payload in payloads]
    numbers = np.array([number, changed, sizes], dtype="<u4")  # [3, K]
    columns = Table(
        tuple(names[i] for i in firsts),
        tuple(dtypes[i] for i in firsts),
        tuple(shapes[i] for i in firsts),
        tuple(end - first for first, end in pairwise([*firsts, len(chunks)])),
        numbers.view(np.uint8).reshape(3, -1, 4).transpose(0, 2, 1).tobytes(),
        bytes(coders),
        np.array(checksums, dtype="<u8").tobytes(),
        b"".join([total.to_bytes(16, "little") for total in totals]),
    )
    table = _encoder.encode(columns)
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
        max(sizes),
        sum(changed),
        sum(sizes),
        len(packed),
        len(table),
        bytes(16),
    )[:_CHECKSUM_AT]
    head = prelude + _checksum(prelude, packed) + packed
    return b"".join([head, *payloads]), len(head)


def read_head(prefix: bytes | memoryview, table_limit: int = MAX_TABLE_BYTES) -> Head:
    """The head of a shard from its first bytes: as many as the head has, or more.

    `table_limit`: what its table may unpack to (`StateDigest.table_limit`, where there is a state).

    Raises `DeltaCorrupt` for anything that is not a whole, undamaged head, `FormatUnknown` for another format or coder.
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
        raise FormatUnknown(f"delta format version {version}; this release reads {FORMAT_VERSION}: {hint}")
    if coder not in CODERS.values():
        raise FormatUnknown(f"delta coder {coder}; this release reads {CODERS}: upgrade this software")
    view = memoryview(prefix)
    end = PRELUDE_BYTES + packed
    if raw > min(MAX_TABLE_BYTES, _RATIO * packed) or not index < shards or elements != CHUNK_ELEMENTS:
        raise DeltaCorrupt(
            f"impossible header: shard {index} of {shards}, chunks of {elements}, table of {packed} ({raw}) bytes"
        )
    if raw > table_limit:
        raise DeltaCorrupt(
            f"a delta shard's table of {raw} bytes is larger than one of every chunk of the state at hand ({table_limit}): "
            "it is no delta of this model"
        )
    if end > len(prefix):
        raise DeltaCorrupt(f"a delta shard is cut: {len(prefix)} bytes of a head of {end}")
    if checksum != _checksum(view[:_CHECKSUM_AT], view[PRELUDE_BYTES:end]):
        raise DeltaCorrupt("the head of a delta shard is damaged: its checksum does not hold")
    try:
        table = _decoder.decode(frames.unpack(view[PRELUDE_BYTES:end], raw))
    except msgspec.MsgspecError as error:
        raise DeltaCorrupt(f"the table of a delta shard does not decode: {error}") from error
    columns = _columns(table)
    found = (int(columns.changed_K.sum()), int(columns.size_K.sum()), int(columns.size_K.max(initial=0)))
    if found != (changed, payloads, largest):
        raise DeltaCorrupt("the table of a delta shard is not within the limits of its header")
    return Head(index, shards, coder, base.hex(), result.hex(), changed, end, end + payloads, columns)


def _columns(table: Table) -> Columns:
    """The table's numbers, against one another: whatever is allocated for a chunk is bounded by its tensor's shape."""
    tensors, count = len(table.names), len(table.coders)
    elements: list[int] = []
    for name, shape in zip(table.names, table.shapes, strict=False):
        # Bounded before they are multiplied: the product of what fits in 255 numbers is no small one.
        covered = 1
        for n in shape:
            covered = covered * n if 0 <= n <= _MAX_ELEMENTS else -1
            if not 0 <= covered <= _MAX_ELEMENTS or len(shape) > 255:
                raise DeltaCorrupt(f"{name}: an impossible shape {shape[:8]}")
        elements.append(covered)
    sound = (
        count > 0
        and len(table.dtypes) == len(table.shapes) == len(table.counts) == tensors == len(set(table.names))
        and all(0 < n <= count for n in table.counts)
        and sum(table.counts) == count
        and (len(table.numbers), len(table.checksums), len(table.sums)) == (12 * count, 8 * count, 16 * count)
    )
    if not sound:
        raise DeltaCorrupt("the columns of a delta shard's table do not fit one another")
    planes = np.frombuffer(table.numbers, np.uint8).reshape(3, 4, count).transpose(2, 0, 1)
    chunk_K, changed_K, size_K = np.ascontiguousarray(planes).view("<u4")[:, :, 0].astype(np.int64).T.copy()
    tensor_K = np.repeat(np.arange(tensors), table.counts)
    whole_K = np.array(elements, np.int64)[tensor_K]
    elements_K = np.minimum(whole_K - chunk_K * CHUNK_ELEMENTS, CHUNK_ELEMENTS)
    # An unknown dtype is named when it meets the state.
    lane_K = np.array([LANE_BYTES.get(dtype, 8) for dtype in table.dtypes], np.int64)[tensor_K]
    # A change takes a bit of payload at least, and no coder more than 40 bytes and the element for one.
    unsound_K = (
        (changed_K < 1)
        | (changed_K > elements_K)
        | (changed_K > 8 * size_K)
        | (size_K > 64 + changed_K * (40 + lane_K))
    )
    unsound_K[1:] |= (tensor_K[1:] == tensor_K[:-1]) & (chunk_K[1:] <= chunk_K[:-1])
    if unsound_K.any():
        k = int(np.flatnonzero(unsound_K)[0])
        raise DeltaCorrupt(
            f"{table.names[tensor_K[k]]}: an impossible chunk {chunk_K[k]} of {elements_K[k]} elements "
            f"with {changed_K[k]} changes in {size_K[k]} bytes"
        )
    return Columns(
        table.names,
        table.dtypes,
        table.shapes,
        tensor_K,
        chunk_K,
        elements_K,
        np.frombuffer(table.coders, np.uint8),
        changed_K,
        size_K,
        np.cumsum(size_K) - size_K,
        np.frombuffer(table.checksums, "<u8"),
        table.sums,
    )


def _checksum(head: bytes | memoryview, table: bytes | memoryview) -> bytes:
    hasher = blake3(head)
    hasher.update(table)
    return hasher.digest(length=16)
