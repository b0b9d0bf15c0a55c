"""The records of people: what is sealed for them, what they said, what was erased. Import them from `rollwire.schemas.records`."""

from __future__ import annotations

from typing import Literal

from rollwire.schemas.records_base import Event

IdSource = Literal["client", "content", "unknown"]


class Seal(Event, frozen=True, kw_only=True, gc=False):
    """What opens content that is encrypted with a person's data key: AES-256-GCM.

    The ciphertext is as long as the plaintext and stands where that would. Its associated data are `<event id>/<field>`
    in ASCII, as `<rollout_id>/token_ids`: no ciphertext can be moved to another place.
    """

    subject: str  # pseudonym of the person: 32 hex digits
    key: int  # generation of the person's data key
    nonce: bytes  # 12
    tag: bytes  # 16


class Coverage(Event, frozen=True, kw_only=True, gc=False):
    """How much of a cohort one outcome class has signals for: silence is counted, per class."""

    outcome: str  # "" = not said
    rollouts: int
    signalled: int  # with at least one feedback event
    scored: int = 0  # with a reward: from signals, or from a stated rule for silence


class Feedback(Event, frozen=True, kw_only=True, gc=False):
    """`user-feedback`: what one person, or a product on their behalf, said about one rollout. `schemas.rules` judges it."""

    feedback_id: (
        str  # 1-128 of [A-Za-z0-9._:-]; with the tenant it names the event: the same again is a repeat
    )
    id_source: IdSource  # who chose the id: the client, or the gateway from the content
    tenant: str  # whose rollout it must be
    group_id: str  # UUIDv7 of the rollout's group
    rollout_id: str
    signal: str  # a name of the rules: "thumb", "accept", ...
    value: float | None  # None = the label says it, or a comment alone
    label: str | None  # a word of the rules that stands for a value
    happened_us: int  # as the client says; orders several of one signal, never decides what is late
    received_us: int  # as the gateway's clock said, or the writer's
    subject: str  # pseudonym of who said it, 32 hex digits; "" = not said
    comment: bytes | None  # ciphertext of UTF-8 text, associated data <feedback_id>/comment
    seal: Seal | None  # what opens the comment; None = there is no comment
    dialect: str  # how it came: "rollwire" | "otel" | "sdk"
    key_id: str  # of the API key it came with; "" = straight to the log


class Erasure(Event, frozen=True, kw_only=True, gc=False):
    """`erasures`: a person's data keys were destroyed before this event was written. Key = pseudonym."""

    subject: str  # pseudonym, 32 hex digits
    request_id: str  # of who asked; the same request again is the same event
    generations: int  # keys 1 to this one are destroyed; 0 = the person had none. A later one is of a person who came again
    reason: str  # for people; nothing that names the person
    by: str  # who ran it
    erased_us: int
