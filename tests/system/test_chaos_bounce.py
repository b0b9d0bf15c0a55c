"""The short form of `rollwire chaos bounce`, and stops while the broker answers nobody."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rollwire.ops.chaos.bounce import BounceOptions, Outcome, bounce_settings, role_command, run_bounce
from rollwire.ops.chaos.processes import Processes
from rollwire.ops.chaos.producer import Task, producer_command
from rollwire.ops.chaos.readers import Watcher
from rollwire.ops.chaos.report import figures, print_outcome
from rollwire.ops.chaos.workload import Workload
from rollwire.ops.role_run import open_store
from rollwire.ops.settings import save_settings
from rollwire.ops.stack import StackInfo, read_stack
from rollwire.ops.topics import apply_topics
from rollwire.streams.seams.log_kafka import KafkaLog

pytestmark = pytest.mark.system

WAIT_S = 180.0


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come within {WAIT_S:g} s"


def test_nothing_is_lost_repeated_or_torn_in_a_short_bounce(stack: StackInfo) -> None:
    """Its four faults hit an assemble, a pack, the trainer and the broker, each in another way."""
    options = BounceOptions(
        rollouts=600, seconds=20.0, faults=4, seed=367, deadline_s=120.0, groups_per_step=6, dir=stack.dir
    )
    outcome: Outcome = run_bounce(options)
    print_outcome(outcome)
    assert {hit.fault.whom.split("-")[0] for hit in outcome.hits} == {"assemble", "pack", "trainer", "broker"}
    assert {hit.fault.how for hit in outcome.hits} == {"kill -9", "SIGTERM", "SIGSTOP"}
    assert outcome.ok
    values = {figure.name: figure.value for figure in figures(outcome)}
    assert {values[f"bounce.{what}"] for what in ("lost", "repeated", "torn", "wrong")} == {0}
    assert (values["bounce.rollouts"], values["bounce.faults"]) == (600, 4)
    assert not outcome.folder.exists()


def test_every_process_stops_within_ten_seconds_while_the_broker_stands_still(
    stack: StackInfo, tmp_path: Path
) -> None:
    """Law 8, under load: there is a transaction under way in each of them when the broker stops answering."""
    name = f"stop-{os.getpid()}-{time.monotonic_ns()}"
    settings = bounce_settings(BounceOptions(), name)
    apply_topics(stack.bootstrap, settings.prefix)
    open_store(stack, settings.bucket).probe()
    save_settings(tmp_path, settings)
    log = KafkaLog(stack.bootstrap, settings.prefix, "test-stop")
    watcher = Watcher(log)
    processes = Processes(tmp_path / "logs")
    broker = read_stack(stack.dir).services["kafka"].pid
    try:
        for role in ("assemble", "pack", "arithmetic-trainer", "verifier"):
            processes.start(role, role_command(role, tmp_path, stack.dir))
        until(lambda: watcher.counts().get("weight-versions", 0) > 0, "version 0")
        load = Workload(
            seed=1, groups=2_000, rate=200.0, begin_us=time.time_ns() // 1_000, deadline_s=45.0, horizon_s=90.0,
            groups_per_step=settings.pack.groups_per_step,
        )  # fmt: skip
        task = Task(bootstrap=stack.bootstrap, prefix=settings.prefix, load=load)
        processes.start("producer", producer_command(task, tmp_path))
        until(lambda: watcher.counts().get("weight-versions", 0) > 3, "version 3")
        assert processes.tend() == []
        os.kill(broker, signal.SIGSTOP)
        try:
            stops = processes.stop()
        finally:
            os.kill(broker, signal.SIGCONT)
    finally:
        processes.stop()
        watcher.close()
        log.close()
    assert len(stops) == 5
    assert [stop for stop in stops if stop.late] == []
