"""The wire forms of a routing trace's expert ids, and their decoder: numpy alone, hardened.

C ids in C order of [rows, L, K], the K experts of a row in the router's order of preference. `w` bits an id,
w = ceil(log2(num_experts + 1)): the value `num_experts` says that the experts of this row and layer were not recorded.

    u1          C bytes, one an id, every id recorded; up to 256 experts
    bits        with w = 8 b + r: b planes of C bytes, the lowest byte of every id first; then ceil(C r / 8) bytes, a
                string of the highest r bits of every id, first id in the lowest bits. Unused bits are 0
    bits+zstd   the same as one zstd frame that states its size

A plane of whole bytes copies at the speed of memory and gives zstd symbols that mean something, which a plain string of
9-bit ids does not; the size is the same.
"""

from __future__ import annotations

import threading
from functools import lru_cache
from typing import Any, Final

import numpy as np
import zstandard
from numpy.typing import NDArray

from rollwire.schemas.errors import Refused

ENCODINGS: Final = ("u1", "bits", "bits+zstd")
MAX_EXPERTS: Final = 65_535
NOT_RECORDED: Final = -1
"""In decoded arrays."""

_LOCAL = threading.local()

Ids = NDArray[np.integer[Any]]


def id_bits(num_experts: int) -> int:
    """w, the bits of one id: every expert and the sentinel `num_experts` fit (C22)."""
    return max(1, num_experts.bit_length())


def packed_bytes(count: int, bits: int) -> int:
    """Size of `count` ids of `bits` bits in the form `bits`."""
    return count * (bits // 8) + -(-count * (bits % 8) // 8)


def code_dtype(bits: int) -> type[np.uint8 | np.uint16]:
    """The narrowest dtype of codes: ids and the sentinel, as they stand on the wire."""
    return np.uint8 if bits <= 8 else np.uint16


def id_dtype(num_experts: int) -> type[np.int16 | np.int32]:
    """The narrowest signed dtype of decoded ids."""
    return np.int16 if num_experts <= 32_767 else np.int32


def unpack(data: bytes | memoryview, count: int, bits: int) -> Ids:
    """`count` codes from exactly `packed_bytes(count, bits)` bytes. Raises `Refused` for unused bits that are set."""
    planes, rest = divmod(bits, 8)
    flat = np.frombuffer(data, np.uint8)
    codes_C: Ids
    if rest == 0:
        codes_C = flat[:count].astype(code_dtype(bits))
    else:
        tail = flat[planes * count :]
        if rest == 4:  # up to 15 experts: two ids a byte
            halves = np.empty((tail.size, 2), np.uint8)
            np.bitwise_and(tail, 15, out=halves[:, 0])
            np.right_shift(tail, 4, out=halves[:, 1])
            high_C, spare = halves.reshape(-1)[:count], halves.reshape(-1)[count:]
        else:
            each_N = np.unpackbits(tail, bitorder="little")
            spare = each_N[count * rest :]
            high_C = np.packbits(each_N[: count * rest].reshape(count, rest), axis=1, bitorder="little")[:, 0]
        if spare.any():
            raise Refused("routing_invalid", "bits beyond the last expert id are set")
        if planes == 0:
            return high_C
        codes_C = flat[:count].astype(np.uint16)
        codes_C |= high_C.astype(np.uint16) << 8
        return codes_C
    if planes == 2:
        codes_C |= flat[count:].astype(np.uint16) << 8
    return codes_C


def pack(codes_C: Ids, bits: int) -> bytes:
    """The form `bits` of codes, each below 2 ** bits (not checked)."""
    planes, rest = divmod(bits, 8)
    parts = [(codes_C >> (8 * plane)).astype(np.uint8).tobytes() for plane in range(planes)]
    if rest:
        high_C = (codes_C >> (8 * planes)).astype(np.uint8)
        if rest == 4:
            padded = np.zeros(-(-high_C.size // 2) * 2, np.uint8)
            padded[: high_C.size] = high_C
            parts.append((padded[0::2] | padded[1::2] << 4).tobytes())
        else:
            each = np.unpackbits(high_C[:, None], axis=1, bitorder="little")[:, :rest]
            parts.append(np.packbits(each.reshape(-1), bitorder="little").tobytes())
    return b"".join(parts)


def planes_of(encoding: str, data: bytes, size: int) -> bytes:
    """The form `bits`, of exactly `size` bytes. Checks the size before it allocates; raises `Refused`."""
    if encoding == "bits+zstd":
        try:
            stated = zstandard.frame_content_size(data)
            if stated != size:
                raise Refused(
                    "array_length", f"a zstd frame of {stated} bytes, {size} bytes of routes are demanded"
                )
            decompressor: zstandard.ZstdDecompressor | None = getattr(_LOCAL, "decompressor", None)
            if decompressor is None:
                decompressor = _LOCAL.decompressor = zstandard.ZstdDecompressor()
            data = decompressor.decompress(data, max_output_size=size, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise Refused("routing_invalid", f"damaged zstd frame of routes: {error}") from error
    if len(data) != size:
        raise Refused("array_length", f"{len(data)} bytes of routes, {size} are demanded")
    return data


@lru_cache(maxsize=64)
def _whole_rows(num_experts: int, top_k: int) -> bytes | None:
    """Where one row of one layer fills one byte: all bytes that are a valid row."""
    bits = id_bits(num_experts)
    if bits * top_k != 8:
        return None
    valid = bytearray()
    for value in range(256):
        codes = [value >> (bits * place) & ((1 << bits) - 1) for place in range(top_k)]
        if set(codes) == {num_experts} or (max(codes) < num_experts and len(set(codes)) == top_k):
            valid.append(value)
    return bytes(valid)


def check_planes(data: bytes, count: int, num_experts: int, top_k: int) -> None:
    """Every row of every layer holds `top_k` different experts, or the sentinel throughout (C22). Raises `Refused`."""
    whole = _whole_rows(num_experts, top_k)
    if whole is not None:
        if data.translate(None, whole):
            raise Refused(
                "routing_invalid", f"a row of a layer is no {top_k} different of {num_experts} experts"
            )
        return
    check_codes(unpack(data, count, id_bits(num_experts)).reshape(-1, top_k), num_experts)


def check_codes(codes_NK: Ids, num_experts: int) -> None:
    """As `check_planes`, of decoded codes."""
    if int(codes_NK.max(initial=0)) > num_experts:
        raise Refused("routing_invalid", f"an expert id of {num_experts} or more")
    top_k = codes_NK.shape[1]
    if top_k == 1:
        return
    sorted_NK = np.sort(codes_NK, axis=1) if top_k > 2 else codes_NK
    same_NK = sorted_NK[:, 1:] == sorted_NK[:, :-1]
    if top_k == 2:
        mixed = ((codes_NK == num_experts).sum(axis=1) == 1).any()
    else:
        mixed = ((sorted_NK[:, -1] == num_experts) != (sorted_NK[:, 0] == num_experts)).any()
    if mixed:
        raise Refused("routing_invalid", "a row of a layer is recorded in part")
    if (same_NK & (sorted_NK[:, 1:] != num_experts)).any():
        raise Refused("routing_invalid", "an expert stands twice in one row of one layer")


def decode_ids(encoding: str, data: bytes, count: int, num_experts: int) -> Ids:
    """`count` expert ids in their order, `NOT_RECORDED` where they were not. Raises `Refused`; does not look for
    experts that stand twice."""
    bits = id_bits(num_experts)
    if encoding == "u1":
        codes_C: Ids = np.frombuffer(planes_of(encoding, data, count), np.uint8)
    else:
        codes_C = unpack(planes_of(encoding, data, packed_bytes(count, bits)), count, bits)
    if int(codes_C.max(initial=0)) > num_experts - (encoding == "u1"):
        raise Refused("routing_invalid", f"an expert id of {num_experts} or more")
    ids_C: Ids = codes_C.astype(id_dtype(num_experts))
    ids_C[codes_C == num_experts] = NOT_RECORDED
    return ids_C
