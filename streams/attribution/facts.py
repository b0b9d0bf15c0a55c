"""What attribution keeps of the log: a few fields of each record, never content; and their bytes in the table.

One entry a record, under a key that the record alone decides: writing an entry again changes nothing, so whoever writes it,
however often and however late (a worker that lost its partition), nothing is overwritten that was learnt since.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Final, NamedTuple

import msgspec

from rollwire.schemas.records import Feedback, ProductionRollout


class Said(NamedTuple):
    """One feedback event that was not refused at sight."""

    offset: int  # in `user-feedback`
    at_us: int  # the record's time: the broker's clock
    feedback_id: str
    tenant: str
    signal: str
    value: float | None  # None = a text
    happened_us: int
    content: bytes  # 8: two events of one id with other content differ


class Answered(NamedTuple):
    """One rollout of live traffic."""

    offset: int  # in `production-rollouts`
    at_us: int
    outcome: str
    tenant: str
    version: int  # the newest that sampled it


class Closed(NamedTuple):
    """What stays of a rollout whose reward was given, until its horizon."""

    end_us: int  # what came from then on is late
    seen: int  # the next offset of `user-feedback` when it closed: what stands before that is settled
    tenant: str
    outcome: str
    version: int
    scored: bool
    signals: tuple[tuple[str, int, float], ...]  # (signal, events, sum of values): for the tables
    ids: tuple[tuple[bytes, bytes], ...]  # (8 of the id's digest, content) of what was taken


Entry = Said | Answered | Closed

_DIGEST_BYTES: Final = 8
_encode: Final = msgspec.msgpack.Encoder().encode
_decoders: Final[dict[bytes, Callable[[bytes], Entry]]] = {
    b"S": msgspec.msgpack.Decoder(Said).decode,
    b"A": msgspec.msgpack.Decoder(Answered).decode,
    b"C": msgspec.msgpack.Decoder(Closed).decode,
}
_LETTER: Final = {Said: b"S", Answered: b"A", Closed: b"C"}
_LETTER_AT: Final = -17  # of a key: the letter, then the offset in 16 hex digits


def said_of(event: Feedback, value: float | None, offset: int, at_us: int) -> Said:
    """`value` is what the rules take the event to say."""
    return Said(
        offset,
        at_us,
        event.feedback_id,
        event.tenant,
        event.signal,
        value,
        event.happened_us,
        content_digest(event),
    )


def answered_of(event: ProductionRollout, offset: int, at_us: int) -> Answered:
    newest = event.spans[-1].version if event.spans else -1
    return Answered(offset, at_us, event.outcome, event.tenant, newest)


def content_digest(event: Feedback) -> bytes:
    """What makes two events of one id the same: all that was said, not when it was received or by which way."""
    seal = event.seal
    # Sealed again, the same comment has another nonce: its length is all that tells two apart.
    comment = -1 if event.comment is None or seal is None else len(event.comment)
    # Who does not say when it happened gets the time of receipt: sent again, the same event has another one.
    when_us = None if event.happened_us == event.received_us else event.happened_us
    said = (event.rollout_id, event.signal, event.value, event.label, when_us, event.subject, comment)
    return hashlib.blake2b(_encode(said), digest_size=_DIGEST_BYTES).digest()


def id_digest(feedback_id: str) -> bytes:
    return hashlib.blake2b(feedback_id.encode(), digest_size=_DIGEST_BYTES).digest()


def key_of(rollout_id: str, entry: Entry) -> bytes:
    """The table's key of an entry."""
    offset = 0 if isinstance(entry, Closed) else entry.offset
    return b"%s%s%016x" % (rollout_id.encode(), _LETTER[type(entry)], offset)


def value_of(entry: Entry) -> bytes:
    return _encode(entry)


def entry_of(key: bytes, value: bytes) -> tuple[str, Entry]:
    """(rollout id, entry) of a table's key and value. Raises `msgspec.DecodeError` or `KeyError` for what is none."""
    return key[:_LETTER_AT].decode(), _decoders[key[_LETTER_AT : _LETTER_AT + 1]](value)
