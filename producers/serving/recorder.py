"""Seals answers and writes them in the background, so that the decode loop waits neither for a key nor for the broker.

What is open is bounded by the caller (`ServingConfig.max_open`). Whoever asked was told that it was not recorded where an
answer was not flushed at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import structlog

from rollwire.producers.background import Background
from rollwire.producers.emit import outgoing
from rollwire.schemas.errors import Refused, StoreUnavailable
from rollwire.schemas.records import ProductionRollout
from rollwire.streams.seams.clock import Clock
from rollwire.streams.seams.log import Log, Outgoing

_log = structlog.get_logger()

SOURCE: Final = "rollwire/serving"
MAX_BATCH: Final = 500


class Unsealed(NamedTuple):
    """An answer whose event is made on the recorder's thread: the key store may have to be asked."""

    rollout_id: str
    make: Callable[[], ProductionRollout | None]  # None = there is nothing to write
    done: Callable[[bool], None]  # told once whether it is durable; called by the recorder's thread


class Recorder(Background[Unsealed]):
    """Thread-safe. `written` and `refused` count answers; `check` raises what ended the thread."""

    def __init__(self, log: Log, *, clock: Clock, patience_s: float, retry_s: float = 0.5) -> None:
        super().__init__(
            log,
            name="recorder",
            what="answers",
            most=MAX_BATCH,
            clock=clock,
            patience_s=patience_s,
            retry_s=retry_s,
        )
        self.refused = 0
        self.start()

    def _take_out(self, batch: list[Unsealed]) -> int | None:
        sealed = [(each, record) for each in batch if (record := self._sealed(each)) is not None]
        if sealed and not self._durable([record for _, record in sealed]):
            return None
        for each, _ in sealed:
            each.done(True)
        return len(sealed)

    def _sealed(self, each: Unsealed) -> Outgoing | None:
        """None where there is nothing to write, or nothing that the codec takes; it is counted and named, others go on."""
        made: Outgoing | None = None
        try:
            found = self._until_done(lambda: (each.make(),), StoreUnavailable, "recorder_waits_for_keys")
            if found is not None and found[0] is not None:
                made = outgoing(found[0], source=SOURCE, time_us=found[0].finished_us)
        except Refused as refused:
            self.refused += 1
            _log.error(
                "answer_refused", rollout=each.rollout_id, reason=refused.reason, detail=refused.detail
            )
        if made is None:
            each.done(False)
        return made
