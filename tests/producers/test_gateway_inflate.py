"""Compressed bodies: whole, or refused (C76, C79, C82)."""

from __future__ import annotations

import gzip
import struct
import tracemalloc

import pytest
import zstandard

from rollwire.producers.gateway.access import Refusal
from rollwire.producers.gateway.inflate import MAX_FRAMES, inflate

MOST = 1 << 20
ONE, TWO = b"A" * 1_000, b"B" * 1_000


def zstd(data: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(data)


PACKERS = {"gzip": gzip.compress, "zstd": zstd}


@pytest.mark.parametrize("encoding", PACKERS)
def test_c79_several_members_or_frames_are_one_body(encoding: str) -> None:
    pack = PACKERS[encoding]
    assert inflate(pack(ONE), encoding, MOST) == ONE
    assert inflate(pack(ONE) + pack(TWO), encoding, MOST) == ONE + TWO
    assert inflate(pack(b""), encoding, MOST) == b""


def test_c79_a_skippable_frame_says_nothing_and_a_frame_without_a_size_is_read() -> None:
    skippable = b"\x50\x2a\x4d\x18" + struct.pack("<I", 4) + b"abcd"
    assert inflate(zstd(ONE) + skippable + zstd(TWO), "zstd", MOST) == ONE + TWO
    stream = zstandard.ZstdCompressor().compressobj()
    assert inflate(stream.compress(ONE) + stream.flush(), "zstd", MOST) == ONE


@pytest.mark.parametrize("encoding", PACKERS)
@pytest.mark.parametrize("cut", [1, 3, 9])
def test_a_body_that_is_cut_or_followed_by_junk_is_refused(encoding: str, cut: int) -> None:
    packed = PACKERS[encoding](bytes(range(256)) * 8)
    for body in (packed[:-cut], packed + b"junk", b"junk"):
        refused = inflate(body, encoding, MOST)
        assert isinstance(refused, Refusal)
        assert (refused.status, refused.code) == (400, "encoding_invalid")


@pytest.mark.parametrize("encoding", PACKERS)
def test_c76_c82_a_bomb_is_refused_before_it_is_held(encoding: str) -> None:
    bomb = PACKERS[encoding](bytes(100 << 20))
    tracemalloc.start()
    refused = inflate(bomb, encoding, MOST)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert isinstance(refused, Refusal)
    assert (refused.status, refused.code) == (413, "too_large")
    assert peak < 24 << 20


def test_c76_a_window_that_is_too_large_is_refused_unread() -> None:
    parameters = zstandard.ZstdCompressionParameters(window_log=29)
    stream = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    refused = inflate(stream.compress(ONE) + stream.flush(), "zstd", MOST)
    assert isinstance(refused, Refusal)
    assert refused.status == 413


@pytest.mark.parametrize("encoding", PACKERS)
def test_a_body_of_many_empty_members_costs_no_more_than_a_few(encoding: str) -> None:
    refused = inflate(PACKERS[encoding](b"") * (MAX_FRAMES + 1), encoding, MOST)
    assert isinstance(refused, Refusal)
    assert refused.code == "encoding_invalid"


def test_an_encoding_that_is_not_known_is_named() -> None:
    refused = inflate(ONE, "br", MOST)
    assert isinstance(refused, Refusal)
    assert (refused.status, refused.code) == (415, "encoding_unknown")
    assert inflate(ONE, "identity", MOST) == ONE
