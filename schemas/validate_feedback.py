"""Checks of one feedback event's own fields; what its signal may say is for `rollwire.schemas.rules`."""

from __future__ import annotations

import re
from typing import Final

from rollwire.schemas.errors import Refused
from rollwire.schemas.pseudonyms import is_pseudonym
from rollwire.schemas.records import Feedback

FEEDBACK_ID: Final = re.compile(r"[A-Za-z0-9._:-]{1,128}")
TENANT: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
"""No slash in either: `<tenant>/<feedback_id>` is the event's id."""

SIGNAL: Final = re.compile(r"[a-z][a-z0-9_]{0,63}")
DIALECT: Final = re.compile(r"[a-z][a-z0-9_-]{0,31}")
KEY_ID: Final = re.compile(r"[A-Za-z0-9._-]{0,64}")
REFUSED_HEADER: Final = "refused"
"""Header of a record whose caller was told no: the reason code. It is kept for the audit, and whoever reads it refuses it."""

MAX_LABEL: Final = 256  # characters
MAX_COMMENT_BYTES: Final = 64 * 1024

_FORMS: Final = (
    ("feedback_id", FEEDBACK_ID),
    ("tenant", TENANT),
    ("signal", SIGNAL),
    ("dialect", DIALECT),
    ("key_id", KEY_ID),
)


def check_feedback(e: Feedback) -> None:
    """Raises `Refused` with the field: an id of another form, nothing said, a comment without what opens it."""
    for field, form in _FORMS:
        text = getattr(e, field)
        if form.fullmatch(text) is None:
            raise Refused("id_invalid", f"{field}={text[:80]!r} is not {form.pattern}", field=field)
    if e.value is None and e.label is None and e.comment is None:
        raise Refused(
            "inconsistent", f"{e.feedback_id} says nothing: neither value, label nor comment", field="value"
        )
    if e.label is not None and len(e.label) > MAX_LABEL:
        raise Refused(
            "limit_exceeded", f"label of {len(e.label)} characters, at most {MAX_LABEL}", field="label"
        )
    if e.subject and not is_pseudonym(e.subject):
        raise Refused("id_invalid", f"subject={e.subject[:80]!r} is no pseudonym", field="subject")
    if (e.comment is None) != (e.seal is None):
        raise Refused("seal_invalid", "a comment needs a seal, and a seal a comment", field="comment")
    if e.comment is not None and len(e.comment) > MAX_COMMENT_BYTES:
        raise Refused(
            "limit_exceeded",
            f"comment of {len(e.comment)} bytes, at most {MAX_COMMENT_BYTES}",
            field="comment",
        )
    if e.seal is not None and e.seal.subject != e.subject:
        raise Refused(
            "seal_invalid", "the comment is sealed for another person than subject", field="subject"
        )
