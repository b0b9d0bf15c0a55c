"""What a replica reports to `fleet-status`: queued by whoever samples, written by the subscriber's thread."""

from __future__ import annotations

import threading
from collections import deque
from typing import Final

import msgspec
import structlog

from rollwire.schemas.errors import LogError
from rollwire.schemas.records import FleetState, FleetStatus, WeightVersion
from rollwire.schemas.validate import validate
from rollwire.streams.emit import outgoing
from rollwire.streams.seams.clock import Clock
from rollwire.streams.seams.log import Log, Writer

KEPT: Final = 1_000  # reports that wait for a broker that is away; then the oldest go

_SOME_TIME_US: Final = 1_767_225_600_000_000

_log = structlog.get_logger()


class StatusReports:
    """`add` never blocks and never fails; `flush` belongs to one thread. Raises `Refused` for names that no event may carry."""

    def __init__(self, log: Log, *, fleet: str, replica: str, clock: Clock, target: str = "") -> None:
        self._log = log
        self._replica = replica
        self._clock = clock
        self._lock = threading.Lock()
        self._waiting: deque[FleetStatus] = deque(maxlen=KEPT)
        self._writer: Writer | None = None
        # What no report changes.
        self._blank = FleetStatus(
            fleet=fleet,
            replica=replica,
            state="stopped",
            version=-1,
            wanted_version=-1,
            state_digest="",
            stage_ms=0.0,
            pause_ms=0.0,
            reason="",
            open_rollouts=0,
            at_us=_SOME_TIME_US,
            target=target,
        )
        # A name that no event may carry is the starter's mistake, and no reason to be silent for ever.
        validate(self._blank)

    def add(
        self,
        state: FleetState,
        served: WeightVersion | None,
        wanted: WeightVersion | None,
        *,
        stage_ms: float = 0.0,
        pause_ms: float = 0.0,
        reason: str = "",
        open_rollouts: int = 0,
        fetched_bytes: int = 0,
        channel: str = "",
        wanted_version: int = -1,
    ) -> None:
        """`wanted_version` stands for a `wanted` that is not published."""
        status = msgspec.structs.replace(
            self._blank,
            state=state,
            version=-1 if served is None else served.version,
            wanted_version=wanted_version if wanted is None else wanted.version,
            state_digest="" if served is None else served.state_digest,
            stage_ms=stage_ms,
            pause_ms=pause_ms,
            reason=reason,
            open_rollouts=open_rollouts,
            at_us=self._clock.now_us(),
            fetched_bytes=fetched_bytes,
            channel=channel,
        )
        with self._lock:
            self._waiting.append(status)

    def flush(self, timeout_s: float = 10.0) -> bool:
        """Writes what waits; False = the log is away, and it still waits. A report may be written twice, never lost."""
        with self._lock:
            batch = list(self._waiting)
        if not batch:
            return True
        records = [outgoing(s, source=f"rollwire/weights/{self._replica}", time_us=s.at_us) for s in batch]
        try:
            if self._writer is None:
                self._writer = self._log.writer()
            self._writer.write(records, timeout_s)
        except LogError as error:
            _log.warning("weights.status_not_written", waiting=len(batch), error=str(error))
            self.close()
            return False
        with self._lock:
            written = {id(status) for status in batch}
            kept = [status for status in self._waiting if id(status) not in written]
            self._waiting = deque(kept, maxlen=KEPT)
        return True

    def close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
