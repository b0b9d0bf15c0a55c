"""What is taken and not committed: the trainer's bookkeeping as a pure state machine. No I/O, no clock, no threads.

    START ──resume──▶ take, take ──due──▶ one transaction ──commit──▶ the next one is due
                                              └─doubt─▶ settle (by the committed offsets) ─▶ committed, or due again
                        fail: everything open is discarded; only `resume` leads on

Law 3: commits are strictly in the order of versions, each from the position where the one before it ended, and at most
`limit` are open. Law 4: after any doubt nothing is due until the log has told the outcome.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from rollwire.schemas.errors import OffsetLost, PlanViolation
from rollwire.streams.seams.log import TopicPartition

Positions = Mapping[TopicPartition, int]

AT_MOST: Final = 2
"""Steps that may be uncommitted (law 3)."""


class Entry(NamedTuple):
    """One version that was made and is not committed."""

    version: int
    before: Positions  # the committed offsets before it; empty = there were none
    after: Positions  # what its transaction commits


class Books(NamedTuple):
    committed: int  # the last version known to be in the log; -1 = none
    position: Positions | None  # where the next entry begins; None = nothing is known to be committed
    open: tuple[Entry, ...]  # by version, ascending
    in_doubt: bool  # the outcome of the first entry's transaction is not known
    failed: bool
    limit: int  # of `open`

    @property
    def last(self) -> int:
        """The last version that was taken; the next one is one higher."""
        return self.open[-1].version if self.open else self.committed

    @property
    def first(self) -> Entry | None:
        """Whose turn it is to get into the log, and the only one in which a transaction may be in doubt."""
        return self.open[0] if self.open else None

    @property
    def due(self) -> Entry | None:
        """What the next transaction commits. None: nothing is open, all has failed, or a doubt is to be settled first."""
        return None if self.in_doubt else self.first

    def below(self, uncommitted: int) -> bool:
        """Whether fewer than `uncommitted` entries are open."""
        return len(self.open) < uncommitted

    def take(self, entry: Entry) -> Books:
        """Raises `PlanViolation` for a version out of order, one too many, or one after a failure; `OffsetLost` where it
        does not begin where the one before it ended."""
        if self.failed:
            raise PlanViolation(f"version {entry.version} was taken after a failure: resume first")
        if entry.version != self.last + 1:
            raise PlanViolation(f"version {entry.version} was taken after {self.last}: versions go up by one")
        if not self.below(self.limit):
            raise PlanViolation(
                f"version {entry.version} was taken while {len(self.open)} are uncommitted, at most {self.limit} may be"
            )
        stands = self.open[-1].after if self.open else self.position
        if stands is not None and dict(entry.before) != dict(stands):
            raise OffsetLost(
                f"version {entry.version} begins at {dict(entry.before)}, the one before it ended at {dict(stands)}"
            )
        return self._replace(open=(*self.open, entry))

    def commit(self, version: int) -> Books:
        """The transaction of `version` is known to be in the log. Raises `PlanViolation` unless it is the one due."""
        if self.in_doubt or not self.open or self.open[0].version != version:
            raise PlanViolation(f"version {version} is not the one whose commit is due")
        return self._replace(committed=version, position=self.open[0].after, open=self.open[1:])

    def doubt(self) -> Books:
        """The outcome of the transaction that was due is unknown. Raises `PlanViolation` where none was."""
        if self.due is None:
            raise PlanViolation("there is no transaction to be in doubt of")
        return self._replace(in_doubt=True)

    def settle(self, *, landed: bool) -> Books:
        """The log has told: the transaction in doubt is in it (then its version is committed) or not (then it is due
        again). Raises `PlanViolation` where nothing is in doubt."""
        if not self.in_doubt:
            raise PlanViolation("nothing is in doubt")
        known = self._replace(in_doubt=False)
        return known.commit(known.open[0].version) if landed else known

    def fail(self) -> Books:
        """What is open is discarded: its owner restarts and takes it again from the log."""
        return self._replace(open=(), in_doubt=False, failed=True)

    def resume(self, version: int, position: Positions) -> Books:
        """`version` is the last one in the log and ended at `position`. Raises `PlanViolation` while entries are open."""
        if self.open:
            raise PlanViolation(
                f"versions {[e.version for e in self.open]} are open: discard them before resuming"
            )
        return self._replace(committed=version, position=position, in_doubt=False, failed=False)


def start(limit: int = AT_MOST) -> Books:
    """The books of a lineage without versions: version 0 is next, from wherever its group stands."""
    return Books(-1, None, (), in_doubt=False, failed=False, limit=limit)


def landed(entry: Entry, found: Positions, *, group: str) -> bool:
    """What a transaction's outcome was, by the offsets that the consumer group has now; `entry` moves them.

    Raises `OffsetLost` where `group` stands at neither end of it: somebody else has moved it.
    """
    if dict(found) == dict(entry.after):
        return True
    if dict(found) == dict(entry.before):
        return False
    raise OffsetLost(
        f"while version {entry.version} was committed the consumer group {group} moved to {dict(found)}; expected "
        f"{dict(entry.before)} or {dict(entry.after)}"
    )
