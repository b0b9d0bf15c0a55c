"""Runs `rollwire bench feedback`: a stack of its own in a temporary folder, all phases, the ledger, attribution."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final, Literal

from rollwire.ops.bench.feedback import phases
from rollwire.ops.bench.feedback.counters import Watch, parse_counters
from rollwire.ops.bench.feedback.ledger import count_topic
from rollwire.ops.bench.feedback.server import ServerProcess
from rollwire.ops.bench.feedback.traffic import TENANT
from rollwire.ops.figures import Figure
from rollwire.ops.stack import StackInfo
from rollwire.ops.stores import stack_store
from rollwire.ops.topics import apply_topics
from rollwire.producers.gateway.key_store import KeysConfig, change_table, new_secret
from rollwire.producers.gateway.keys import NewKey, add_key, shown
from rollwire.schemas.errors import LogError
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
        figures += phases.batch_figures(load, stack.bootstrap, bare_prefix, sizes)
        with Watch(lambda: gateway.get("/metrics")) as watch:
            figures += phases.steady_figures(load, maximum, sizes)
            figures += phases.burst_figures(load, maximum, sizes)
            figures += phases.broker_figures(load, stack, maximum, sizes)
            figures += phases.redis_figures(load, stack, maximum, sizes)
            before = parse_counters(gateway.get("/metrics"))
            told = load.events()
            figures += phases.kill_figures(load, maximum, sizes)
        after = parse_counters(gateway.get("/metrics"))
        stop_s = gateway.stop()
    report("adding up the ledger")
    ledger = count_topic(KafkaLog(stack.bootstrap, prefix, client_id="bench"), load.phases)
    if not watch.seen:
        raise LogError("the gateway's counters were never read")
    # What it counted as accepted, against what it was seen to answer; after the kill it counted anew.
    untold = max(0, told - before.accepted) + max(0, before.pending) + max(0, after.pending)
    return [
        *figures,
        Figure(name="feedback.stop_s", value=stop_s, unit="s"),
        Figure(name="feedback.lost", value=ledger.lost + ledger.unasked, unit="events"),
        Figure(name="feedback.events", value=ledger.distinct, unit="events"),
        Figure(name="feedback.records_again", value=ledger.again, unit="records"),
        Figure(
            name="feedback.ledger_gap",
            value=max([abs(before.gap), abs(after.gap), untold, *(abs(seen.gap) for seen in watch.gaps)]),
            unit="events",
        ),
    ]
