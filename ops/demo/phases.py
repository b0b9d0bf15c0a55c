"""What every demo goes through: its folder, the services, the warm start, and the end of all its processes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rollwire.ops.demo.feedback.recipe import settle
from rollwire.ops.demo.folders import latest_run, new_run
from rollwire.ops.demo.guards import undisturbed
from rollwire.ops.demo.history import announce, check_steps
from rollwire.ops.demo.options import (
    DemoOptions,
    new_settings,
    refuse_fixed,
    refuse_other_kind,
    with_final,
)
from rollwire.ops.demo.supervisor import Supervisor, rollwire_command, tail
from rollwire.ops.demo.view import View, open_view
from rollwire.ops.registry import set_registry
from rollwire.ops.role_run import open_store
from rollwire.ops.settings import RunSettings, load_settings, save_settings
from rollwire.ops.stack import StackConfig, StackInfo, down, up
from rollwire.ops.stack.info import find_stack
from rollwire.ops.stack.processes import is_alive
from rollwire.ops.topics import apply_topics
from rollwire.ops.warm import has_warm_start
from rollwire.schemas.errors import DeadlineExceeded, EnvironmentMissing
from rollwire.streams.seams.log_kafka import KafkaLog

WARM_START_S = 600.0
STALL_S = 120.0  # nothing moved for so long: something is broken


@dataclass(frozen=True, slots=True)
class Running:
    """A run whose services are up and whose warm start is there; its processes are started by whoever has this."""

    options: DemoOptions
    folder: Path
    settings: RunSettings
    began: float
    supervisor: Supervisor
    view: View
    stack: StackInfo
    log: KafkaLog

    def start(self, role: str) -> None:
        self.supervisor.start(role, "--run", str(self.folder), "--dir", str(self.options.dir))

    def end(self, *orders: tuple[str, ...]) -> None:
        """Ends the processes: those of each order at the same time, then all that are left."""
        self.view.phase("stopping the processes")
        killed = [role for order in orders for role in self.supervisor.stop(order)] + self.supervisor.stop()
        if killed:
            self.view.say(f"did not stop within 10 s and had to be killed: {', '.join(killed)}")

    def until(
        self, done: Callable[[], bool], progress: Callable[[], object], describe: Callable[[], str]
    ) -> None:
        """Looks after the processes until `done`, which is asked ten times a second.

        Raises `DeadlineExceeded` where `progress` stays what it was for `STALL_S`, `ProcessDied` where one ends again and again.
        """
        pause = threading.Event()
        seen, deadline = progress(), time.monotonic() + STALL_S
        while True:
            for line in self.supervisor.tend():
                self.view.say(line)
            if done():
                return
            if progress() != seen:
                seen, deadline = progress(), time.monotonic() + STALL_S
            elif time.monotonic() > deadline:
                raise DeadlineExceeded(
                    f"nothing moved for {STALL_S:.0f} s after {describe()}; see the logs in {self.supervisor.logs}"
                )
            pause.wait(0.1)


def run_of(options: DemoOptions) -> tuple[Path, RunSettings]:
    """The folder and settings of the run to be made or continued, written down."""
    if options.resume:
        folder = latest_run(options.dir)
        settings = load_settings(folder)
        refuse_fixed(options)
        refuse_other_kind(options, settings)
        settings = with_final(settings, settings.steps if options.steps is None else options.steps)
    else:
        new_settings(options, "check")  # a wrong setting is refused before a folder is made
        folder = new_run(options.dir, options.kind)
        settings = new_settings(options, f"run-{folder.name[:4]}")
        if options.feedback:
            settings = settle(folder, settings)
        save_settings(folder, settings)
    return folder, settings


@contextmanager
def running(
    options: DemoOptions,
    folder: Path,
    settings: RunSettings,
    began: float,
    ending: frozenset[str],
    prepare: Callable[[Path, RunSettings, StackInfo], None] | None = None,
) -> Iterator[Running]:
    """`ending`: the roles that end by themselves. `prepare` is called before any process of the run starts. Whatever
    happens inside, no process outlives it."""
    supervisor = Supervisor(folder / "logs", (*rollwire_command(), "run"), ending | {"warm-start"})
    with open_view(plain=options.plain, settings=settings, began=began) as view, children(supervisor, view):
        if not has_warm_start(settings):
            supervisor.start("warm-start", "--run", str(folder), "--dir", str(options.dir))
        view.phase("starting Kafka, S3 and Redis")
        # The processes end before what they talk to.
        with running_stack(options.dir, view) as stack, children(supervisor, view):
            set_registry(settings.schema_registry_url, settings.prefix)
            apply_topics(stack.bootstrap, settings.prefix)
            open_store(stack, settings.bucket).probe()
            log = KafkaLog(stack.bootstrap, prefix=settings.prefix, client_id="demo")
            try:
                check_steps(log, settings)
                save_settings(folder, settings)
                announce(log, settings)
                if prepare is not None:
                    prepare(folder, settings, stack)
                _wait_for_warm_start(supervisor, settings, folder, view)
                yield Running(options, folder, settings, began, supervisor, view, stack, log)
            finally:
                log.close()


@contextmanager
def running_stack(folder: Path, view: View) -> Iterator[StackInfo]:
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


@contextmanager
def children(supervisor: Supervisor, view: View) -> Iterator[None]:
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
