"""The sealing of one field."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwire.kernels.seal import open_sealed, place_of, seal
from rollwire.schemas.errors import SealInvalid

KEY, NONCE, PLACE = bytes(range(32)), bytes(range(12)), b"r.0/token_ids"


@given(st.binary(max_size=2_000))
def test_what_was_sealed_opens_and_is_as_long(plaintext: bytes) -> None:
    made = seal(KEY, plaintext, nonce=NONCE, aad=PLACE)
    assert len(made.ciphertext) == len(plaintext)
    assert open_sealed(KEY, made.ciphertext, nonce=NONCE, tag=made.tag, aad=PLACE) == plaintext


def test_nist_vector_of_aes_256_gcm() -> None:
    """Test case 16 of McGrew and Viega, "The Galois/Counter Mode of Operation", appendix B."""
    key = bytes.fromhex("feffe9928665731c6d6a8f9467308308" * 2)
    nonce = bytes.fromhex("cafebabefacedbaddecaf888")
    plaintext = bytes.fromhex(
        "d9313225f88406e5a55909c5aff5269a86a7a9531534f7da2e4c303d8a318a721c3c0c95956809532fcf0e2449a6b525b16aedf5aa0de657ba637b39"
    )
    aad = bytes.fromhex("feedfacedeadbeeffeedfacedeadbeefabaddad2")
    made = seal(key, plaintext, nonce=nonce, aad=aad)
    assert made.ciphertext.hex() == (
        "522dc1f099567d07f47f37a32a84427d643a8cdcbfe5c0c97598a2bd2555d1aa8cb08e48590dbb3da7b08b1056828838c5f61e6393ba7a0abcc9f662"
    )
    assert made.tag.hex() == "76fc6ece0f4e1768cddf8853bb2d551b"


@pytest.mark.parametrize("what", ["key", "nonce", "tag", "aad", "first", "last", "short", "short nonce"])
def test_whatever_is_changed_does_not_open(what: str) -> None:
    made = seal(KEY, b"a person's words", nonce=NONCE, aad=PLACE)
    key, nonce, tag, aad, ciphertext = KEY, NONCE, made.tag, PLACE, bytearray(made.ciphertext)
    if what == "key":
        key = os.urandom(32)
    elif what == "nonce":
        nonce = bytes(12)
    elif what == "short nonce":
        nonce = b""
    elif what == "tag":
        tag = bytes(16)
    elif what == "aad":
        aad = place_of("r.1", "token_ids")
    elif what == "short":
        ciphertext.pop()
    else:
        ciphertext[0 if what == "first" else -1] ^= 1
    with pytest.raises(SealInvalid):
        open_sealed(key, bytes(ciphertext), nonce=nonce, tag=tag, aad=aad)


def test_keys_and_nonces_of_other_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        seal(bytes(16), b"x", nonce=NONCE, aad=b"")
    with pytest.raises(ValueError, match="nonce 12"):
        seal(KEY, b"x", nonce=bytes(11), aad=b"")
