"""What a person is shown of sealed content: *erased* where the log says so, its plaintext where they may open it."""

from __future__ import annotations

from rollwire.schemas.errors import Erased, KeyMissing, SealInvalid, TopicMismatch
from rollwire.schemas.records import Seal
from rollwire.streams.seams.erasures import TOPIC, erasure_of
from rollwire.streams.seams.log import Log
from rollwire.streams.seams.scan import scan
from rollwire.streams.seams.sealing import OpenKeys, open_field


class Looking:
    """A `readable.Look`. Reads the topic `erasures` when the first seal comes; opens what is not erased where `open_keys`
    is given. Never fails for a seal: it says "sealed", "erased", "no key" or "does not open"."""

    def __init__(self, log: Log, open_keys: OpenKeys | None = None) -> None:
        self._log = log
        self._keys = None if open_keys is None else open_keys()
        self._erased: dict[str, int] | None = None  # by pseudonym, the last generation destroyed

    def __call__(self, seal: Seal, event_id: str, field: str, ciphertext: bytes) -> bytes | str:
        if self._erased is None:
            self._erased = erased_generations(self._log)
        if seal.key <= self._erased.get(seal.subject, 0):
            return "erased"
        if self._keys is None:
            return "sealed"
        try:
            return open_field(self._keys, seal, event_id, field, ciphertext)
        except Erased:  # since the log was read, or by somebody who has not said so yet
            return "erased"
        except KeyMissing:
            return "no key"
        except SealInvalid:
            return "does not open"


def erased_generations(log: Log) -> dict[str, int]:
    """The last generation destroyed, by pseudonym; empty where the topic is not there (an older stack's)."""
    found: dict[str, int] = {}
    try:
        for record in scan(log, (TOPIC,)):
            if (event := erasure_of(record)) is not None:
                found[event.subject] = max(event.generations, found.get(event.subject, 0))
    except TopicMismatch:
        return {}
    return found
