"""The master key as 32 bytes that this process holds: what a key management service stands in for elsewhere.

Two keys are derived from it (HKDF-SHA256, RFC 5869), so that one secret is kept: one wraps data keys (AES-256-GCM), the
other makes pseudonyms. A wrapped key is

    01 | 4 bytes: which master key | 12 bytes nonce | 32 bytes ciphertext | 16 bytes tag
"""

from __future__ import annotations

import secrets
from typing import Final

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from rollwire.kernels.seal import KEY_BYTES, NONCE_BYTES, TAG_BYTES, open_sealed, seal
from rollwire.schemas.errors import ConfigError, SealInvalid

MASTER_KEY_BYTES: Final = 32
_FORM: Final = b"\x01"
_NAME_BYTES: Final = 4
_WRAPPED_BYTES: Final = len(_FORM) + _NAME_BYTES + NONCE_BYTES + KEY_BYTES + TAG_BYTES


class LocalMasterKey:
    """Raises `ConfigError` for a secret of another length."""

    def __init__(self, secret: bytes) -> None:
        if len(secret) != MASTER_KEY_BYTES:
            raise ConfigError(f"a master key has {MASTER_KEY_BYTES} bytes, this has {len(secret)}")
        self._wrapping = _derived(secret, b"rollwire wraps data keys")
        self._pseudonyms = _derived(secret, b"rollwire makes pseudonyms")
        self._name = _derived(secret, b"rollwire names the master key")[:_NAME_BYTES]

    def wrap(self, key: bytes, context: bytes) -> bytes:
        nonce = secrets.token_bytes(NONCE_BYTES)
        made = seal(self._wrapping, key, nonce=nonce, aad=context)
        return _FORM + self._name + nonce + made.ciphertext + made.tag

    def unwrap(self, wrapped: bytes, context: bytes) -> bytes:
        if len(wrapped) != _WRAPPED_BYTES or not wrapped.startswith(_FORM):
            raise SealInvalid(f"{context.decode(errors='replace')!r} holds no wrapped data key")
        name, rest = wrapped[1 : 1 + _NAME_BYTES], wrapped[1 + _NAME_BYTES :]
        if name != self._name:
            raise ConfigError(
                f"{context.decode(errors='replace')!r} was wrapped under the master key {name.hex()}, this one is "
                f"{self._name.hex()}: name the right file by ROLLWIRE_MASTER_KEY_FILE"
            )
        nonce, ciphertext = rest[:NONCE_BYTES], rest[NONCE_BYTES:-TAG_BYTES]
        return open_sealed(self._wrapping, ciphertext, nonce=nonce, tag=rest[-TAG_BYTES:], aad=context)

    def pseudonym_secret(self) -> bytes:
        return self._pseudonyms


def new_master_key() -> bytes:
    return secrets.token_bytes(MASTER_KEY_BYTES)


def _derived(secret: bytes, purpose: bytes) -> bytes:
    return HKDF(algorithm=SHA256(), length=32, salt=None, info=purpose).derive(secret)
