"""Follows the topic `erasures`, so that who keeps copies of data keys forgets those that were destroyed.

    follower = ErasureFollower(log, keys.forget)     # before the first key is asked for
    ...
    follower.close()

An event says that the keys were destroyed *before* it was written: who forgets and asks again is told `Erased`. While the
log is away nothing is heard, and the cache's own time bounds what is kept.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

import structlog

from rollwire.schemas.codec import decode
from rollwire.schemas.errors import Refused, RollwireError
from rollwire.schemas.records import Erasure
from rollwire.streams.seams.log import Log, Reader, Record, TopicPartition

TOPIC: Final = "erasures"
_log = structlog.get_logger("rollwire.erasures")
_POLL_S: Final = 0.25
_AGAIN_S: Final = 1.0


def erasure_of(record: Record) -> Erasure | None:
    """The event; None for a record that is none."""
    try:
        event = decode(record.topic, record.value, record.headers, record.key)
    except Refused as refused:
        _log.warning("erasures.refused", offset=record.offset, reason=refused.reason, detail=refused.detail)
        return None
    return event if isinstance(event, Erasure) else None


class ErasureFollower:
    """One thread, from where the topic ends now. `forget` is called with each pseudonym, on that thread."""

    def __init__(self, log: Log, forget: Callable[[str], object]) -> None:
        """Raises `LogUnavailable` where the log cannot say where the topic ends."""
        self._log = log
        self._forget = forget
        self._partitions = [TopicPartition(TOPIC, p) for p in range(log.partitions(TOPIC))]
        # Asked here, not on the thread: no key is kept yet, so nothing that came earlier matters, and nothing later is missed.
        self._positions = log.end_offsets(self._partitions)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="erasure-follower", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float = 5.0) -> None:
        self._stop.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._stop.is_set():
            reader: Reader | None = None
            try:
                reader = self._log.reader()
                reader.assign(self._positions)
                while not self._stop.is_set():
                    self._hear(reader)
            except RollwireError as error:
                _log.warning("erasures.away", error=str(error), again_s=_AGAIN_S)
                self._stop.wait(_AGAIN_S)
            finally:
                if reader is not None:
                    reader.close()

    def _hear(self, reader: Reader) -> None:
        for record in reader.poll(100, _POLL_S):
            if (event := erasure_of(record)) is not None:
                self._forget(event.subject)
                _log.info("erasures.forgot", subject=event.subject, generations=event.generations)
        self._positions = reader.positions()
