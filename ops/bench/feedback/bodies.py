"""The events that are sent: cheap to make, each with an id of its own, so that whoever finds one in the topic knows which.

Event n of a run named X has the id `X-n` and belongs to the rollout n // SIGNALS; the rollout's id is derived from X and that
number alone, so generator, baseline and ledger make the same ones without telling each other.
"""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from typing import Final, NamedTuple

from rollwire.schemas.ids import new_group_id, rollout_id

SIGNALS: Final = 4  # events a rollout
_LOW_BITS: Final = 36
_SIGNAL: Final = (
    b'"thumb","value":1',
    b'"rating","value":0.75',
    b'"edit_survival","value":0.5',
    b'"latency_ms","value":812.5',
)


class Bodies(NamedTuple):
    """The events of one phase: `name` is part of every id, `at_us` is when they all happened."""

    name: str
    at_us: int

    def group(self, number: int) -> str:
        """The group id of the phase's rollout `number`."""
        salt = int.from_bytes(hashlib.blake2b(self.name.encode(), digest_size=4).digest(), "big")
        return new_group_id(self.at_us, salt << _LOW_BITS | number)

    def rollout(self, number: int) -> str:
        return rollout_id(self.group(number), 0)

    def ids(self, first: int, count: int) -> list[str]:
        return [f"{self.name}-{number}" for number in range(first, first + count)]

    def lines(self, first: int, count: int) -> bytes:
        """Events `first`, `first` + 1, ... as NDJSON; one event is one JSON object without an end of line."""
        name = self.name.encode()
        happened = (
            datetime.fromtimestamp(self.at_us / 1e6, UTC)
            .isoformat(timespec="milliseconds")
            .replace("+00:00", "Z")
            .encode()
        )
        known: dict[int, bytes] = {}
        made: list[bytes] = []
        for number in range(first, first + count):
            rollout = number // SIGNALS
            if rollout not in known:
                known[rollout] = self.rollout(rollout).encode()
            made.append(
                b'{"feedback_id":"%b-%d","rollout_id":"%b","signal":%b,"happened_at":"%b"}'
                % (name, number, known[rollout], _SIGNAL[number % SIGNALS], happened)
            )
        return b"\n".join(made)
