"""The weights of a process that samples: follows the log, stages the wanted version, hands it out, reports what is served.

Everything that can fail happens in a thread of its own and ends in a report and another try; whoever samples goes on
with what it has. A version is offered only when its bytes, its base and its result proved right.
"""

from __future__ import annotations

import structlog

from rollwire.consumers.weights.follow import Follow, FollowConfig, Wanted, own_channel
from rollwire.consumers.weights.following import Following
from rollwire.consumers.weights.staging import Failed, Held, Staging, SubscriberConfig, backoff
from rollwire.consumers.weights.status import StatusReports
from rollwire.schemas.errors import DeadlineExceeded
from rollwire.schemas.records import WeightVersion
from rollwire.streams.seams.clock import Clock, SystemClock
from rollwire.streams.seams.log import Log
from rollwire.streams.seams.store import ObjectStore
from rollwire.streams.seams.weights import Staged

__all__ = ["SubscriberConfig", "WeightSubscriber", "backoff"]

_log = structlog.get_logger()


class WeightSubscriber(Following):
    """Implements `streams.seams.weights.WeightSource`. Starts following at once.

    `lineage=None` follows the lineage that was started last. States that it hands out are never written to. Of one lineage
    it never goes back to an older version; `follower.Follower` does.
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
        follow: FollowConfig | None = None,
    ) -> None:
        clock, config = clock or SystemClock(), config or SubscriberConfig()
        super().__init__(
            log,
            Follow(follow or FollowConfig(), own=own_channel(fleet, replica), lineage=lineage, model=model),
            Staging(store, clock, config),
            StatusReports(log, fleet=fleet, replica=replica, clock=clock),
            config,
        )
        # Of the thread alone.
        self._held: Held | None = None
        self._refused_older: WeightVersion | None = None  # said once
        # Shared, under the condition.
        self._staged: Staged | None = None
        self._fetched, self._channel = 0, ""  # of what is staged
        self._begin(f"weights-{replica}")

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
                f"no new version of lineage {self._follow.lineage} was staged within {timeout_s:g} s{problem}"
            )

    def swapped(self, staged: Staged, pause_ms: float, open_rollouts: int) -> None:
        """The sampler serves `staged` from now on. Never blocks, never fails."""
        with self._change:
            self._served = staged.event
            now = self._staged is not None and self._staged.event == staged.event
            fetched, channel = (self._fetched, self._channel) if now else (0, "")
        self._reports.add(
            "swapped",
            staged.event,
            staged.event,
            stage_ms=staged.stage_ms,
            pause_ms=pause_ms,
            open_rollouts=open_rollouts,
            fetched_bytes=fetched,
            channel=channel,
        )

    def stopped(self, open_rollouts: int) -> None:
        """The sampler stops. `close` writes the report."""
        served = self.served
        self._reports.add("stopped", served, served, open_rollouts=open_rollouts)

    def _news(self) -> Staged | None:
        staged = self._staged
        return None if staged is None or staged.event == self._served else staged

    def _advance(self) -> None:
        wanted = self._follow.wanted()
        held = self._held
        if wanted.event is None or (held is not None and held.event == wanted.event) or not self._staging.due:
            return
        if held is not None and _older(wanted.event, held.event):
            self._say_older(wanted, held.event)
            return
        outcome = self._staging.load(self._follow, wanted.event, held)
        if isinstance(outcome, Failed):
            self._failed(wanted, outcome)
            return
        self._held = Held(wanted.event, outcome.value)
        self._staging.done()
        with self._change:
            self._staged = Staged(wanted.event, outcome.value.state, outcome.stage_ms)
            self._fetched, self._channel = outcome.fetched_bytes, wanted.channel
            self._problem = ""
            served = self._served
            self._change.notify_all()
        self._reports.add(
            "staged",
            served,
            wanted.event,
            stage_ms=outcome.stage_ms,
            fetched_bytes=outcome.fetched_bytes,
            channel=wanted.channel,
        )

    def _say_older(self, wanted: Wanted, held: WeightVersion) -> None:
        """A rollout's spans never fall from one version to an older one: what runs has to end before."""
        if self._refused_older == wanted.event:
            return
        self._refused_older = wanted.event
        reason = f"version {wanted.version} is older than {held.version}: what samples goes back at its next start only"
        self._failed(wanted, Failed(reason, refused=True))

    def _failed(self, wanted: Wanted, failed: Failed) -> None:
        self._note(failed.reason)
        _log.warning("weights.stage_failed", problem=failed.reason)
        if failed.refused:
            self._reports.add(
                "refused", self.served, wanted.event, reason=failed.reason, channel=wanted.channel
            )


def _older(a: WeightVersion, b: WeightVersion) -> bool:
    return a.lineage == b.lineage and a.version < b.version
