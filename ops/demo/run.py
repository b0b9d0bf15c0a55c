"""The demo from its first process to its last line: bring up, warm start, run, watch, stop, judge."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rollwire.ops.demo.folders import latest_run, new_run
from rollwire.ops.demo.guards import interruptible, locked, undisturbed
from rollwire.ops.demo.history import announce, check_steps
from rollwire.ops.demo.judge import Outcome, judge
from rollwire.ops.demo.options import DemoOptions, new_settings, refuse_fixed, with_final
from rollwire.ops.demo.supervisor import Supervisor, rollwire_command, tail
from rollwire.ops.demo.view import View, open_view
from rollwire.ops.demo.watch import Watch
from rollwire.ops.registry import set_registry
from rollwire.ops.roles import open_store
from rollwire.ops.settings import RunSettings, load_settings, save_settings
from rollwire.ops.stack import StackConfig, StackInfo, down, up
from rollwire.ops.stack.info import find_stack
from rollwire.ops.stack.processes import is_alive
from rollwire.ops.topics import apply_topics
from rollwire.ops.warm import has_warm_start
from rollwire.schemas.errors import DeadlineExceeded, EnvironmentMissing
from rollwire.streams.seams.log_kafka import KafkaLog

# The fleet is not among them: it starts when version 0 is measured, which would else be gone.
FIRST_ROLES = ("trainer", "evaluator", "monitor", "verifier", "pack", "assemble")
ENDING_ROLES = frozenset({"warm-start", "trainer", "evaluator"})
STALL_S = 120.0  # no new step, evaluation or swap for so long: something is broken
WARM_START_S = 600.0


def run_demo(options: DemoOptions) -> Outcome:
    """Runs the demo to its end. Ctrl-C ends all processes within 10 s and raises `KeyboardInterrupt` on."""
    began = time.monotonic()
    folder, settings = _run_of(options)
    with locked(folder), interruptible():
        return _run(options, folder, settings, began)


def _run(options: DemoOptions, folder: Path, settings: RunSettings, began: float) -> Outcome:
    supervisor = Supervisor(folder / "logs", (*rollwire_command(), "run"), ENDING_ROLES)
    arguments = ("--run", str(folder), "--dir", str(options.dir))
    with open_view(plain=options.plain, settings=settings, began=began) as view, _children(supervisor, view):
        if not has_warm_start(settings):
            supervisor.start("warm-start", *arguments)
        view.phase("starting Kafka, S3 and Redis")
        # The processes end before what they talk to.
        with _stack(options.dir, view) as stack, _children(supervisor, view):
            set_registry(settings.schema_registry_url, settings.prefix)
            apply_topics(stack.bootstrap, settings.prefix)
            open_store(stack, settings.bucket).probe()
            log = KafkaLog(stack.bootstrap, prefix=settings.prefix, client_id="demo")
            try:
                check_steps(log, settings)
                save_settings(folder, settings)
                announce(log, settings)
                _wait_for_warm_start(supervisor, settings, folder, view)
                for role in FIRST_ROLES:
                    supervisor.start(role, *arguments)
                _watch(supervisor, settings, stack, log, view, arguments)
                view.phase("stopping the processes")
                killed = supervisor.stop(("fleet",)) + supervisor.stop()
                if killed:
                    view.say(f"did not stop within 10 s and had to be killed: {', '.join(killed)}")
                view.phase("adding up the ledger")
                return judge(options, folder, settings, stack, log, began)
            finally:
                log.close()


@contextmanager
def _stack(folder: Path, view: View) -> Iterator[StackInfo]:
    """A running stack is used and left as it was; one that the demo starts is ended with it."""
    known = find_stack(folder)
    was_running = known is not None and (
        bool(known.external) or any(is_alive(p.pid, p.started) for p in known.services.values())
    )
    info = up(StackConfig(dir=folder), view.phase)
    try:
        yield info
    finally:
        if not was_running:
            view.phase("stopping Kafka, S3 and Redis")
            with undisturbed():
                down(folder)


def _run_of(options: DemoOptions) -> tuple[Path, RunSettings]:
    """The folder and settings of the run to be made or continued, written down."""
    if options.resume:
        folder = latest_run(options.dir)
        settings = load_settings(folder)
        settings = with_final(settings, settings.steps if options.steps is None else options.steps)
        refuse_fixed(options)
    else:
        new_settings(options, "check")  # a wrong setting is refused before a folder is made
        folder = new_run(options.dir, options.kind)
        settings = new_settings(options, f"run-{folder.name[:4]}")
        save_settings(folder, settings)
    return folder, settings


@contextmanager
def _children(supervisor: Supervisor, view: View) -> Iterator[None]:
    """Whatever happens, no process outlives the demo."""
    try:
        yield
    finally:
        with undisturbed():
            killed = supervisor.stop()
        if killed:
            view.say(f"did not stop within 10 s and had to be killed: {', '.join(killed)}")


def _wait_for_warm_start(supervisor: Supervisor, settings: RunSettings, folder: Path, view: View) -> None:
    deadline = time.monotonic() + WARM_START_S
    pause = threading.Event()
    while "warm-start" in supervisor.children and not supervisor.finished("warm-start"):
        for line in supervisor.tend():
            view.say(line)
        view.warm_start(folder / "warm-start.json")
        if time.monotonic() > deadline:
            raise DeadlineExceeded(
                f"the warm start took longer than {WARM_START_S:.0f} s; the end of its log:\n"
                + tail(folder / "logs" / "warm-start.log")
            )
        pause.wait(0.2)
    if not has_warm_start(settings):
        raise EnvironmentMissing(
            f"the warm start left no file; its log:\n{tail(folder / 'logs' / 'warm-start.log')}"
        )


def _watch(
    supervisor: Supervisor,
    settings: RunSettings,
    stack: StackInfo,
    log: KafkaLog,
    view: View,
    arguments: tuple[str, ...],
) -> None:
    """Until the trainer has taken its last step, the evaluator has measured it and every replica serves it."""
    watch = Watch(log, settings)
    view.attach(stack, settings.prefix)
    pause = threading.Event()
    try:
        seen, deadline = watch.progress(), time.monotonic() + STALL_S
        while True:
            for line in supervisor.tend():
                view.say(line)
            watch.poll()
            view.show(watch)
            if "fleet" not in supervisor.children and watch.measured(0):
                supervisor.start("fleet", *arguments)
            if watch.complete() and supervisor.finished("trainer") and supervisor.finished("evaluator"):
                return
            if watch.progress() != seen:
                seen, deadline = watch.progress(), time.monotonic() + STALL_S
            elif time.monotonic() > deadline:
                raise DeadlineExceeded(
                    f"nothing moved for {STALL_S:.0f} s after {watch.describe()}; "
                    f"see the logs in {supervisor.logs}"
                )
            pause.wait(0.1)
    finally:
        watch.close()
