"""Between the subscriber and an engine over HTTP: a version is offered once the engine could load it at once.

The folder is written in a thread of its own while the engine serves on; the rollout worker then swaps in a pause that is as
long as the engine's own load.
"""

from __future__ import annotations

import threading

import structlog

from rollwire.consumers.weights.targets.engine import EngineTarget
from rollwire.consumers.weights.targets.target import Update
from rollwire.kernels.tensors import State
from rollwire.schemas.errors import DeadlineExceeded, TargetFailed, WeightError
from rollwire.streams.seams.weights import Staged, WeightSource

_log = structlog.get_logger()


class EngineFeed:
    """Implements `streams.seams.weights.WeightSource` over another one, and what `producers.engine_http` wants of a feed.

    All calls from one thread; the one that stages never runs beside another call to the target.
    """

    def __init__(self, source: WeightSource, target: EngineTarget) -> None:
        self._source = source
        self._target = target
        self._staging: threading.Thread | None = None
        self._ready: Staged | None = None  # in the target, to be swapped in
        self._failure: WeightError | None = None

    def staged(self) -> Staged | None:
        if self._staging is not None:
            if self._staging.is_alive():
                return None
            self._end_staging()
        if self._ready is None and (news := self._source.staged()) is not None:
            self._staging = threading.Thread(
                target=self._stage, args=(news,), name="engine-stage", daemon=True
            )
            self._staging.start()
        return self._ready

    def wait(self, timeout_s: float) -> Staged:
        """Raises `DeadlineExceeded`, naming what kept the engine or its folder from it."""
        self._end_staging()
        if self._ready is None:
            self._stage(self._source.wait(timeout_s))
            if self._failure is not None:
                failure, self._failure = self._failure, None
                raise DeadlineExceeded(f"a version is there and could not be staged: {failure}")
        ready = self._ready
        if ready is None:
            raise TargetFailed("nothing is staged")
        return ready

    def swap(self, version: int, state: State) -> None:
        """What was offered last. Raises `TargetFailed`; then the version before serves, or the engine stays paused."""
        ready, self._ready = self._ready, None
        if ready is None or ready.event.version != version:
            raise TargetFailed(f"version {version} is not staged")
        try:
            self._target.swap()
        except WeightError:
            self._target.undo()
            raise
        self._target.keep()

    def restore(self) -> None:
        """The engine serves again what was swapped in last. Raises `WeightError`."""
        self._end_staging()
        self._target.heal()

    def swapped(self, staged: Staged, pause_ms: float, open_rollouts: int) -> None:
        self._source.swapped(staged, pause_ms, open_rollouts)

    def stopped(self, open_rollouts: int) -> None:
        self._source.stopped(open_rollouts)

    def close(self) -> None:
        self._end_staging()
        self._source.close()
        self._target.close()

    def _end_staging(self) -> None:
        if self._staging is not None:
            self._staging.join()
            self._staging = None
        if self._failure is not None:
            _log.warning("engine.not_staged", error=str(self._failure))
            self._failure = None

    def _stage(self, news: Staged) -> None:
        try:
            self._target.stage(Update(news.event, news.state))
        except WeightError as error:
            self._failure = error
        else:
            self._ready = news
