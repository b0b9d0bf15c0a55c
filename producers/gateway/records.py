"""From a draft to the record of the log: its comment sealed, its event encoded."""

from __future__ import annotations

import hmac
from hashlib import sha256
from typing import Final, NamedTuple

import msgspec

from rollwire.kernels.seal import NONCE_BYTES, place_of, seal
from rollwire.producers.emit import outgoing
from rollwire.producers.gateway.access import FeedbackKey
from rollwire.producers.gateway.encode import SOURCE
from rollwire.producers.gateway.judge import Context, Draft
from rollwire.schemas.records import Feedback, Seal
from rollwire.schemas.validate_feedback import REFUSED_HEADER
from rollwire.streams.seams.keys import DataKey
from rollwire.streams.seams.log import Outgoing

CONFLICT: Final = (REFUSED_HEADER, b"conflicting_repeat")
"""Header of a record whose caller was told 409: attribution makes a dead letter of it, whatever rollout it names."""


class Entry(msgspec.Struct, frozen=True, gc=False):
    """One event on its way to the log."""

    key: FeedbackKey
    digest: bytes
    id_source: str
    record: Outgoing


class Sealed(NamedTuple):
    ciphertext: bytes
    seal: Seal


def seal_comment(draft: Draft, key: DataKey) -> Sealed:
    """The draft's comment under its person's key.

    The nonce follows from key, id and text (a synthetic one, as in RFC 8452's idea): an event that is sent again is the
    same record again, and one nonce never meets two texts.
    """
    text = (draft.comment or "").encode()
    nonce = hmac.digest(key.key, f"{draft.feedback_id}/nonce\0".encode() + text, sha256)[:NONCE_BYTES]
    sealed = seal(key.key, text, nonce=nonce, aad=place_of(draft.feedback_id, "comment"))
    return Sealed(
        sealed.ciphertext, Seal(subject=draft.subject, key=key.generation, nonce=nonce, tag=sealed.tag)
    )


def feedback_of(draft: Draft, context: Context, now_us: int, sealed: Sealed | None) -> Feedback:
    return Feedback(
        feedback_id=draft.feedback_id,
        id_source=draft.id_source,  # type: ignore[arg-type]
        tenant=context.tenant,
        group_id=draft.group_id,
        rollout_id=draft.rollout_id,
        signal=draft.signal,
        value=draft.value,
        label=draft.label,
        happened_us=draft.happened_us,
        received_us=now_us,
        subject=draft.subject,
        comment=None if sealed is None else sealed.ciphertext,
        seal=None if sealed is None else sealed.seal,
        dialect=context.dialect,
        key_id=context.key_id,
    )


def sealed_entry(draft: Draft, context: Context, now_us: int, key: DataKey) -> Entry:
    """Of an event with a comment; `key` is its person's."""
    feedback = feedback_of(draft, context, now_us, seal_comment(draft, key))
    record = outgoing(feedback, source=SOURCE, time_us=now_us)
    return Entry((context.tenant, draft.feedback_id), draft.digest, draft.id_source, record)
