"""The feedback demo from its first process to its last line."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rollwire.consumers.ledger import Ledger
from rollwire.ops.demo.checks import Check
from rollwire.ops.demo.feedback.checks import feedback_checks, feedback_figures
from rollwire.ops.demo.feedback.crowd import make_key
from rollwire.ops.demo.feedback.people import Told, read_told
from rollwire.ops.demo.feedback.tally import TOPICS, FeedbackFacts, FeedbackTally
from rollwire.ops.demo.feedback.watch import LIKES_OF, FeedbackWatch
from rollwire.ops.demo.guards import interruptible, locked
from rollwire.ops.demo.history import events
from rollwire.ops.demo.judge import counted_ledger
from rollwire.ops.demo.options import DemoOptions
from rollwire.ops.demo.phases import Running, run_of, running
from rollwire.ops.figures import write_figures
from rollwire.ops.keys import open_keys
from rollwire.ops.settings import RunSettings

ROLES: Final = (
    "trainer",
    "serving",
    "gateway",
    "attribute",
    "assemble-production",
    "pack",
    "monitor",
)
ENDING_ROLES: Final = frozenset({"trainer"})


@dataclass(frozen=True, slots=True)
class FeedbackOutcome:
    dir: Path
    folder: Path
    settings: RunSettings
    facts: FeedbackFacts
    told: Told
    ledger: Ledger
    checks: list[Check]
    wall_s: float

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks)


def run_feedback_demo(options: DemoOptions) -> FeedbackOutcome:
    """Runs the demo to its end. Ctrl-C ends all processes within 10 s and raises `KeyboardInterrupt` on."""
    began = time.monotonic()
    folder, settings = run_of(options)
    with (
        locked(folder),
        interruptible(),
        running(options, folder, settings, began, ENDING_ROLES, make_key) as run,
    ):
        for role in ROLES:
            run.start(role)
        _watch(run)
        run.end()
        run.view.phase("adding up the ledger")
        return _judge(run)


def _watch(run: Running) -> None:
    """Until the last version is trained, served and asked enough, and every answer has its reward."""
    settings, supervisor, view = run.settings, run.supervisor, run.view
    keys = open_keys(run.stack)
    watch = FeedbackWatch(run.log, settings, keys)
    view.attach(run.stack, settings.prefix)
    wanted = min(LIKES_OF, 4 * settings.pack.groups_per_step)

    def shown(done: bool) -> bool:
        view.show(watch)
        return done

    def asked_enough() -> bool:
        watch.poll()
        if "people" not in supervisor.children and watch.served >= 0:
            run.start("people")
        ready = watch.trained() and supervisor.finished("trainer")
        return shown(ready and watch.answers_of(settings.steps) >= wanted)

    def settled() -> bool:
        watch.poll()
        return shown(watch.rewarded())

    try:
        run.until(asked_enough, watch.progress, watch.describe)
        view.phase("people leave; the last windows close")
        supervisor.stop(("people",))
        run.until(settled, lambda: (len(watch.tally.rewards), len(watch.tally.answers)), watch.describe)
    finally:
        watch.close()


def _judge(run: Running) -> FeedbackOutcome:
    """Reads the topics once more from their beginning, and writes the figures into the run's folder."""
    settings, control = run.settings, run.settings.trainer.control
    with counted_ledger(run.folder, settings, run.stack) as counted:
        tally = FeedbackTally(open_keys(run.stack), settings.lineage, settings.serving.replica)
        for event in events(run.log, TOPICS):
            tally.add(event)
        facts, told = tally.facts(LIKES_OF), read_told(run.folder)
        ledger = counted()
    wall_s = time.monotonic() - run.began
    found = feedback_checks(
        facts,
        told,
        steps=settings.steps,
        max_lag=settings.pack.max_lag_versions,
        ledger_gap=ledger.gap,
        wall_s=wall_s,
        control=control,
    )
    figures = feedback_figures(facts, told, ledger_gap=ledger.gap, wall_s=wall_s, control=control)
    command = f"rollwire demo --feedback --seed {settings.seed}{' --control' if control else ''}"
    for path in filter(None, (run.folder / "demo.json", run.options.json_file)):
        write_figures(path, command, figures)
    return FeedbackOutcome(run.options.dir, run.folder, settings, facts, told, ledger, found, wall_s)
