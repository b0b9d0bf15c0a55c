"""A thread that follows the log of versions until it is closed: every failure ends in a pause and another try."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod

import structlog

from rollwire.consumers.weights.follow import Follow
from rollwire.consumers.weights.staging import Staging, SubscriberConfig, backoff
from rollwire.consumers.weights.status import StatusReports
from rollwire.consumers.weights.tail import Tail
from rollwire.schemas.records import Event, WeightVersion
from rollwire.streams.seams.log import Log

_log = structlog.get_logger()


class Following(ABC):
    """What `WeightSubscriber` and `Follower` share. `_follow` and `_staging` are of the thread alone; what is served and the
    last problem are shared, under the condition `_change`."""

    def __init__(
        self, log: Log, follow: Follow, staging: Staging, reports: StatusReports, config: SubscriberConfig
    ) -> None:
        self._log = log
        self._follow = follow
        self._staging = staging
        self._reports = reports
        self._config = config
        self._stop = threading.Event()
        self._change = threading.Condition()
        self._served: WeightVersion | None = None
        self._problem = ""
        self._thread: threading.Thread | None = None

    def _begin(self, name: str) -> None:
        """Starts the thread; the last thing that a subclass's `__init__` does."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def served(self) -> WeightVersion | None:
        with self._change:
            return self._served

    def close(self) -> None:
        """Ends the thread and writes the last reports, within `close_s`. What is served goes on being served."""
        self._stop.set()
        if self._thread is None:
            return
        self._thread.join(self._config.close_s)
        if self._thread.is_alive():
            _log.warning("weights.close_late", seconds=self._config.close_s)

    @abstractmethod
    def _advance(self) -> None:
        """One step towards the wanted version. Called again and again while the log is read to its end."""

    def _heard(self, event: Event) -> None:  # noqa: B027  # few have something to do here
        """An event was news."""

    def _ended(self) -> None:  # noqa: B027  # nor here
        """The thread was told to stop; reports may still be added."""

    def _note(self, problem: str) -> None:
        with self._change:
            self._problem = problem

    def _run(self) -> None:
        failures = 0
        while not self._stop.is_set():
            try:
                self._tail()
                failures = 0
            except Exception as error:  # noqa: BLE001  # a thread's edge: what serves must outlive whatever this is
                failures += 1
                self._note(f"{type(error).__name__}: {error}")
                _log.warning("weights.follow_failed", error=str(error), failures=failures)
                self._stop.wait(backoff(failures, self._config))
        self._ended()
        self._reports.flush(self._config.close_s / 2)
        self._reports.close()
        self._staging.close()

    def _tail(self) -> None:
        """Reads from the beginning (repeats are dropped) until told to stop; raises what the log raises."""
        with Tail(self._log) as tail:
            while not self._stop.is_set():
                for event in tail.poll(self._config.poll_s):
                    if self._follow.add(event):
                        self._staging.news()
                        self._heard(event)
                self._reports.flush()
                if tail.caught_up:
                    self._advance()
                    self._reports.flush()
