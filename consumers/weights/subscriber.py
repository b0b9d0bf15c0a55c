"""A replica's side of the weight plane: follows `weight-versions`, stages the newest version, reports what is served.

Everything that can fail happens in a thread of its own and ends in a report and another try; whoever samples goes on
with what it has. A version is offered only when its bytes, its base and its result proved right.
"""

from __future__ import annotations

import threading

import structlog
from pydantic import BaseModel, ConfigDict, Field

from rollwire.consumers.weights.reader import Loaded, PathStep, load_path, plan_path
from rollwire.consumers.weights.status import StatusReports
from rollwire.consumers.weights.versions import Versions
from rollwire.schemas.errors import (
    DeadlineExceeded,
    ObjectConflict,
    ObjectMissing,
    Refused,
    StoreError,
    WeightError,
)
from rollwire.schemas.records import WeightVersion
from rollwire.streams.emit import decode_record
from rollwire.streams.seams.clock import Clock, SystemClock
from rollwire.streams.seams.log import Log, Reader, TopicPartition
from rollwire.streams.seams.store import ObjectStore
from rollwire.streams.seams.weights import Staged

_PARTITION = TopicPartition("weight-versions", 0)
_log = structlog.get_logger()


class SubscriberConfig(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    poll_s: float = Field(default=0.1, gt=0, description="How long one look at the log waits for news.")
    backoff_s: float = Field(
        default=0.2, gt=0, description="Pause after a first failure; doubles from there."
    )
    backoff_max_s: float = Field(default=10.0, gt=0, description="The longest pause between tries.")
    close_s: float = Field(default=10.0, gt=0, description="How long `close` waits for the last reports.")


def backoff(failures: int, config: SubscriberConfig) -> float:
    """Seconds to wait after the `failures`-th failure in a row (1, 2, ...)."""
    return float(min(config.backoff_s * 2.0 ** min(failures - 1, 30), config.backoff_max_s))


class WeightSubscriber:
    """Implements `streams.seams.weights.WeightSource`. Starts following at once.

    `lineage=None` follows the lineage that was started last. States that it hands out are never written to.
    """

    def __init__(
        self,
        log: Log,
        store: ObjectStore,
        *,
        fleet: str,
        replica: str,
        lineage: str | None = None,
        model: str | None = None,
        clock: Clock | None = None,
        config: SubscriberConfig | None = None,
    ) -> None:
        self._log = log
        self._store = store
        self._clock = clock or SystemClock()
        self._config = config or SubscriberConfig()
        self._versions = Versions(lineage, model)
        self._reports = StatusReports(log, fleet=fleet, replica=replica, clock=self._clock)
        self._stop = threading.Event()
        # Of the thread alone: what is held to build on, steps that proved unusable, and the pause after failures.
        self._held: tuple[WeightVersion, Loaded] | None = None
        self._avoid: set[tuple[int, bool]] = set()
        self._failures = 0
        self._retry_at = 0.0
        # Shared, under the condition.
        self._change = threading.Condition()
        self._staged: Staged | None = None
        self._served: WeightVersion | None = None
        self._problem = ""
        self._thread = threading.Thread(target=self._run, name=f"weights-{replica}", daemon=True)
        self._thread.start()

    def staged(self) -> Staged | None:
        """The newest staged version that is not the one swapped in. Never blocks on I/O."""
        with self._change:
            return self._news()

    def wait(self, timeout_s: float) -> Staged:
        """Raises `DeadlineExceeded`, naming the last problem, where nothing new is staged in time."""
        with self._change:
            if self._change.wait_for(lambda: self._news() is not None, timeout_s):
                staged = self._news()
                if staged is not None:
                    return staged
            problem = f"; last problem: {self._problem}" if self._problem else ""
            raise DeadlineExceeded(
                f"no new version of lineage {self._versions.lineage} was staged within {timeout_s:g} s{problem}"
            )

    def swapped(self, staged: Staged, pause_ms: float, open_rollouts: int) -> None:
        """The sampler serves `staged` from now on. Never blocks, never fails."""
        with self._change:
            self._served = staged.event
        self._reports.add(
            "swapped",
            staged.event,
            staged.event,
            stage_ms=staged.stage_ms,
            pause_ms=pause_ms,
            open_rollouts=open_rollouts,
        )

    def stopped(self, open_rollouts: int) -> None:
        """The sampler stops. `close` writes the report."""
        with self._change:
            served = self._served
        self._reports.add("stopped", served, served, open_rollouts=open_rollouts)

    def close(self) -> None:
        """Writes the last reports and ends the thread, within `close_s`."""
        self._stop.set()
        self._thread.join(self._config.close_s)
        if self._thread.is_alive():
            _log.warning("weights.close_late", seconds=self._config.close_s)

    def _news(self) -> Staged | None:
        staged = self._staged
        return None if staged is None or staged.event == self._served else staged

    def _run(self) -> None:
        failures = 0
        while not self._stop.is_set():
            try:
                self._follow()
                failures = 0
            except Exception as error:  # noqa: BLE001  # a thread's edge: the sampler must outlive whatever this is
                failures += 1
                self._note(f"{type(error).__name__}: {error}")
                _log.warning("weights.follow_failed", error=str(error), failures=failures)
                self._stop.wait(backoff(failures, self._config))
        self._reports.flush(self._config.close_s / 2)
        self._reports.close()

    def _follow(self) -> None:
        """Reads from the beginning (repeats are dropped) until told to stop; raises what the log raises."""
        reader = self._log.reader()
        try:
            reader.assign({_PARTITION: self._log.beginning_offsets([_PARTITION])[_PARTITION]})
            end = self._log.end_offsets([_PARTITION])[_PARTITION]
            while not self._stop.is_set():
                self._read(reader)
                self._reports.flush()
                # While catching up nothing is staged: only the newest version counts.
                if reader.positions()[_PARTITION] >= end:
                    self._stage_newest()
        finally:
            reader.close()

    def _read(self, reader: Reader) -> None:
        for record in reader.poll(1_000, self._config.poll_s):
            try:
                event = decode_record(record)
            except Refused as error:  # whoever consumes transactionally has it in dead-letters
                _log.warning("weights.event_refused", offset=record.offset, reason=error.reason)
                continue
            if isinstance(event, WeightVersion) and self._versions.add(event):
                self._retry_at = 0.0  # news may be the way out

    def _stage_newest(self) -> None:
        wanted = self._versions.newest
        held = self._held
        if wanted is None or (held is not None and held[0] == wanted):
            return
        if self._clock.monotonic_s() < self._retry_at:
            return
        base = held if held is not None and held[0].lineage == wanted.lineage else None
        entered: list[PathStep] = []
        started = self._clock.monotonic_s()
        try:
            path = plan_path(
                self._versions.events,
                None if base is None else base[0].version,
                wanted.version,
                avoid=self._avoid,
            )
            loaded = load_path(self._store, path, None if base is None else base[1], entering=entered.append)
        except (WeightError, ObjectMissing, ObjectConflict) as error:
            self._refuse(wanted, error, entered)
        except StoreError as error:
            self._later(f"version {wanted.version}: {error}")
        else:
            self._offer(wanted, loaded, (self._clock.monotonic_s() - started) * 1e3)

    def _offer(self, event: WeightVersion, loaded: Loaded, stage_ms: float) -> None:
        self._held = (event, loaded)
        self._avoid.clear()
        self._failures = 0
        with self._change:
            self._staged = Staged(event, loaded.state, stage_ms)
            self._problem = ""
            served = self._served
            self._change.notify_all()
        self._reports.add("staged", served, event, stage_ms=stage_ms)

    def _refuse(self, wanted: WeightVersion, error: Exception, entered: list[PathStep]) -> None:
        """The step that failed is left out of the next plan, which then leads over an anchor if there is one."""
        reason = f"{type(error).__name__}: {error}"
        with self._change:
            served = self._served
        self._reports.add("refused", served, wanted, reason=reason)
        if entered:
            self._avoid.add((entered[-1].event.version, entered[-1].full))
            self._note(reason)
        else:  # no way is left: everything gets another chance, later
            self._avoid.clear()
            self._later(reason)

    def _later(self, problem: str) -> None:
        self._failures += 1
        self._retry_at = self._clock.monotonic_s() + backoff(self._failures, self._config)
        self._note(problem)
        _log.warning("weights.stage_failed", problem=problem, failures=self._failures)

    def _note(self, problem: str) -> None:
        with self._change:
            self._problem = problem
