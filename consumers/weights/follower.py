"""Keeps a target at the version it should serve: stages and verifies while it serves, swaps, probes, and undoes what the
probe refuses. In a thread of its own; every failure ends in a report and another try, and the version before goes on serving.
"""

from __future__ import annotations

import structlog
from pydantic import BaseModel, ConfigDict, Field

from rollwire.consumers.weights.follow import NO_VERSION, Follow, FollowConfig, Wanted, own_channel
from rollwire.consumers.weights.following import Following
from rollwire.consumers.weights.parts import Choose
from rollwire.consumers.weights.probe import SAMPLES, Probe, draw_samples, probe_bits
from rollwire.consumers.weights.reader import Loaded
from rollwire.consumers.weights.staging import Failed, Got, Held, Staging, SubscriberConfig
from rollwire.consumers.weights.status import StatusReports
from rollwire.consumers.weights.targets.target import Healing, Rereadable, Target, Update
from rollwire.consumers.weights.update import Made, Maker
from rollwire.kernels.digest import StateDigest
from rollwire.schemas.errors import DeadlineExceeded, ProbeFailed, WeightError
from rollwire.schemas.records import Evaluation, Event, FleetState, WeightVersion
from rollwire.streams.seams.clock import Clock, SystemClock
from rollwire.streams.seams.log import Log
from rollwire.streams.seams.store import ObjectStore

_log = structlog.get_logger()


class FollowerConfig(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    subscriber: SubscriberConfig = Field(
        default=SubscriberConfig(), description="Reading the log, and pauses after failures."
    )
    samples: int = Field(
        default=SAMPLES, ge=0, description="Chunks that are read back after a swap and compared; 0 = none."
    )
    threads: int = Field(default=2, ge=1, description="Threads that decode a delta.")
    remind_s: float = Field(
        default=86_400.0,
        gt=0,
        description="Seconds after which what is served is reported once more: the topic forgets after a week, and the "
        "collector keeps what is served.",
    )
    heal_s: float = Field(
        default=2.0, gt=0, description="Seconds between two looks whether an engine was started anew."
    )


class Follower(Following):
    """One target, one replica. `serve` from then on until `close`.

    `lineage=None`: the one started last. `probe`: asked after each swap. `choose`: the parts of tensors that are held, of
    which `share` is about the share of the whole; the target's arrays are then parts as well.
    """

    def __init__(
        self,
        log: Log,
        store: ObjectStore,
        target: Target,
        *,
        fleet: str,
        replica: str,
        lineage: str | None = None,
        model: str | None = None,
        follow: FollowConfig | None = None,
        probe: Probe | None = None,
        choose: Choose | None = None,
        share: float = 1.0,
        clock: Clock | None = None,
        config: FollowerConfig | None = None,
    ) -> None:
        self._target = target
        self._probe = probe
        self._choose = choose
        self._clock = clock or SystemClock()
        self._settings = config or FollowerConfig()
        super().__init__(
            log,
            Follow(follow or FollowConfig(), own=own_channel(fleet, replica), lineage=lineage, model=model),
            Staging(
                store,
                self._clock,
                self._settings.subscriber,
                whole=choose is None,
                # Parts never go backwards; the planner takes a share below 1 for their sign.
                share=1.0 if choose is None else min(share, 0.999),
            ),
            StatusReports(log, fleet=fleet, replica=replica, clock=self._clock, target=target.name),
            self._settings.subscriber,
        )
        # Of the thread alone.
        self._held: Held | None = None  # what is known to the last bit, to build on
        self._rejected: WeightVersion | None = (
            None  # by the user's probe: not tried again until another is wanted
        )
        self._missing: tuple[str | None, int] | None = None  # was wanted and is not published; said once
        self._started = False
        self._heal_at = 0.0
        self._remind_at = 0.0
        self._whole = True  # the target answered when it was looked at last
        self._begin(f"follow-{replica}")

    @property
    def problem(self) -> str:
        """The last failure; "" once a version was served after it."""
        with self._change:
            return self._problem

    def wait_served(self, version: int, timeout_s: float) -> WeightVersion:
        """Waits until `version` is served and proved. Raises `DeadlineExceeded` with the last problem."""

        def there() -> bool:
            return self._served is not None and self._served.version == version

        with self._change:
            if self._change.wait_for(there, timeout_s) and self._served is not None:
                return self._served
            serving = "nothing" if self._served is None else f"version {self._served.version}"
            problem = f"; last problem: {self._problem}" if self._problem else ""
            raise DeadlineExceeded(
                f"version {version} was not served within {timeout_s:g} s: {serving} is{problem}"
            )

    def _heard(self, event: Event) -> None:
        if isinstance(event, Evaluation):  # promoted again: whatever the probe said before
            self._rejected = None

    def _ended(self) -> None:
        self._report("stopped", self.served)

    def _advance(self) -> None:
        self._approach()
        self._remind()

    def _approach(self) -> None:
        wanted = self._follow.wanted()
        if not self._started and not self._start(wanted):
            return
        if wanted.event is None:
            self._say_missing(wanted)
            return
        self._missing = None
        if wanted.event != self._rejected:
            self._rejected = None
        if wanted.event in (self.served, self._rejected) or not self._staging.due:
            self._heal(wanted)
            return
        made = self._staging.attempt(self._follow, wanted.event, self._held, self._maker())
        if isinstance(made, Failed):
            self._failed(wanted, made.reason, refused=made.refused)
        else:
            self._put(wanted, wanted.event, made)

    def _remind(self) -> None:
        if self.served is not None and self._clock.monotonic_s() >= self._remind_at:
            wanted = self._follow.wanted()
            self._report("swapped", wanted.event or self.served, channel=wanted.channel)

    def _heal(self, wanted: Wanted) -> None:
        """What serves may have been started anew, and serve what it was started with."""
        now = self._clock.monotonic_s()
        if self.served is None or not isinstance(self._target, Healing) or now < self._heal_at:
            return
        self._heal_at = now + self._settings.heal_s
        try:
            healed = self._target.heal()
        except WeightError as error:
            if self._whole:  # said once
                self._failed(wanted, f"{type(error).__name__}: {error}", refused=False)
            self._whole = False
            return
        if healed or not self._whole:
            self._report("swapped", self.served, channel=wanted.channel)
            with self._change:
                self._problem = ""
        self._whole = True

    def _start(self, wanted: Wanted) -> bool:
        """Whether the target has said what it serves: one that does not answer is asked again."""
        if not self._staging.due:
            return False
        try:
            self._take_over()
        except WeightError as error:
            self._staging.later()
            self._failed(wanted, f"{type(error).__name__}: {error}", refused=True)
            return False
        self._started = True
        return True

    def _maker(self) -> Maker:
        into = self._target.held()
        return Maker(into=into, choose=self._choose, threads=self._settings.threads)

    def _take_over(self) -> None:
        """What the target serves already is built on, where its bits are those of a version that is known."""
        said = self._target.serving()
        state = self._target.held() or None
        if state is None and said is not None and isinstance(self._target, Rereadable):
            try:
                state = self._target.reread()
            except WeightError as error:  # then it is written anew
                _log.warning("weights.not_reread", error=str(error))
        digest = StateDigest.of(state) if state is not None and self._choose is None else None
        event: WeightVersion | None = None
        if digest is not None:
            event = self._follow.with_digest(digest.hex, said)
        elif said is not None:
            event = self._follow.event(said.lineage, said.version)
            event = event if event is not None and event.state_digest == said.state_digest else None
        if event is None:
            return
        if state is not None and digest is not None:
            self._held = Held(event, Loaded(state, digest))
        with self._change:
            self._served = event
            self._change.notify_all()
        self._report("swapped", event)

    def _put(self, wanted: Wanted, event: WeightVersion, got: Got[Made]) -> None:
        """Stages, swaps, probes; keeps or undoes."""
        made, target = got.value, self._target
        in_place = target.held() is not None
        mirrored = made.change if not in_place else None  # the follower's own copy, which serves nobody
        try:
            if mirrored is not None:
                mirrored.apply()
            target.stage(Update(event, made.state, made.change if in_place else None, changed=made.changed))
            self._report(
                "staged", event, stage_ms=got.stage_ms, fetched=got.fetched_bytes, channel=wanted.channel
            )
            pause_ms = target.swap()
            self._probe_all(event, made)
        except Exception as error:  # noqa: BLE001  # the user's probe may raise anything: the version before must serve
            if mirrored is not None:
                mirrored.undo()
            self._back(wanted, error, in_place=in_place)
            return
        target.keep()
        held = target.held()
        state = made.state if held is None else held
        self._held = Held(event, Loaded(state, made.digest))
        self._staging.done()
        with self._change:
            self._served = event
            self._problem = ""
            self._change.notify_all()
        self._report(
            "swapped",
            event,
            stage_ms=got.stage_ms,
            pause_ms=pause_ms,
            fetched=got.fetched_bytes,
            channel=wanted.channel,
        )

    def _probe_all(self, event: WeightVersion, made: Made) -> None:
        samples = draw_samples(made.state, made.changed, seed=event.version, count=self._settings.samples)
        probe_bits(self._target, samples, made.state, made.digest)
        if self._probe is None:
            return
        try:
            self._probe(event)
        except Exception as error:
            self._rejected = event
            raise ProbeFailed(f"the probe refused version {event.version}: {error}") from error

    def _back(self, wanted: Wanted, error: Exception, *, in_place: bool) -> None:
        problem = f"{type(error).__name__}: {error}"
        try:
            self._target.undo()
        except Exception as lost:  # noqa: BLE001  # a device's runtime, say: nothing is known of what serves then
            problem += f"; and what served before does not serve: {lost}"
            if in_place:
                self._held = (
                    None  # its arrays may hold half of each: the next version is written over all of them
                )
            with self._change:
                self._served = None
        self._staging.later()
        self._failed(wanted, problem, refused=True)

    def _say_missing(self, wanted: Wanted) -> None:
        key = (wanted.lineage, wanted.version)
        if wanted.version == NO_VERSION or self._missing == key:
            return
        self._missing = key
        self._failed(
            wanted, f"version {wanted.version} is not published in lineage {wanted.lineage}", refused=True
        )

    def _failed(self, wanted: Wanted, reason: str, *, refused: bool) -> None:
        self._note(reason)
        _log.warning("weights.not_served", version=wanted.version, problem=reason)
        if refused:
            self._reports.add(
                "refused",
                self.served,
                wanted.event,
                reason=reason,
                channel=wanted.channel,
                wanted_version=wanted.version,
            )

    def _report(
        self,
        state: FleetState,
        wanted: WeightVersion | None,
        *,
        stage_ms: float = 0.0,
        pause_ms: float = 0.0,
        fetched: int = 0,
        channel: str = "",
    ) -> None:
        self._remind_at = self._clock.monotonic_s() + self._settings.remind_s
        self._reports.add(
            state,
            self.served,
            wanted,
            stage_ms=stage_ms,
            pause_ms=pause_ms,
            fetched_bytes=fetched,
            channel=channel,
        )
