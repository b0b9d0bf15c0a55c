"""A replica's slots: how many groups may be open at once, and which. Pure bookkeeping, no I/O.

A group holds its slot from its opening until `group-fates` names it, whatever its fate: a filtered or dropped group gives
the slot back exactly as a trained one does, or the producers would starve (C06).
"""

from __future__ import annotations

from typing import NamedTuple

from rollwire.schemas.errors import ConfigError
from rollwire.schemas.records import GroupFate


class SlotCounts(NamedTuple):
    """Groups of this life of the replica. At every moment submitted = accepted + filtered + dropped + pending."""

    submitted: int
    accepted: int  # trained on
    filtered: int  # no signal
    dropped: int  # stale, incomplete, abandoned, ...
    pending: int  # open now

    @property
    def balanced(self) -> bool:
        return self.submitted == self.accepted + self.filtered + self.dropped + self.pending


class Slots:
    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._open: dict[str, int] = {}  # group id -> its rollouts that could not be written
        self._submitted = 0
        self._closed = {"kept": 0, "filtered": 0, "dropped": 0}

    @property
    def free(self) -> int:
        return self._capacity - len(self._open)

    @property
    def counts(self) -> SlotCounts:
        closed = self._closed
        return SlotCounts(
            self._submitted, closed["kept"], closed["filtered"], closed["dropped"], len(self._open)
        )

    def open(self, group_id: str) -> None:
        """Takes a slot. Raises `ConfigError` where none is free or the group is open already."""
        if self.free <= 0:
            raise ConfigError(f"no slot is free for group {group_id}: {self._capacity} are taken")
        if group_id in self._open:
            raise ConfigError(f"group {group_id} is open already")
        self._open[group_id] = 0
        self._submitted += 1

    def give_back(self, fate: GroupFate) -> bool:
        """True where the group was ours and open. A repeat, another replica's group or one of a previous life: False."""
        if fate.group_id not in self._open:
            return False
        del self._open[fate.group_id]
        # A fate that a later release knows and this one does not gives the slot back too: it was not trained on.
        self._closed[fate.fate if fate.fate in self._closed else "dropped"] += 1
        return True

    def lost(self, group_id: str, group_size: int) -> None:
        """One rollout of a group could not be written. A group of which none was written will never get a fate."""
        if group_id not in self._open:
            return
        self._open[group_id] += 1
        if self._open[group_id] == group_size:
            del self._open[group_id]
            self._closed["dropped"] += 1
