"""The demo from its first process to its last line: bring up, warm start, run, watch, stop, judge."""

from __future__ import annotations

import time

from rollwire.ops.demo.guards import interruptible, locked
from rollwire.ops.demo.judge import Outcome, judge
from rollwire.ops.demo.options import DemoOptions
from rollwire.ops.demo.phases import Running, run_of, running
from rollwire.ops.demo.watch import Watch

# The fleet is not among them: it starts when version 0 is measured, which would else be gone.
FIRST_ROLES = ("trainer", "evaluator", "monitor", "verifier", "pack", "assemble")
ENDING_ROLES = frozenset({"trainer", "evaluator"})


def run_demo(options: DemoOptions) -> Outcome:
    """Runs the demo to its end. Ctrl-C ends all processes within 10 s and raises `KeyboardInterrupt` on."""
    began = time.monotonic()
    folder, settings = run_of(options)
    with (
        locked(folder),
        interruptible(),
        running(options, folder, settings, began, ENDING_ROLES) as run,
    ):
        for role in FIRST_ROLES:
            run.start(role)
        _watch(run)
        run.end(("fleet",))
        run.view.phase("adding up the ledger")
        return judge(options, folder, settings, run.stack, run.log, began)


def _watch(run: Running) -> None:
    """Until the trainer has taken its last step, the evaluator has measured it and every replica serves it."""
    watch = Watch(run.log, run.settings)
    run.view.attach(run.stack, run.settings.prefix)
    supervisor = run.supervisor

    def done() -> bool:
        watch.poll()
        run.view.show(watch)
        if "fleet" not in supervisor.children and watch.measured(0):
            run.start("fleet")
        return watch.complete() and supervisor.finished("trainer") and supervisor.finished("evaluator")

    try:
        run.until(done, watch.progress, watch.describe)
    finally:
        watch.close()
