"""Sealing of one field of an event with a person's data key: AES-256-GCM (NIST SP 800-38D), in place.

The ciphertext is as long as the plaintext and stands where it stood; nonce and tag are kept beside it. The associated
data is the field's place, so that a ciphertext that was moved to another event or field does not open.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from rollwire.schemas.errors import SealInvalid

KEY_BYTES: Final = 32
NONCE_BYTES: Final = 12
TAG_BYTES: Final = 16


class Sealed(NamedTuple):
    ciphertext: bytes  # as long as the plaintext
    tag: bytes  # TAG_BYTES


def place_of(event_id: str, field: str) -> bytes:
    """The associated data of a field: `<event id>/<field>`."""
    return f"{event_id}/{field}".encode()


def seal(key: bytes, plaintext: bytes, *, nonce: bytes, aad: bytes) -> Sealed:
    """The plaintext under `key` (32 bytes). `nonce`: 12 random bytes, never used twice with one key.

    Raises `ValueError` for a key or nonce of another length.
    """
    _check(key, nonce)
    both = AESGCM(key).encrypt(nonce, plaintext, aad)
    return Sealed(both[:-TAG_BYTES], both[-TAG_BYTES:])


def open_sealed(key: bytes, ciphertext: bytes, *, nonce: bytes, tag: bytes, aad: bytes) -> bytes:
    """The plaintext. Raises `SealInvalid` where ciphertext, tag, key and place do not belong to one another."""
    if len(nonce) != NONCE_BYTES or len(tag) != TAG_BYTES:
        raise SealInvalid(
            f"a seal has a nonce of {NONCE_BYTES} bytes and a tag of {TAG_BYTES}, not {len(nonce)} and {len(tag)}"
        )
    _check(key, nonce)
    try:
        return AESGCM(key).decrypt(nonce, bytes(ciphertext) + tag, aad)
    except InvalidTag:
        raise SealInvalid(
            f"the ciphertext of {aad.decode(errors='replace')!r} is damaged, of another place or under another key"
        ) from None


def _check(key: bytes, nonce: bytes) -> None:
    if len(key) != KEY_BYTES or len(nonce) != NONCE_BYTES:
        raise ValueError(
            f"a data key has {KEY_BYTES} bytes and a nonce {NONCE_BYTES}, not {len(key)} and {len(nonce)}"
        )
