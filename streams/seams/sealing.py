"""Sealing and opening a field of an event: the person's data key from the key store, the arithmetic from `kernels.seal`.

    ciphertext, seal = seal_field(keys, pseudonym, rollout_id, "token_ids", plaintext)
    plaintext = open_field(keys, seal, rollout_id, "token_ids", ciphertext)

Places in use: `<rollout_id>/token_ids` (a production rollout's tokens, u4) and `<feedback_id>/comment` (UTF-8).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable

from rollwire.kernels.seal import NONCE_BYTES, open_sealed, place_of, seal
from rollwire.schemas.records import Seal
from rollwire.streams.seams.keys import KeyStore

OpenKeys = Callable[[], KeyStore]
"""Opens a key store when the first seal asks for it; goes to another process as it is where ranks have processes."""


def seal_field(
    keys: KeyStore, subject: str, event_id: str, field: str, plaintext: bytes
) -> tuple[bytes, Seal]:
    """The ciphertext, which is as long, and what opens it. Raises `StoreUnavailable`."""
    data_key = keys.data_key(subject)
    # Random nonces of 96 bits: safe for 2^32 seals under one key (SP 800-38D, 8.3); a person makes fewer.
    nonce = secrets.token_bytes(NONCE_BYTES)
    made = seal(data_key.key, plaintext, nonce=nonce, aad=place_of(event_id, field))
    return made.ciphertext, Seal(subject=subject, key=data_key.generation, nonce=nonce, tag=made.tag)


def open_field(keys: KeyStore, seal: Seal, event_id: str, field: str, ciphertext: bytes) -> bytes:
    """Raises `Erased`, `KeyMissing`, `SealInvalid`, `StoreUnavailable`."""
    key = keys.key_of(seal.subject, seal.key)
    return open_sealed(key, ciphertext, nonce=seal.nonce, tag=seal.tag, aad=place_of(event_id, field))
