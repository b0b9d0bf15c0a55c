"""Signed heads: what an epoch sealed, in one small object, each naming the one before. Pure.

    {"head": {...}, "signature": "<hex>"}

The signature (ed25519, RFC 8032) is over `rollwire head\n` and the bytes of `head` as they stand there. There is one form
only: a head that is written in another way than `sign` writes it is refused.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Final, Protocol

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_pem_public_key,
)

from rollwire.schemas.errors import (
    ConfigError,
    HeadInvalid,
    KeyUnknown,
    SignatureInvalid,
)
from rollwire.schemas.records import Claim, OffsetRange
from rollwire.streams.seams.log import TopicPartition

FORMAT: Final = 1
MAX_HEAD_BYTES: Final = 16 * 1024 * 1024
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_DOMAIN: Final = b"rollwire head\n"


class PartitionHead(msgspec.Struct, frozen=True, kw_only=True):
    """A partition as far as it is sealed, since its first epoch."""

    topic: str
    partition: int
    begin: int  # the first offset that was ever sealed
    next: int  # behind the last
    records: int
    segments: int
    chain: str  # hex; over all its segments

    @property
    def at(self) -> TopicPartition:
        return TopicPartition(self.topic, self.partition)


class Expired(msgspec.Struct, frozen=True, kw_only=True):
    """Records [first, next) of a partition that a policy deleted, or that were gone before they could be sealed."""

    topic: str
    partition: int
    first: int
    next: int
    policy: str  # for people, "archive_ms of dead-letters: 30 d"
    at_us: int  # when it was seen


class Head(msgspec.Struct, frozen=True, kw_only=True):
    format: int
    name: str  # of the run
    epoch: int  # 1, 2, 3, ...
    previous: str  # SHA-256 (hex) of the object of the epoch before; "" for the first
    sealed_us: int
    root: str  # hex; of the epoch's tree
    size: int  # leaves of the tree: segments of the epoch
    table: Claim  # the epoch's segments
    marks: Claim  # the first bytes of the leaves of the epoch's records
    partitions: tuple[PartitionHead, ...]  # all that were ever sealed, by topic and partition
    expired: tuple[Expired, ...]  # new in this epoch
    archived: tuple[OffsetRange, ...]  # what the archive held when this was sealed, by topic and partition
    key_id: str  # of the key that signed it
    code_version: str

    def partition(self, at: TopicPartition) -> PartitionHead | None:
        return next((p for p in self.partitions if p.at == at), None)


class _Envelope(msgspec.Struct, frozen=True):
    head: msgspec.Raw
    signature: str


class Signer(Protocol):
    """A private key, here or in a key management service."""

    @property
    def key_id(self) -> str: ...

    def sign(self, message: bytes) -> bytes:
        """64 bytes."""
        ...

    @property
    def public(self) -> Ed25519PublicKey: ...


class LocalSigner:
    """A private key that this process holds, from its PEM file's content (PKCS #8). Raises `ConfigError`."""

    def __init__(self, pem: bytes) -> None:
        try:
            key = load_pem_private_key(pem, None)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"this is no private key in PEM: {error}") from error
        if not isinstance(key, Ed25519PrivateKey):
            raise ConfigError(
                "a signing key is an ed25519 key: make one with `openssl genpkey -algorithm ed25519`"
            )
        self._key = key

    @property
    def public(self) -> Ed25519PublicKey:
        return self._key.public_key()

    @property
    def key_id(self) -> str:
        return key_id_of(self.public)

    def sign(self, message: bytes) -> bytes:
        return self._key.sign(message)

    def public_pem(self) -> bytes:
        return self.public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def new_signing_key() -> bytes:
    """A new private key as PEM."""
    return Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def read_public_key(pem: bytes) -> Ed25519PublicKey:
    """Raises `ConfigError`."""
    try:
        key = load_pem_public_key(pem)
    except ValueError as error:
        raise ConfigError(f"this is no public key in PEM: {error}") from error
    if not isinstance(key, Ed25519PublicKey):
        raise ConfigError("heads are signed by ed25519 keys, this public key is of another kind")
    return key


def key_id_of(key: Ed25519PublicKey) -> str:
    """The first 16 hex digits of the SHA-256 of its 32 bytes."""
    return hashlib.sha256(key.public_bytes(Encoding.Raw, PublicFormat.Raw)).hexdigest()[:16]


def trusted_keys(*keys: Ed25519PublicKey) -> dict[str, Ed25519PublicKey]:
    return {key_id_of(key): key for key in keys}


def head_digest(data: bytes) -> str:
    """By which the next head names this one: SHA-256 of the whole object."""
    return hashlib.sha256(data).hexdigest()


def sign(head: Head, signer: Signer) -> bytes:
    """The object of a head."""
    raw = msgspec.json.encode(head, order="deterministic")
    return msgspec.json.encode(_Envelope(msgspec.Raw(raw), signer.sign(_DOMAIN + raw).hex()))


def read_head(data: bytes, trusted: Mapping[str, Ed25519PublicKey]) -> Head:
    """Raises `HeadInvalid`, `KeyUnknown` where no trusted key is the one it names, `SignatureInvalid`."""
    head, raw, signature = _opened(data)
    key = trusted.get(head.key_id)
    if key is None:
        raise KeyUnknown(f"signed by the key {head.key_id}, which is not trusted here")
    try:
        key.verify(signature, _DOMAIN + raw)
    except InvalidSignature as error:
        raise SignatureInvalid(f"the signature is not that of the key {head.key_id}") from error
    return head


def read_unverified(data: bytes) -> Head:
    """What stands there, whoever wrote it. Raises `HeadInvalid`."""
    return _opened(data)[0]


def _opened(data: bytes) -> tuple[Head, bytes, bytes]:
    if len(data) > MAX_HEAD_BYTES:
        raise HeadInvalid(f"{len(data):,} bytes are no head")
    try:
        envelope = msgspec.json.decode(data, type=_Envelope)
        raw = bytes(envelope.head)
        head = msgspec.json.decode(raw, type=Head)
        signature = bytes.fromhex(envelope.signature)
    except (msgspec.DecodeError, ValueError) as error:
        raise HeadInvalid(f"this does not read as a head: {error}") from error
    if head.format != FORMAT:
        raise HeadInvalid(f"format {head.format} is not known here: upgrade, and read it then")
    if not all(map(_DIGEST.fullmatch, (head.root, *(p.chain for p in head.partitions)))):
        raise HeadInvalid("one of its digests is none")
    again = msgspec.json.encode(head, order="deterministic")
    if again != raw or msgspec.json.encode(_Envelope(msgspec.Raw(raw), signature.hex())) != data:
        raise HeadInvalid("it is not written as heads are written")
    return head, raw, signature
