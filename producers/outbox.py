"""Writes finished rollouts in the background, so that the decode loop never waits for the broker.

A group holds its slot until its fate is known, so at most slots * group size rollouts are ever queued here. What was not
flushed at the end is lost and named: its group is dropped at its deadline.
"""

from __future__ import annotations

from functools import partial
from typing import Final

import structlog

from rollwire.producers.background import Background
from rollwire.producers.claims import claim_check
from rollwire.producers.emit import outgoing
from rollwire.producers.trajectory import Finished
from rollwire.schemas.errors import Refused, StoreUnavailable
from rollwire.streams.seams.clock import Clock
from rollwire.streams.seams.log import Log, Outgoing
from rollwire.streams.seams.store import ObjectStore

_log = structlog.get_logger()

MAX_BATCH: Final = 1_000  # rollouts of one write


class Outbox(Background[Finished]):
    """Thread-safe. `written` and `refused` count rollouts; `check` raises what ended the thread."""

    def __init__(
        self,
        log: Log,
        *,
        source: str,
        clock: Clock,
        patience_s: float,
        retry_s: float = 0.5,
        store: ObjectStore | None = None,
    ) -> None:
        super().__init__(
            log,
            name="outbox",
            what="rollouts",
            most=MAX_BATCH,
            clock=clock,
            patience_s=patience_s,
            retry_s=retry_s,
        )
        self._store = store  # None = a trace too large for an event is refused
        self._source = source
        self.refused = 0
        self._refused_groups: list[str] = []
        self.start()

    def take_refused(self) -> list[str]:
        """Group ids of the rollouts refused since the last call, one a rollout."""
        with self._changed:
            taken, self._refused_groups = self._refused_groups, []
            return taken

    def _take_out(self, batch: list[Finished]) -> int | None:
        claimed: list[Finished] = []
        for finished in batch:
            # Large traces go into the store first.
            one = self._until_done(partial(self._with_claim, finished), StoreUnavailable, "outbox_waits")
            if one is None:
                return None
            claimed.append(one)
        records, rollouts = self._encode(claimed)
        return rollouts if self._durable(records) else None

    def _with_claim(self, finished: Finished) -> Finished:
        rollout, trace = finished
        if rollout is None or trace is None:
            return finished
        try:
            return Finished(rollout, claim_check(trace, rollout.model, self._store))
        except Refused:
            return finished  # too large for an event, so that the codec refuses it and counts

    def _encode(self, batch: list[Finished]) -> tuple[list[Outgoing], int]:
        """A rollout that the codec refuses (an engine gave NaN, say) is counted and named; the others go on."""
        records: list[Outgoing] = []
        rollouts = 0
        for rollout, trace in batch:
            if rollout is None:
                continue
            events = (rollout,) if trace is None else (trace, rollout)
            try:
                records += [outgoing(e, source=self._source, time_us=rollout.finished_us) for e in events]
                rollouts += 1
            except Refused as refused:
                self.refused += 1
                with self._changed:
                    self._refused_groups.append(rollout.group_id)
                _log.error(
                    "rollout_refused",
                    rollout=rollout.rollout_id,
                    reason=refused.reason,
                    detail=refused.detail,
                )
        return records, rollouts
