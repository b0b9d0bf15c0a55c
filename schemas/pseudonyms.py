"""Pseudonyms: what stands in the log for a person.

HMAC-SHA256 (RFC 2104) under a secret, cut to 128 bits: nobody without the secret can tell whose a pseudonym is, not
even by trying all e-mail addresses; and two tenants' people of the same name are different people.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from typing import Final

from rollwire.schemas.errors import Refused

PSEUDONYM_CHARACTERS: Final = 32
_PSEUDONYM: Final = re.compile(r"[0-9a-f]{32}")


def pseudonym_of(secret: bytes, tenant: str, subject: str) -> str:
    """32 hex digits. `subject` is taken as it is given: nothing is trimmed, folded or normalised (law 10).

    Raises `Refused(id_invalid)` for an empty subject, and for text that is not UTF-8 (a lone surrogate).
    """
    if not subject:
        raise Refused("id_invalid", "subject is empty: leave it out where there is no person")
    try:
        whose, who = tenant.encode(), subject.encode()
    except UnicodeEncodeError as error:
        raise Refused("id_invalid", f"tenant or subject is not UTF-8: {error.reason}") from None
    # The length in front keeps ("ab", "c") and ("a", "bc") apart.
    message = len(whose).to_bytes(4, "big") + whose + who
    return hmac.new(secret, message, hashlib.sha256).hexdigest()[:PSEUDONYM_CHARACTERS]


def is_pseudonym(text: str) -> bool:
    return _PSEUDONYM.fullmatch(text) is not None
