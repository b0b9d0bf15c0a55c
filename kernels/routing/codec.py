"""Expert ids to the wire forms `bits` and `bits+zstd` and back (`schemas.routes` has the layout and the plain decoder).

Packing costs about a copy of the ids, so it is always done; zstd costs ten times that and finds something only where
rows repeat or few experts are used, so each trace decides: a sample is compressed, and only where that pays the whole.

Legend: C ids in C order of [R rows, L layers, K experts a token].
"""

from __future__ import annotations

import math
import threading
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import zstandard
from numpy.typing import NDArray

from rollwire.kernels.routing import bits as loops
from rollwire.schemas.errors import ConfigError, Refused
from rollwire.schemas.routes import (
    MAX_EXPERTS,
    NOT_RECORDED,
    Ids,
    check_codes,
    decode_ids,
    id_bits,
    id_dtype,
    pack,
    packed_bytes,
    planes_of,
)

SMALL: Final = 8_192
"""Ids up to which numpy is used: the compiled loops are slower to call than to run, and cost a process their loading."""
BLOCK: Final = 1 << 17
"""Ids packed at a time, a multiple of 8: they stay in the cache over the passes."""
SCRATCH: Final = 4 << 20  # bytes a thread keeps to pack into
SAMPLE: Final = 16_384  # bytes of each of the two stretches that are tried
WORTH: Final = 0.9  # zstd must leave at most this of what it is given
ZSTD_MIN: Final = 512  # bytes below which a frame's own header eats the gain
MAX_BYTES: Final = 1 << 30  # of the packed form of one trace, decoded from a claim check

_LOCAL = threading.local()


class Packed(NamedTuple):
    encoding: Literal["u1", "bits", "bits+zstd"]
    data: bytes


def encode_routes(ids_RLK: Ids, num_experts: int, *, zstd: bool = True) -> Packed:
    """The order of the K experts is kept; a (row, layer) of `NOT_RECORDED` throughout is kept as such.

    `ids_RLK` of any integer dtype. Raises `ConfigError` for an id that is no expert: nothing is clamped (C22). Does not
    look for experts that stand twice or rows recorded in part: the check of the event does, before it is written.
    """
    if not 1 <= num_experts <= MAX_EXPERTS:
        raise ConfigError(f"{num_experts} experts; a trace holds up to {MAX_EXPERTS}")
    ids_C = np.ascontiguousarray(ids_RLK).reshape(-1)
    bits = id_bits(num_experts)
    if ids_C.size <= SMALL:
        low, high = int(ids_C.min(initial=0)), int(ids_C.max(initial=0))
        _check_bounds(low, high, num_experts)
        # A narrow signed dtype has no room for the sentinel.
        data = pack(np.where(ids_C < 0, num_experts, ids_C.astype(np.int32)) if low < 0 else ids_C, bits)
    else:
        data = _pack(ids_C, num_experts, bits)
    if zstd and len(data) >= ZSTD_MIN:
        frame = _compressed(data)
        if frame is not None:
            return Packed("bits+zstd", frame)
    return Packed("bits", data)


def decode_routes(encoding: str, data: bytes, shape: tuple[int, int, int], num_experts: int) -> Ids:
    """Ids [R, L, K] in the narrowest signed dtype, `NOT_RECORDED` where they were not.

    Sizes are checked before anything is allocated. Raises `Refused` for damage of any kind: another size than the
    shape demands, a broken frame, an id that is no expert, spare bits that are set. Experts that stand twice are the
    business of `check_distinct`.
    """
    count = math.prod(shape)
    if min(shape) < 0 or not 1 <= num_experts <= MAX_EXPERTS:
        raise Refused("routing_invalid", f"routes of shape {shape} of {num_experts} experts")
    bits = id_bits(num_experts)
    size = packed_bytes(count, bits)
    if size > MAX_BYTES:
        raise Refused("too_large", f"{size} bytes of routes; {MAX_BYTES} at most")
    if encoding not in ("bits", "bits+zstd") or count <= SMALL:
        if encoding not in ("u1", "bits", "bits+zstd"):
            raise Refused("routing_invalid", f"encoding {encoding[:20]!r} is not known")
        return decode_ids(encoding, data, count, num_experts).reshape(shape)
    return _unpack(planes_of(encoding, data, size), count, num_experts, bits).reshape(shape)


def check_distinct(ids_RLK: Ids, num_experts: int) -> None:
    """Raises `Refused` where an expert stands twice in a row of a layer, or a row is recorded in part (C22).

    The event's own check did this for data inside it; this is for data behind a claim check.
    """
    codes_NK = ids_RLK.reshape(-1, ids_RLK.shape[-1])
    if codes_NK.size > SMALL:
        if faulty := int(loops.faulty_rows(codes_NK.shape[1])(np.ascontiguousarray(codes_NK).reshape(-1))):
            raise Refused("routing_invalid", f"{faulty} rows hold an expert twice or are recorded in part")
        return
    check_codes(np.where(codes_NK < 0, num_experts, codes_NK.astype(np.int32)), num_experts)


def _check_bounds(low: int, high: int, num_experts: int) -> None:
    if low < NOT_RECORDED or high >= num_experts:
        raise ConfigError(f"expert ids from {low} to {high}; there are {num_experts} experts")


def _pack(ids_C: Ids, num_experts: int, bits: int) -> bytes:
    planes, rest = divmod(bits, 8)
    count = ids_C.size
    out = _scratch(packed_bytes(count, bits))
    high_P = out[planes * count :]
    for start in range(0, count, BLOCK):
        end = min(start + BLOCK, count)
        block_C = ids_C[start:end]
        low, high = loops.bounds(block_C)
        _check_bounds(int(low), int(high), num_experts)
        for plane in range(planes):
            loops.pack_bytes(
                block_C, num_experts, 8 * plane, out[plane * count + start : plane * count + end]
            )
        if rest:
            loops.pack_high(rest)(block_C, num_experts, 8 * planes, high_P[start // 8 * rest :])
    whole = count // 8 * 8
    if rest and whole < count:
        tail_C = ids_C[whole:].astype(np.int32)
        codes_C = np.where(tail_C < 0, num_experts, tail_C) >> (8 * planes)
        high_P[whole // 8 * rest :] = np.frombuffer(pack(codes_C, rest), np.uint8)
    return out.tobytes()


def _scratch(size: int) -> NDArray[np.uint8]:
    """[size] to write into before it becomes bytes; one a thread, since fresh memory costs more than the packing."""
    if size > SCRATCH:
        return np.empty(size, np.uint8)
    held: NDArray[np.uint8] | None = getattr(_LOCAL, "scratch", None)
    if held is None:
        held = _LOCAL.scratch = np.empty(SCRATCH, np.uint8)
    return held[:size]


def _unpack(data: bytes, count: int, num_experts: int, bits: int) -> Ids:
    planes, rest = divmod(bits, 8)
    flat = np.frombuffer(data, np.uint8)
    high_P = flat[planes * count :]
    ids_C: NDArray[Any] = np.empty(count, id_dtype(num_experts))
    largest = 0
    for start in range(0, count, BLOCK):
        end = min(start + BLOCK, count)
        block_C = ids_C[start:end]
        if planes:
            loops.unpack_bytes(flat[start:end], block_C)
        else:
            block_C.fill(0)
        if planes == 2:
            loops.add_bytes(flat[count + start : count + end], block_C)
        if rest:
            loops.add_high(rest)(high_P[start // 8 * rest :], 8 * planes, block_C)
            if end % 8:
                _add_tail(high_P[end // 8 * rest :], rest, 8 * planes, ids_C[end // 8 * 8 :])
        largest = max(largest, int(loops.mark_missing(block_C, num_experts)))
    if largest > num_experts:
        raise Refused("routing_invalid", f"an expert id of {num_experts} or more")
    return ids_C


def _add_tail(high_P: NDArray[np.uint8], rest: int, shift: int, tail_C: NDArray[Any]) -> None:
    """The highest bits of the last few ids, which fill no group."""
    each_N = np.unpackbits(high_P, bitorder="little")
    used = tail_C.size * rest
    if each_N[used:].any():
        raise Refused("routing_invalid", "bits beyond the last expert id are set")
    powers = 1 << np.arange(rest, dtype=np.int32)
    tail_C |= (each_N[:used].reshape(-1, rest) @ powers << shift).astype(tail_C.dtype)


def _compressed(data: bytes) -> bytes | None:
    """A zstd frame, or None where it does not pay."""
    compressor: zstandard.ZstdCompressor | None = getattr(_LOCAL, "compressor", None)
    if compressor is None:  # one a thread: a compressor is not for two at once
        compressor = _LOCAL.compressor = zstandard.ZstdCompressor(level=1)
    if len(data) > 4 * SAMPLE:
        middle = len(data) // 2
        sample = data[:SAMPLE] + data[middle : middle + SAMPLE]
        if len(compressor.compress(sample)) > WORTH * len(sample):
            return None
    frame = compressor.compress(data)
    return frame if len(frame) <= WORTH * len(data) else None
