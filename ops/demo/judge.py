"""What a run came to: the tally, the ledger, the picture, the checks and the figures."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from rollwire.consumers.ledger import Ledger
from rollwire.ops.demo.checks import Check, checks, figures
from rollwire.ops.demo.curves import draw_curves
from rollwire.ops.demo.history import events
from rollwire.ops.demo.options import DEFAULT_ENVIRONMENT, DemoOptions
from rollwire.ops.demo.supervisor import child_environment, rollwire_command, tail
from rollwire.ops.demo.tally import RunFacts, Tally
from rollwire.ops.figures import write_figures
from rollwire.ops.settings import RunSettings
from rollwire.ops.stack import StackInfo
from rollwire.producers.environments.known import make_environment
from rollwire.schemas.errors import DeadlineExceeded, StackError
from rollwire.streams.seams.log_kafka import KafkaLog

LEDGER_S = 300.0
TALLY_TOPICS = ("train-steps", "weight-versions", "evaluations", "fleet-status", "group-fates", "rollouts")


@dataclass(frozen=True, slots=True)
class Outcome:
    dir: Path
    folder: Path
    settings: RunSettings
    facts: RunFacts
    ledger: Ledger
    checks: list[Check]
    wall_s: float
    picture: Path

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks)


def judge(
    options: DemoOptions, folder: Path, settings: RunSettings, stack: StackInfo, log: KafkaLog, began: float
) -> Outcome:
    """Reads the run's topics, draws the picture and writes the figures into the run's folder."""
    environment, control = make_environment(settings.environment), settings.trainer.control
    # Tally and ledger both read all rollouts: side by side they take half the time.
    with counted_ledger(folder, settings, stack) as counted:
        tally = Tally(
            held_out_ids=environment.problems(held_out=True),
            lineage=settings.lineage,
            fleet=settings.fleet.fleet,
        )
        for event in events(log, TALLY_TOPICS):
            tally.add(event)
        if tally.tool_tokens:
            for event in events(log, ("packed-batches",)):
                tally.add(event)
        facts = tally.facts(settings.environment)
        picture = folder / "curves.png"
        draw_curves(tally, settings.environment, picture, _title(settings))
        ledger = counted()
    wall_s = time.monotonic() - began
    found = checks(
        facts,
        environment=settings.environment,
        steps=settings.steps,
        max_lag=settings.pack.max_lag_versions,
        ledger_gap=ledger.gap,
        wall_s=wall_s,
        control=control,
    )
    results = figures(facts, ledger_gap=ledger.gap, wall_s=wall_s, control=control)
    for path in filter(None, (folder / "demo.json", options.json_file)):
        write_figures(path, _command(settings), results)
    return Outcome(options.dir, folder, settings, facts, ledger, found, wall_s, picture)


@contextmanager
def counted_ledger(folder: Path, settings: RunSettings, stack: StackInfo) -> Iterator[Callable[[], Ledger]]:
    """`rollwire ledger` on the run for as long as the block lasts; what it gives waits for the account."""
    account, output = folder / "ledger.json", folder / "logs" / "ledger.log"
    account.unlink(missing_ok=True)
    command = [
        *rollwire_command(),
        *("ledger", "--bootstrap", stack.bootstrap, "--prefix", settings.prefix, "--json", str(account)),
        *(("--schema-registry", settings.schema_registry_url) if settings.schema_registry_url else ()),
    ]
    with output.open("wb") as out:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=child_environment(os.environ),
        )

    def wait() -> Ledger:
        try:
            process.wait(LEDGER_S)
        except subprocess.TimeoutExpired:
            raise DeadlineExceeded(
                f"the ledger was not added up within {LEDGER_S:.0f} s; see {output}"
            ) from None
        if not account.exists():
            raise StackError(f"the ledger could not be added up:\n{tail(output)}")
        return msgspec.json.decode(account.read_bytes(), type=Ledger)

    try:
        yield wait
    finally:
        process.kill()
        process.wait()


def _command(settings: RunSettings) -> str:
    """What begins such a run, the settings apart that `--set` gave."""
    environment = (
        f" --environment {settings.environment}" if settings.environment != DEFAULT_ENVIRONMENT else ""
    )
    control = " --control" if settings.trainer.control else ""
    return f"rollwire demo --seed {settings.seed}{environment}{control}"


def _title(settings: RunSettings) -> str:
    kind = "control, advantages shuffled" if settings.trainer.control else "GRPO"
    return f"Rollwire demo: {settings.environment}, {kind}, seed {settings.seed}, {settings.steps} steps"
