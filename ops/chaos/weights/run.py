"""The whole matrix, on a real broker and a real S3 server: deaths of who publishes and of who follows, a store that breaks its
word, bad input, and kills at random."""

from __future__ import annotations

import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from rollwire.ops.chaos.s3_proxy import S3Proxy
from rollwire.ops.chaos.weights.effects import Crash
from rollwire.ops.chaos.weights.faults import DOWN, UP, down_cell, unfit_cell, up_cell
from rollwire.ops.chaos.weights.lives import Access, ForkedLives
from rollwire.ops.chaos.weights.matrix import (
    Bench,
    Result,
    crashes,
    judged,
    publisher_cell,
    replica_cell,
)
from rollwire.ops.stack import StackConfig, StackInfo, read_stack, running_stack
from rollwire.ops.topics import apply_topics
from rollwire.schemas.errors import ConfigError
from rollwire.streams.seams.log_kafka import KafkaLog
from rollwire.streams.seams.store_s3 import S3Store

# A call is given up soon, so that an outage of some seconds outlasts one.
_THROUGH_S: Final = 3.0


class MatrixOptions(NamedTuple):
    every: int = 1  # take each n-th cell of every part, for a short form
    kills: int = 20  # at random points, of a replica with a folder
    seed: int = 0
    dir: Path | None = None  # of a running stack to use; None = one of its own
    keep: bool = False  # logs, also when all went well


class Outcome(NamedTuple):
    results: tuple[Result, ...]
    folder: Path  # of logs
    seconds: float

    @property
    def failed(self) -> tuple[Result, ...]:
        return tuple(result for result in self.results if result.problem)

    @property
    def ok(self) -> bool:
        return bool(self.results) and not self.failed


def run_matrix(options: MatrixOptions, say: Callable[[Result], None] = lambda _: None) -> Outcome:
    """Runs it to its end; `say` hears of each cell. What a cell finds is in the outcome; raises what keeps the matrix from
    running at all: `StackError`, `EnvironmentMissing`, `ConfigError`."""
    began = time.monotonic()
    root = Path(tempfile.mkdtemp(prefix="rollwire-matrix-"))
    results: list[Result] = []
    with _stack(options.dir, root) as stack:
        for result in _cells(options, stack, root / "lives"):
            results.append(result)
            say(result)
    outcome = Outcome(tuple(results), root, time.monotonic() - began)
    if outcome.ok and not options.keep:
        shutil.rmtree(root)
    return outcome


@contextmanager
def _stack(dir: Path | None, root: Path) -> Iterator[StackInfo]:
    if dir is not None:
        yield read_stack(dir)
        return
    with running_stack(root / "stack", StackConfig()) as stack:
        yield stack


def _cells(options: MatrixOptions, stack: StackInfo, logs: Path) -> Iterator[Result]:
    if stack.s3_endpoint is None:
        raise ConfigError(
            "the matrix puts a proxy before the S3 server, so it needs one with an http address"
        )
    prefix = f"matrix-{uuid.uuid4().hex[:8]}."
    apply_topics(stack.bootstrap, prefix)
    access = Access(
        stack.bootstrap,
        prefix,
        stack.s3_endpoint,
        f"matrix-{uuid.uuid4().hex[:12]}",
        stack.access_key,
        stack.secret_key,
        stack.region,
    )
    keys = (access.access_key, access.secret_key, access.region)
    store = S3Store(access.endpoint, access.bucket, *keys)
    store.ensure_bucket()
    with ExitStack() as held:
        log = KafkaLog(stack.bootstrap, prefix=prefix, client_id="matrix")
        held.callback(log.close)
        lives = held.enter_context(ForkedLives(access, logs))
        proxy = held.enter_context(S3Proxy(stack.s3_endpoint))
        bench = Bench(lives, log, store)
        for part, cell in (("publish", publisher_cell), ("follow", replica_cell)):
            yield from crash_cells(part, bench, cell, options.every)
        through = S3Store(proxy.endpoint, access.bucket, *keys, timeout_s=_THROUGH_S)
        yield judged("store", "it ignores If-None-Match", partial(unfit_cell, proxy, access, through))
        for fault in UP[:: options.every]:
            yield judged("store, up", fault.name, partial(up_cell, bench, proxy, through, fault))
        for fault in DOWN[:: options.every]:
            yield judged("store, down", fault.name, partial(down_cell, bench, proxy, through, fault))


def crash_cells(
    part: str, bench: Bench, cell: Callable[[Bench, Crash | None], dict[str, int]], every: int = 1
) -> Iterator[Result]:
    """A life in which nobody dies, which tells the effects, and then a death at each of them."""
    seen: dict[str, int] = {}
    yield judged(part, "nobody dies", lambda: seen.update(cell(bench, None)))
    # Both sides of an effect stand side by side: an odd stride takes as many of each.
    for crash in crashes(seen)[:: every | 1]:
        yield judged(part, str(crash), partial(cell, bench, crash))
