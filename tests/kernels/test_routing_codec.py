"""Expert ids to packed bytes and back: every width, order kept, nothing invented, damage refused (C22)."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from rollwire.kernels.routing import codec
from rollwire.kernels.routing.codec import check_distinct, decode_routes, encode_routes
from rollwire.schemas.errors import ConfigError, Refused
from rollwire.schemas.routes import decode_ids, id_bits, packed_bytes

WIDTHS = [1, 2, 3, 7, 8, 15, 16, 31, 63, 127, 255, 256, 384, 511, 1023, 4095, 32_767, 32_768, 65_535]


def routes(
    rows: int, layers: int, top_k: int, experts: int, *, missing: float = 0.0, seed: int = 0
) -> NDArray[Any]:
    """Distinct experts in each row of each layer, some rows not recorded."""
    rng = np.random.default_rng(seed)
    first = rng.integers(0, experts, (rows, layers, 1))
    ids = (first + np.arange(top_k) * int(rng.integers(1, max(experts // top_k, 2)))) % experts
    ids[rng.random((rows, layers)) < missing] = -1
    return ids


def test_golden_bytes() -> None:
    ids = np.array([[[0, 383, 256], [7, 1, 255]], [[-1, -1, -1], [300, 2, 9]]])
    packed = encode_routes(ids, 384)
    # Low bytes of all ids, then the ninth bits, first id lowest: 384 = not recorded.
    assert packed.encoding == "bits"
    assert packed.data.hex() == "007f000701ff8080802c0209" + "c603"
    assert encode_routes(np.array([[[1, 0], [2, 7]], [[-1, -1], [5, 6]]]), 8).data.hex() == "01728865"
    assert encode_routes(np.array([[[0], [1], [-1], [0]]]), 2).data.hex() == "24"


@pytest.mark.parametrize("experts", WIDTHS)
@pytest.mark.parametrize("rows", [1, 5, 701])
def test_every_width_comes_back(experts: int, rows: int) -> None:
    top_k = min(experts, 3)
    ids = routes(rows, 7, top_k, experts, missing=0.1)
    packed = encode_routes(ids, experts)
    assert id_bits(experts) == int(np.ceil(np.log2(experts + 1)))
    assert packed.encoding == "bits+zstd" or len(packed.data) == packed_bytes(ids.size, id_bits(experts))
    back = decode_routes(packed.encoding, packed.data, ids.shape, experts)
    assert back.dtype == (np.int16 if experts <= 32_767 else np.int32)
    assert (back == ids).all()
    check_distinct(back, experts)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(WIDTHS),
    st.integers(0, 12),
    st.integers(1, 4),
    st.integers(1, 8),
    st.integers(0, 2**32),
    st.sampled_from(["u1", "i1", "i2", "i4", "i8", "u2"]),
)
def test_compiled_and_plain_agree(
    experts: int, rows: int, layers: int, top_k: int, seed: int, dtype: str
) -> None:
    top_k = min(top_k, experts)
    ids = routes(rows, layers, top_k, experts, missing=0.2 if dtype[0] == "i" else 0.0, seed=seed)
    if experts - 1 > np.iinfo(dtype).max:
        dtype = "i4"
    ids = ids.astype(dtype)
    plain = encode_routes(ids, experts, zstd=False)
    small = codec.SMALL
    codec.SMALL = -1  # type: ignore[misc]
    try:
        assert encode_routes(ids, experts, zstd=False) == plain
        back = decode_routes("bits", plain.data, ids.shape, experts)
    finally:
        codec.SMALL = small  # type: ignore[misc]
    assert (back == ids).all()
    assert (decode_ids("bits", plain.data, ids.size, experts).reshape(ids.shape) == back).all()


def test_zstd_is_taken_where_it_pays_and_only_there() -> None:
    scattered = np.random.default_rng(0).integers(0, 384, (2048, 12, 8))
    assert encode_routes(scattered, 384).encoding == "bits"
    repeated = np.tile(scattered[:8], (256, 1, 1))
    packed = encode_routes(repeated, 384)
    assert packed.encoding == "bits+zstd"
    assert len(packed.data) < 0.1 * packed_bytes(repeated.size, 9)
    assert (decode_routes(packed.encoding, packed.data, repeated.shape, 384) == repeated).all()
    assert encode_routes(repeated, 384, zstd=False).encoding == "bits"


def test_a_narrow_signed_dtype_may_hold_128_experts_and_a_hole() -> None:
    for rows in (1, 4000):
        ids = np.tile(np.array([[[127, 0, 64], [-1, -1, -1]]], np.int8), (rows, 1, 1))
        packed = encode_routes(ids, 128)
        assert (decode_routes(packed.encoding, packed.data, ids.shape, 128) == ids).all()
        check_distinct(ids, 128)


@pytest.mark.parametrize("bad", [384, 385, -2, 511, 70_000])
@pytest.mark.parametrize("rows", [2, 2000])
def test_c22_an_id_that_is_no_expert_is_never_written(bad: int, rows: int) -> None:
    ids = routes(rows, 2, 8, 384)
    ids[-1, -1, 3] = bad
    with pytest.raises(ConfigError, match="384 experts"):
        encode_routes(ids, 384)
    with pytest.raises(ConfigError):
        encode_routes(ids, 65_536)


@pytest.mark.parametrize("rows", [2, 2000])
def test_damage_is_refused(rows: int) -> None:
    ids = routes(rows, 3, 3, 384)
    shape: tuple[int, int, int] = (rows, 3, 3)
    data = encode_routes(ids, 384, zstd=False).data
    frame = zstandard.compress(data)
    bad: list[tuple[str, bytes]] = [
        ("bits", data[:-1]),
        ("bits", data + b"\0"),
        ("bits", b""),
        ("bits", data[: ids.size] + b"\xff" * (len(data) - ids.size)),  # ids of 384 + and spare bits
        ("bits+zstd", data),
        ("bits+zstd", frame[:-1]),
        ("bits+zstd", frame[:9]),
        ("bits+zstd", b""),
        ("bits+zstd", frame + frame),
        ("bits+zstd", zstandard.compress(data + b"\0")),
        ("bits+zstd", zstandard.ZstdCompressor(write_content_size=False).compress(data)),
        ("u1", data),
        ("base64", data),
    ]
    for encoding, damaged in bad:
        with pytest.raises(Refused):
            decode_routes(encoding, damaged, shape, 384)
    assert (decode_routes("bits+zstd", frame, shape, 384) == ids).all()


def test_spare_bits_are_refused_by_both_decoders() -> None:
    for rows in (3, 3001):
        ids = routes(rows, 1, 1, 5)
        data = bytearray(encode_routes(ids, 5, zstd=False).data)
        data[-1] |= 0x80
        with pytest.raises(Refused, match="beyond the last"):
            decode_routes("bits", bytes(data), (rows, 1, 1), 5)
    ids = routes(8193, 1, 1, 5)
    data = bytearray(encode_routes(ids, 5, zstd=False).data)
    data[-1] |= 0x80
    with pytest.raises(Refused, match="beyond the last"):
        decode_routes("bits", bytes(data), (8193, 1, 1), 5)


def test_a_size_that_is_claimed_is_checked_before_anything_is_allocated() -> None:
    with pytest.raises(Refused, match="at most"):
        decode_routes("bits+zstd", zstandard.compress(b"\0"), (1 << 40, 60, 8), 384)
    with pytest.raises(Refused, match="shape"):
        decode_routes("bits", b"", (-1, 60, 8), 384)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200), st.sampled_from(["u1", "bits", "bits+zstd"]), st.integers(1, 12))
def test_whatever_the_bytes_there_are_ids_or_a_refusal(data: bytes, encoding: str, rows: int) -> None:
    try:
        ids = decode_routes(encoding, data, (rows, 2, 2), 8)
    except Refused:
        return
    assert ((ids >= -1) & (ids < 8)).all()


@pytest.mark.parametrize("row", [[0, 0, 1], [1, -1, 2], [-1, -1, 0]])
def test_experts_that_stand_twice_and_rows_in_part_are_found(row: list[int]) -> None:
    with pytest.raises(Refused):
        check_distinct(np.array([[row]]), 384)
    good = np.array([[[383, 0, 5], [-1, -1, -1]]], np.int16)
    check_distinct(good, 384)
    many = np.tile(good, (3000, 1, 1))
    check_distinct(many, 384)
    many[1234, 1] = row
    with pytest.raises(Refused, match="1 rows"):
        check_distinct(many, 384)


def test_c81_threads_pack_side_by_side() -> None:
    inputs = [np.tile(routes(64, 6, 8, 384, seed=seed), (40, 1, 1)) for seed in range(4)]
    wanted = [encode_routes(ids, 384) for ids in inputs]
    got: list[Any] = [None] * 4

    def work(index: int) -> None:
        for _ in range(5):
            got[index] = encode_routes(inputs[index], 384)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert got == wanted
