"""Runs `rollwire bench feedback`: a stack of its own in a temporary folder, all phases, the ledger, attribution.

feedback.single_ratio      singles acknowledged by the broker, over the same requests answered with an empty 204 by the same
                           server: closed loops, each at its best number of connections
feedback.single_per_s      these rates
feedback.batch_ratio       events in NDJSON batches of 500, over a bare producer of the same records (`bare.py`)
feedback.batch_per_s       these rates
feedback.p50_ms, .p99_ms, .p999_ms, .max_ms   singles at half the maximum, open loop, from the planned time to the 2xx
feedback.late_sends        of them, sent 5 ms or more after the planned time
feedback.<fault>.asked, .p50_ms, .p99_ms, .max_ms, .tries_again, .given_up   the same under a fault:
    burst                  from a fifth of the maximum to ten times that for 60 s, and back
    broker                 the broker stands still for 10 s
    redis                  Redis is killed, and started again
    kill                   the gateway is killed, and started again (`.start_s` later)
feedback.lost              answered with a 2xx and not in the topic, or not behind the stream's repeat check
feedback.repeated          there twice behind it; its baseline is how many distinct events there are
feedback.records_again     records of the topic beyond an event's first: retries whose first try was written after all
feedback.ledger_gap        largest |received - accepted - refused - shed - pending| of any look at the gateway's counters, twice
                           a second through all faults; and whatever it answered with a 2xx and did not count
ledger.gap, ledger.gap.<hour>, ledger.unclosed   what `rollwire audit ledger` finds in the topics: see `ops/ledger_figures.py`
ledger.live_gap            events that the gateway of the last life acknowledged and that are not in the topic, and those there
                           that it cannot have written; its baseline is how many it acknowledged
ledger.audit_per_s         events a second of that audit
feedback.stop_s            SIGTERM to the gateway's end
attribution.ratio          events a second of one worker, over a Faust agent with one table write an event (`faust_table.py`)
attribution.catchup        events a second after it was stopped for 60 s, over the rate at which they arrive meanwhile
attribution.start_s        its start to its first commit
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final, Literal

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from rollwire.consumers.audit import hours_live
from rollwire.consumers.audit.hours_count import count_hours
from rollwire.ops.bench.feedback import attribution, phases
from rollwire.ops.bench.feedback.attribution import Worker
from rollwire.ops.bench.feedback.counters import Watch, parse_counters
from rollwire.ops.bench.feedback.effects import EffectsOf
from rollwire.ops.bench.feedback.faust_table import run_table
from rollwire.ops.bench.feedback.ledger import TOPIC, count_topic
from rollwire.ops.bench.feedback.server import ServerProcess
from rollwire.ops.bench.feedback.stub_server import self_test
from rollwire.ops.bench.feedback.traffic import TENANT
from rollwire.ops.bench.streams_faust import FaustWorker
from rollwire.ops.figures import Figure
from rollwire.ops.ledger_figures import ledger_figures
from rollwire.ops.stack import StackInfo, running_stack
from rollwire.ops.stores import stack_store
from rollwire.ops.topics import apply_topics
from rollwire.producers.gateway.key_store import KeysConfig, change_table, new_secret
from rollwire.producers.gateway.keys import NewKey, add_key, shown
from rollwire.schemas.catalogue import TOPICS
from rollwire.schemas.errors import DeadlineExceeded, LogError
from rollwire.streams.attribution.config import GROUP
from rollwire.streams.seams.log import Log
from rollwire.streams.seams.log_kafka import KafkaLog

Part = Literal["all", "gateway", "attribution"]
PREFIX: Final = "rollwire."
_BARE: Final = "bare."
_ROLLWIRE: Final = (sys.executable, "-P", "-c", "from rollwire.ops.cli import main; main()")
_EMPTY: Final = (sys.executable, "-P", "-m", "rollwire.ops.bench.feedback.empty")


@contextmanager
def gateway_server(stack: StackInfo, folder: Path, prefix: str) -> Iterator[ServerProcess]:
    """The gateway as a deployment runs it: with API keys, its stack's Redis, and a process of its own."""
    command = (*_ROLLWIRE, "gateway", "--dir", str(stack.dir), "--prefix", prefix)
    server = ServerProcess(command, folder / "gateway.log", "/readyz")
    server.start()
    try:
        yield server
    finally:
        server.stop()


@contextmanager
def empty_server(folder: Path) -> Iterator[ServerProcess]:
    server = ServerProcess(_EMPTY, folder / "empty.log", "/")
    server.start()
    try:
        yield server
    finally:
        server.stop()


def new_key(stack: StackInfo) -> str:
    """An API key without a bound that matters."""
    key_id, secret = new_secret()
    now_us = time.time_ns() // 1_000
    store = stack_store(stack, None)
    store.ensure_bucket()
    new = NewKey(TENANT, ("feedback:write", "metrics"), rate=1e9, burst=1_000_000_000)
    change_table(
        store, KeysConfig().folder, lambda table: add_key(table, key_id, secret, new, now_us), now_us
    )
    return shown(key_id, secret, publishable=False)


def workers(stack: StackInfo, folder: Path) -> tuple[Worker, Worker]:
    """Attribution as `rollwire attribute` runs it, and the agent that it is measured against."""

    @contextmanager
    def ours(prefix: str) -> Iterator[Callable[[], None]]:
        command = (*_ROLLWIRE, "attribute", "--dir", str(stack.dir), "--prefix", prefix)
        server = ServerProcess(command, folder / "attribute.log", "/status")
        server.start()
        try:
            yield server.check
        finally:
            server.kill()

    @contextmanager
    def table(prefix: str) -> Iterator[Callable[[], None]]:
        with FaustWorker(stack.bootstrap, prefix, TOPICS[TOPIC].partitions, run_table) as worker:
            yield worker.check

    return (
        Worker("attribution", ours, lambda prefix: f"{prefix}{GROUP}"),
        Worker("table", table, lambda prefix: f"{prefix}faust"),
    )


def run_feedback(*, quick: bool, part: Part) -> list[Figure]:
    """The figures of the gateway, of attribution, or both. Raises `DeadlineExceeded` where the generator's self-test fails."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    sizes, chosen = (phases.QUICK, attribution.QUICK) if quick else (phases.FULL, attribution.FULL)
    steps = (part != "attribution") * (phases.steps(sizes) + 2) + (part != "gateway") * (
        2 * chosen.rounds + 1
    )
    figures: list[Figure] = []
    with (
        tempfile.TemporaryDirectory(prefix="rollwire-bench-") as name,
        Progress(*columns, console=Console(stderr=True)) as progress,
    ):
        line = progress.add_task("starting a stack", total=steps)

        def report(word: str) -> None:
            progress.update(line, description=word, advance=1)

        folder = Path(name)
        with running_stack(folder / "stack") as stack:
            if part != "attribution":
                report("trying the load generator on a server that stands still")
                seen = self_test()
                if not seen.honest:
                    raise DeadlineExceeded(
                        f"the load generator saw {seen.slow} slow asks and a maximum of {seen.max_ms:.0f} ms of a server "
                        f"that stood still for {seen.stopped_s:g} s: this machine is too busy to measure latency"
                    )
                figures += gateway_figures(stack, folder, sizes, report)
            if part != "gateway":
                ours, table = workers(stack, folder)
                bench = attribution.Bench(stack.bootstrap, report)
                figures += attribution.attribution_figures(bench, ours, table, chosen)
    return figures


def audit_figures(log: Log, prefix: str, exposition: str) -> list[Figure]:
    """The account of all topics by the hour. `exposition`: what the gateway showed when nothing came any more."""
    live = hours_live.parse_counters("the gateway", exposition)
    written = hours_live.Written(live)
    began_s = time.perf_counter()
    counted = count_hours(log, prefix, also=written.take)
    took_s = time.perf_counter() - began_s
    least = sum(one.written for one in live)
    most = least + sum(one.perhaps for one in live)
    apart = max(0, least - written.records, written.records - most)
    return [
        *ledger_figures(counted.ledger),
        Figure(name="ledger.live_gap", value=apart, unit="events", baseline=least),
        Figure(name="ledger.audit_per_s", value=counted.records / took_s, unit="events/s"),
    ]


def gateway_figures(
    stack: StackInfo, folder: Path, sizes: phases.Sizes, report: Callable[[str], None], prefix: str = PREFIX
) -> list[Figure]:
    """Every figure of the gateway, and its ledger over all phases."""
    bare_prefix = f"{_BARE}{prefix}"
    for one in (prefix, bare_prefix):
        apply_topics(stack.bootstrap, one)
    authorization = (("authorization", f"Bearer {new_key(stack)}"),)
    figures: list[Figure] = []
    with ExitStack() as opened:
        gateway = opened.enter_context(gateway_server(stack, folder, prefix))
        load = phases.Load(gateway, authorization, report)
        with empty_server(folder) as empty:
            found, maximum = phases.single_figures(load, empty, sizes)
        figures += found
        found, batches = phases.batch_figures(load, stack.bootstrap, bare_prefix, sizes)
        figures += found
        with Watch(lambda: gateway.get("/metrics")) as watch:
            figures += phases.steady_figures(load, maximum, sizes)
            figures += phases.burst_figures(load, maximum, sizes)
            figures += phases.flood_figures(load, batches, sizes)
            figures += phases.broker_figures(load, stack, maximum, sizes)
            figures += phases.redis_figures(load, stack, maximum, sizes)
            before = parse_counters(gateway.get("/metrics"))
            told = load.events()
            figures += phases.kill_figures(load, maximum, sizes)
        last = gateway.get("/metrics")
        after = parse_counters(last)
        stop_s = gateway.stop()
    report("adding up the ledger")
    log = KafkaLog(stack.bootstrap, prefix, client_id="bench")
    stream = EffectsOf(load.under_faults, log.partitions(TOPIC))
    ledger = count_topic(log, load.phases, stream.take)
    effects = stream.effects()
    figures += audit_figures(log, prefix, last)
    under_faults = sum(ledger.found[bodies.name] for bodies, _ in load.under_faults)
    if not watch.seen:
        raise LogError("the gateway's counters were never read")
    # What it counted as accepted, against what it was seen to answer; after the kill it counted anew.
    untold = max(0, told - before.accepted) + max(0, before.pending) + max(0, after.pending)
    return [
        *figures,
        Figure(name="feedback.stop_s", value=stop_s, unit="s"),
        # An event that the stream's own check lost is lost as well.
        Figure(
            name="feedback.lost",
            value=ledger.lost + ledger.unasked + abs(under_faults - effects.events) + effects.refused,
            unit="events",
        ),
        Figure(name="feedback.repeated", value=effects.repeated, unit="events", baseline=effects.events),
        Figure(name="feedback.events", value=ledger.distinct, unit="events"),
        Figure(name="feedback.records_again", value=ledger.again, unit="records"),
        Figure(
            name="feedback.ledger_gap",
            value=max([abs(before.gap), abs(after.gap), untold, *(abs(seen.gap) for seen in watch.gaps)]),
            unit="events",
        ),
    ]
