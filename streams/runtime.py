"""The transactional runtime: drives one step over a log so that its outputs and its offsets appear together or not at all.

One transaction = outputs + refusals + offsets. After any doubt the producer, the reader and the step are thrown away and
built anew (law 4): the committed offsets tell what happened. A broker that is away is waited for, with backoff, until
`patience_s`; then the last error is raised. `Fenced` and `OffsetLost` are raised at once: waiting mends neither.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from uuid import uuid4

import structlog

from rollwire.schemas.errors import DeadlineExceeded, LogUnavailable, RegistryUnavailable, TransactionUnknown
from rollwire.streams.drive import Drive, RuntimeConfig
from rollwire.streams.seams.clock import Clock
from rollwire.streams.seams.log import Log, Member
from rollwire.streams.session import Session, marks_group, read_group

__all__ = ["Drive", "RuntimeConfig", "Session", "marks_group", "read_group", "run_step"]

_logger = structlog.get_logger("rollwire.runtime")


def run_step(
    log: Log,
    drive: Drive,
    config: RuntimeConfig,
    *,
    stop: threading.Event,
    clock: Clock,
    member: Member | None = None,
    placed: Callable[[], None] | None = None,
) -> None:
    """Drives a step until `stop` is set: what was read by then is decided and committed.

    `placed` is called before the id is taken over once more: it returns when `stop` would be set if the place of `member`
    had been lost. Who stood still and then doubts its transaction would fence the rightful owner otherwise.

    Raises `Fenced`, `OffsetLost`, `CircuitOpen` and `TopicMismatch` at once, `LogUnavailable` or `TransactionUnknown` when failures
    went on for `patience_s` without one committed transaction between them.
    """
    failing_since: float | None = None
    life = uuid4().hex[:12]
    backoff_s = config.backoff_s
    while not stop.is_set():
        session: Session | None = None
        try:
            session = Session(log, drive, config, clock, member=member, life=life)
            while not stop.is_set():
                session.turn()
            session.settle()
            return
        except (TransactionUnknown, LogUnavailable, DeadlineExceeded, RegistryUnavailable) as error:
            now = clock.monotonic_s()
            if session is not None and session.healthy:
                failing_since, backoff_s = None, config.backoff_s
            failing_since = now if failing_since is None else failing_since
            _logger.warning(
                "step.rebuild", id=drive.transactional_id, error=str(error), kind=type(error).__name__
            )
            if now - failing_since > config.patience_s:
                raise LogUnavailable(
                    f"{drive.transactional_id}: no transaction for {now - failing_since:.0f} s; the last error was: {error}"
                ) from error
        finally:
            if session is not None:
                session.close()
        stop.wait(backoff_s)
        if placed is not None:
            placed()
        backoff_s = min(backoff_s * 2, 5.0)
