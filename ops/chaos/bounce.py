"""`rollwire chaos bounce`: a known load through assemble, pack and a trainer, all of which and the broker are killed,
terminated and paused in turn, while one reader watches and another reads everything afterwards.

After Apache Kafka's own `transactions_test.py` and Kafka Streams' EOS system test: bounced copiers, a reader during
and one after, and aggregates that are known beforehand.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from rollwire.consumers.audit.hours import HourLedger
from rollwire.consumers.audit.hours_count import count_hours
from rollwire.consumers.ledger import Ledger, summed
from rollwire.ops.chaos.faults import BROKER, Fault, plan_faults
from rollwire.ops.chaos.processes import Death, Processes, Stop
from rollwire.ops.chaos.producer import Task, done, producer_command
from rollwire.ops.chaos.readers import Watcher, read_all
from rollwire.ops.chaos.retrained import judge_weights
from rollwire.ops.chaos.strike import Hit, Striker
from rollwire.ops.chaos.verdict import Sighting, Verdict, judge
from rollwire.ops.chaos.workload import LINEAGE, MODEL, SIZE, Known, Workload, known, timetable
from rollwire.ops.demo.guards import interruptible, undisturbed
from rollwire.ops.demo.supervisor import rollwire_command
from rollwire.ops.role_run import open_store
from rollwire.ops.settings import RunSettings, build_settings, save_settings
from rollwire.ops.stack import StackConfig, StackInfo, down, read_stack, up
from rollwire.ops.topics import apply_topics
from rollwire.schemas.errors import DeadlineExceeded, RollwireError
from rollwire.streams.seams.log_kafka import KafkaLog

RANKS: Final = 2
WORKERS: Final[dict[str, str]] = {  # name -> role
    "assemble-1": "assemble",
    "assemble-2": "assemble",
    "pack-1": "pack",
    "pack-2": "pack",
    "trainer": "arithmetic-trainer",
}
PRODUCER: Final = "producer"
_TICK_S: Final = 0.05
_FIRST_S: Final = 180.0  # until version 0 stands: processes start, import, take over
_STALL_S: Final = 90.0  # nothing moved for so long after the load's end: what is missing is lost
_OVERCOME_S: Final = 15.0
_LEAD_S: Final = 3.0  # from the producer's start to the first group
_PATIENCE_S: Final = 600.0  # of the reader that watches: longer than any outage here
_DRAIN_S: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BounceOptions:
    rollouts: int = 20_000
    seconds: float = 240.0  # from the first group to the last
    faults: int = 33
    seed: int = 0
    pause_s: float = 5.0  # of a SIGSTOP
    deadline_s: float = 90.0  # `assemble`'s, of a group: a broker on a busy machine is back long before
    groups_per_step: int = 10
    keep: bool = False  # logs and settings, also when all went well
    dir: Path | None = None  # of a running stack to use; None = one of its own, which ends with the run


@dataclass(slots=True)
class Outcome:
    """What came of a run."""

    options: BounceOptions
    known: Known
    folder: Path  # of logs and settings
    hits: list[Hit] = field(default_factory=list)
    recovered: dict[int, float] = field(default_factory=dict)  # fault -> seconds to the next version
    deaths: list[Death] = field(default_factory=list)
    stops: list[Stop] = field(default_factory=list)  # at the end
    during: Verdict | None = None
    after: Verdict | None = None
    ledger: Ledger | None = None
    hours: HourLedger | None = None  # the same by the hour
    unreadable: list[str] = field(default_factory=list)  # what the verdict could not be made of
    through: bool = False  # everything known was seen before the stall alarm
    seconds: float = 0.0

    @property
    def late_stops(self) -> int:
        return sum(hit.late for hit in self.hits) + sum(stop.late for stop in self.stops)

    @property
    def ok(self) -> bool:
        verdicts = (self.during, self.after)
        return (
            self.through
            and all(verdict is not None and not verdict.findings for verdict in verdicts)
            and self.ledger is not None
            and self.ledger.gap == 0
            and (self.hours is None or self.hours.exact)
            and self.late_stops == 0
            and len(self.hits) >= self.options.faults
        )


class Page:
    """Where a run tells what it does; this one says nothing."""

    def phase(self, text: str) -> None: ...

    def hit(self, hit: Hit, share: float) -> None: ...

    def say(self, text: str) -> None: ...

    def progress(self, steps: int, of: int) -> None: ...


def run_bounce(options: BounceOptions, page: Page | None = None) -> Outcome:
    """Runs it to its end. Ctrl-C ends every process it started and raises `KeyboardInterrupt` on.

    Raises what keeps it from running at all: `StackError`, `EnvironmentMissing`, `ProcessDied`, `DeadlineExceeded`
    (no version 0, a reader that stands still). What it finds is in the outcome.
    """
    page = Page() if page is None else page
    began = time.monotonic()
    name = f"bounce-{uuid.uuid4().hex[:8]}"
    own = options.dir is None
    root = Path(tempfile.mkdtemp(prefix="rollwire-bounce-")) if options.dir is None else options.dir
    folder = root / "chaos" / name
    folder.mkdir(parents=True)
    try:
        with interruptible(), _stack(root, own, page) as stack:
            outcome = _Run(options, stack, folder, name, page).run()
    except BaseException:
        page.say(f"logs are kept in {folder}")
        raise
    outcome.seconds = time.monotonic() - began
    if outcome.ok and not options.keep:
        shutil.rmtree(root if own else folder)
    return outcome


def targets(external: Collection[str]) -> tuple[str, ...]:
    """Who is hit. A broker that is not ours is left alone."""
    return (*WORKERS, PRODUCER) if "kafka" in external else (*WORKERS, PRODUCER, BROKER)


@contextmanager
def _stack(root: Path, own: bool, page: Page) -> Iterator[StackInfo]:
    if not own:
        yield read_stack(root)
        return
    page.phase("starting Kafka, S3 and Redis")
    try:
        yield up(StackConfig(dir=root), page.phase)
    finally:
        page.phase("stopping Kafka, S3 and Redis")
        with undisturbed():
            down(root)


class _Run:
    """Use once."""

    def __init__(self, options: BounceOptions, stack: StackInfo, folder: Path, name: str, page: Page) -> None:
        self._options = options
        self._stack = stack
        self._folder = folder
        self._page = page
        self._settings = bounce_settings(options, name)
        self._processes = Processes(folder / "logs")
        self._log = KafkaLog(stack.bootstrap, self._settings.prefix, "chaos-watcher", patience_s=_PATIENCE_S)
        self._outcome: Outcome | None = None
        self._waiting: dict[int, tuple[float, int]] = {}  # fault -> when it struck, versions seen by then
        self._watcher: Watcher | None = None
        self._last = (0.0, 0)  # when the last fault was over, versions seen by then

    def run(self) -> Outcome:
        apply_topics(self._stack.bootstrap, self._settings.prefix)
        open_store(self._stack, self._settings.bucket).probe()
        save_settings(self._folder, self._settings)
        watcher = self._watcher = Watcher(self._log)
        try:
            outcome = self._under_fire(watcher)
            self._judge(watcher, outcome)
            return outcome
        finally:
            watcher.close()
            self._log.close()

    def _under_fire(self, watcher: Watcher) -> Outcome:
        """From the first process to the end of the last; no process is left, whatever happens."""
        page = self._page
        striker = Striker(self._stack, self._processes, self._tend, self._options.pause_s)
        try:
            page.phase("starting the processes")
            for name, role in WORKERS.items():
                self._processes.start(name, role_command(role, self._folder, self._stack.dir))
            self._until(lambda: watcher.counts().get("weight-versions", 0) > 0, _FIRST_S, "version 0")
            load = self._load()
            outcome = self._outcome = Outcome(self._options, known(load), self._folder)
            task = Task(bootstrap=self._stack.bootstrap, prefix=self._settings.prefix, load=load)
            self._processes.start(PRODUCER, producer_command(task, self._folder))
            page.phase("under fire")
            if "kafka" in self._stack.external:
                page.say("the broker is not ours and is left alone: only processes are hit")
            self._fire(load, striker, outcome)
            page.phase("waiting for the last of the load")
            outcome.through = self._wait_through(load, outcome.known)
        finally:
            page.phase("stopping the processes")
            with undisturbed():
                striker.close()
                stops = self._processes.stop()
        outcome.stops = stops
        return outcome

    # -- the load -------------------------------------------------------------------------------------------------

    def _load(self) -> Workload:
        options = self._options
        groups = options.rollouts // SIZE
        return Workload(
            seed=options.seed,
            groups=groups,
            rate=groups * SIZE / options.seconds,
            begin_us=time.time_ns() // 1_000 + round(_LEAD_S * 1e6),
            deadline_s=options.deadline_s,
            horizon_s=self._settings.assemble.late_horizon_s,
            groups_per_step=options.groups_per_step,
        )

    # -- the fire -------------------------------------------------------------------------------------------------

    def _fire(self, load: Workload, striker: Striker, outcome: Outcome) -> None:
        """One fault after the other, each when its share of the load's time is over and the one before is overcome: what
        stands still cannot be hit in mid-flow. That is waited for `_OVERCOME_S` at most, and not behind the load's end.
        """
        faults = plan_faults(targets(self._stack.external), self._options.faults, self._options.seed)
        pause = threading.Event()
        for fault in faults:
            while self._since(load) < fault.at * load.duration_s or not self._overcome(load):
                self._tend()
                pause.wait(_TICK_S)
            self._strike(fault, striker, load, outcome)
            self._last = time.monotonic(), self._count("weight-versions")

    def _overcome(self, load: Workload) -> bool:
        """Whether a version came since the last fault was over, or is not to be waited for any longer."""
        over, versions = self._last
        return (
            self._count("weight-versions") > versions
            or time.monotonic() - over > _OVERCOME_S
            or self._since(load) > load.duration_s
        )

    def _strike(self, fault: Fault, striker: Striker, load: Workload, outcome: Outcome) -> None:
        self._waiting[fault.number] = (time.monotonic(), self._count("weight-versions"))
        hit = striker.strike(fault, self._since(load))
        outcome.hits.append(hit)
        self._page.hit(hit, self._count("group-fates") / max(1, len(outcome.known.groups)))

    def _tend(self) -> None:
        """Called in every wait: starts the dead again, looks at what has come."""
        for death in self._processes.tend():
            self._page.say(
                f"{death.name} ended with {death.how} and was started again: {death.log_end[:160]}"
            )
            if self._outcome is not None:
                self._outcome.deaths.append(death)
        versions = self._count("weight-versions")
        if self._outcome is None:
            return
        self._page.progress(max(0, versions - 1), self._outcome.known.steps)
        for number, (struck, before) in list(self._waiting.items()):
            if versions > before:
                self._outcome.recovered[number] = time.monotonic() - struck
                del self._waiting[number]

    def _wait_through(self, load: Workload, expected: Known) -> bool:
        """Until everything known was seen, or nothing has moved for `_STALL_S` after the last deadline."""
        records = len(timetable(load))
        pause = threading.Event()
        seen, moved = self._progress(), time.monotonic()
        while True:
            self._tend()
            now = self._progress()
            if done(self._folder) == records and self._all_seen(expected):
                return True
            if now != seen or self._since(load) < load.duration_s + load.deadline_s:
                seen, moved = now, time.monotonic()
            elif time.monotonic() - moved > _STALL_S:
                self._page.say(f"nothing moved for {_STALL_S:.0f} s: what is missing now is lost")
                return False
            pause.wait(_TICK_S)

    def _all_seen(self, expected: Known) -> bool:
        return (
            self._count("group-fates") >= len(expected.groups)
            and self._count("weight-versions") > expected.steps
            and self._watching().refused() >= expected.letters.keys()
        )

    def _progress(self) -> tuple[int, int]:
        return done(self._folder), sum(self._watching().counts().values())

    # -- the verdict ----------------------------------------------------------------------------------------------

    def _judge(self, watcher: Watcher, outcome: Outcome) -> None:
        """What cannot be read is said, and does not hide what can."""

        def during() -> None:
            outcome.during = self._verdict(watcher.drain(_DRAIN_S), outcome.known)

        def after() -> None:
            outcome.after = self._verdict(read_all(self._log), outcome.known)

        def ledger() -> None:
            outcome.hours = count_hours(self._log, self._settings.prefix).ledger
            outcome.ledger = summed(outcome.hours)

        for phase, read in (
            ("reading to the end", during),
            ("reading everything again", after),
            ("adding up the ledger", ledger),
        ):
            self._page.phase(phase)
            try:
                read()
            except RollwireError as error:
                outcome.unreadable.append(f"{phase}: {error}")

    @staticmethod
    def _verdict(sightings: list[Sighting], expected: Known) -> Verdict:
        verdict = judge(expected, sightings, lineage=LINEAGE, ranks=RANKS)
        weights = judge_weights(sightings, lineage=LINEAGE, ranks=RANKS)
        return verdict._replace(findings=(*verdict.findings, *weights))

    # -- small things ---------------------------------------------------------------------------------------------

    def _watching(self) -> Watcher:
        if self._watcher is None:
            raise DeadlineExceeded("the reader was not started")
        return self._watcher

    def _count(self, topic: str) -> int:
        return self._watching().counts().get(topic, 0)

    @staticmethod
    def _since(load: Workload) -> float:
        return time.time() - load.begin_us / 1e6

    def _until(self, holds: Callable[[], bool], seconds: float, what: str) -> None:
        deadline = time.monotonic() + seconds
        pause = threading.Event()
        while not holds():
            if time.monotonic() > deadline:
                raise DeadlineExceeded(
                    f"{what} did not come within {seconds:.0f} s; logs: {self._folder / 'logs'}"
                )
            self._tend()
            pause.wait(_TICK_S)


def role_command(role: str, folder: Path, stack: Path) -> tuple[str, ...]:
    """How to start a role of the run in `folder`."""
    return (*rollwire_command(), "run", role, "--run", str(folder), "--dir", str(stack))


def bounce_settings(options: BounceOptions, name: str) -> RunSettings:
    """The run's settings: nothing is stale, the trainer ends when it is stopped."""
    return build_settings(
        {
            "model": MODEL,
            "lineage": LINEAGE,
            "prefix": f"{name}.",
            "bucket": name,
            "steps": 1_000_000,
            "assemble": {
                "group_deadline_s": options.deadline_s,
                "late_horizon_s": 2 * options.deadline_s,
            },
            "pack": {
                "groups_per_step": options.groups_per_step,
                "token_budget": 256,
                "max_lag_versions": 1_000_000_000,
                "ranks": RANKS,
            },
            "fleet": {"max_open_groups": max(64, options.groups_per_step)},
            "trainer": {"ranks": RANKS, "checkpoint_every": 20},
        },
        where="chaos bounce",
    )
