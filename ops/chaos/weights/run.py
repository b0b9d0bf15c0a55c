"""The whole matrix, on a real broker and a real S3 server: deaths of who publishes and of who follows, a store that breaks its
word, bad input, and kills at random."""

from __future__ import annotations

import random
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Final, NamedTuple

from rollwire.ops.chaos.s3_proxy import S3Proxy
from rollwire.ops.chaos.weights.effects import Crash
from rollwire.ops.chaos.weights.faults import DOWN, UP, down_cell, unfit_cell, up_cell
from rollwire.ops.chaos.weights.inputs import (
    INPUTS,
    OTHER_TENSORS,
    publisher_input_cell,
    replica_input_cell,
)
from rollwire.ops.chaos.weights.judge import NotReached
from rollwire.ops.chaos.weights.lives import Access, ForkedLives, Lives
from rollwire.ops.chaos.weights.matrix import (
    Bench,
    Result,
    collector_cell,
    crashes,
    judged,
    publisher_cell,
    replica_cell,
)
from rollwire.ops.chaos.weights.targets import FAILURES, KINDS, Failure, Kind
from rollwire.ops.stack import StackConfig, StackInfo, read_stack, running_stack
from rollwire.ops.topics import apply_topics
from rollwire.schemas.errors import ConfigError
from rollwire.streams.seams.log_kafka import KafkaLog
from rollwire.streams.seams.store_s3 import S3Store

# A call is given up soon, so that an outage of some seconds outlasts one.
_THROUGH_S: Final = 3.0
_TRIES: Final = 3


class MatrixOptions(NamedTuple):
    every: int = 1  # take each n-th cell of every part, for a short form
    kills: int = 20  # at random points, of a replica with a folder
    seed: int = 0
    dir: Path | None = None  # of a running stack to use; None = one of its own
    keep: bool = False  # logs, also when all went well
    jobs: int = 3  # cells with a death in them that run side by side: most of one is waiting


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
    if stack.s3_endpoint is None or not stack.s3_endpoint.startswith("http://"):
        raise ConfigError(
            "the matrix puts a proxy before the S3 server, so it needs one with an http address"
        )
    every, jobs = options.every, options.jobs
    access = _access(stack)
    with (
        S3Proxy(stack.s3_endpoint) as proxy,
        ForkedLives(access, logs) as lives,
        _bench(access, lives) as bench,
    ):

        def fresh() -> AbstractContextManager[Bench]:
            elsewhere = _access(stack)
            return _bench(elsewhere, lives.at(elsewhere))

        yield from publisher_cells(bench, every, jobs)
        yield from replica_cells(bench, logs.parent / "folders", every, jobs)
        yield from crash_cells("collect", bench, partial(collector_cell, fresh), every, jobs)
        yield from killed_cells(bench, logs.parent / "killed", options.kills, options.seed, jobs)
        yield from input_cells(bench, every, jobs)
        keys = (access.access_key, access.secret_key, access.region)
        through = S3Store(proxy.endpoint, access.bucket, *keys, timeout_s=_THROUGH_S)
        yield judged("store", "it ignores If-None-Match", partial(unfit_cell, proxy, access, through))
        for fault in UP[::every]:
            yield judged("store, up", fault.name, partial(up_cell, bench, proxy, through, fault))
        for fault in DOWN[::every]:
            yield judged("store, down", fault.name, partial(down_cell, bench, proxy, through, fault))


def _access(stack: StackInfo) -> Access:
    """Topics and a bucket that nobody else uses."""
    name = f"matrix-{uuid.uuid4().hex[:12]}"
    apply_topics(stack.bootstrap, f"{name}.")
    keys = (stack.access_key, stack.secret_key, stack.region)
    S3Store(stack.s3_endpoint, name, *keys).ensure_bucket()
    return Access(stack.bootstrap, f"{name}.", stack.s3_endpoint, name, *keys)


@contextmanager
def _bench(access: Access, lives: Lives) -> Iterator[Bench]:
    log = KafkaLog(access.bootstrap, prefix=access.prefix, client_id="matrix")
    try:
        yield Bench(
            lives,
            log,
            S3Store(access.endpoint, access.bucket, access.access_key, access.secret_key, access.region),
        )
    finally:
        log.close()


def publisher_cells(bench: Bench, every: int = 1, jobs: int = 1) -> Iterator[Result]:
    """Deaths of who publishes, and of who goes on after a death."""
    yield from crash_cells("publish", bench, publisher_cell, every, jobs)
    context = partial(publisher_cell, coder="context")
    yield from crash_cells("publish, context", bench, context, every, jobs)
    first = Crash("commit", 3, "after")
    yield from crash_cells("publish again", bench, partial(publisher_cell, first=first), every, jobs)


def replica_cells(bench: Bench, folders: Path, every: int = 1, jobs: int = 1) -> Iterator[Result]:
    """Deaths of a process that samples, and of followers of each kind of target; and targets that fail them."""
    yield from crash_cells("follow", bench, replica_cell, every, jobs)
    number = count()

    def cell(
        kind: Kind,
        bench: Bench,
        crash: Crash | None,
        failure: Failure | None = None,
        first: Crash | None = None,
    ) -> dict[str, int]:
        folder = folders / str(next(number)) if kind == "folder" else None
        if folder is not None:
            folder.mkdir(parents=True)
        return replica_cell(bench, crash, kind, folder=folder, failure=failure, first=first)

    for kind in KINDS:
        yield from crash_cells(f"serve, {kind}", bench, partial(cell, kind), every, jobs)
        failures = [
            (f"its target fails: {failure}", partial(cell, kind, bench, None, failure))
            for failure in FAILURES
        ]
        yield from side_by_side(f"serve, {kind}", failures, jobs)
    # Only a folder outlives its process: a life after a death finds it, reads it again and goes on from there.
    again = partial(cell, "folder", first=Crash("swap 2", 1, "after"))
    yield from crash_cells("serve again, folder", bench, again, every, jobs)


def input_cells(bench: Bench, every: int = 1, jobs: int = 1) -> Iterator[Result]:
    """What is wrong with what a trainer hands in, and with what a replica is given."""
    handed = [(name, partial(publisher_input_cell, bench, name)) for name in OTHER_TENSORS]
    yield from side_by_side("input, publish", handed[::every], jobs)
    given = [(bad.name, partial(replica_input_cell, bench, bad)) for bad in INPUTS]
    yield from side_by_side("input, serve", given[::every], jobs)


def killed_cells(bench: Bench, folders: Path, kills: int, seed: int, jobs: int = 1) -> Iterator[Result]:
    """Kills at random points of the time that a life takes: of followers that write a folder (C34), and half as many of
    who publishes."""
    rng = random.Random(seed)  # an order of tests, not a secret

    def serving(number: str, kill_s: float | None) -> None:
        folder = folders / number
        folder.mkdir(parents=True)
        replica_cell(bench, None, "folder", folder=folder, kill_s=kill_s)

    parts: tuple[tuple[str, int, Callable[[str, float | None], object]], ...] = (
        ("kill -9, folder", kills, serving),
        ("kill -9, publish", (kills + 1) // 2, lambda _, kill_s: publisher_cell(bench, None, kill_s=kill_s)),
    )
    for part, times, cell in parts:
        if times:
            whole = judged(part, "nobody dies", partial(cell, "whole", None))
            yield whole
            points = [rng.uniform(0.0, whole.seconds) for _ in range(times)]
            cells = [
                (f"at random, after {kill_s:.3f} s", partial(cell, str(number), kill_s))
                for number, kill_s in enumerate(points)
            ]
            yield from side_by_side(part, cells, jobs)


def crash_cells(
    part: str,
    bench: Bench,
    cell: Callable[[Bench, Crash | None], dict[str, int]],
    every: int = 1,
    jobs: int = 1,
) -> Iterator[Result]:
    """A life in which nobody dies, which tells the effects, and then a death at each of them."""
    seen: dict[str, int] = {}
    yield judged(part, "nobody dies", lambda: seen.update(cell(bench, None)))
    # Both sides of an effect stand side by side: an odd stride takes as many of each.
    taken = crashes(seen)[:: every | 1]
    cells = [(str(crash), partial(_reached, cell, bench, crash)) for crash in taken]
    yield from side_by_side(part, cells, jobs)


def _reached(
    cell: Callable[[Bench, Crash | None], dict[str, int]], bench: Bench, crash: Crash
) -> dict[str, int]:
    """The cell, again where a life did not come by its effect: work in the background may be passed over."""
    for _ in range(_TRIES - 1):
        with suppress(NotReached):
            return cell(bench, crash)
    return cell(bench, crash)


def side_by_side(part: str, cells: Sequence[tuple[str, Callable[[], object]]], jobs: int) -> Iterator[Result]:
    """The results of the cells, in their order."""
    if jobs == 1:
        for name, cell in cells:
            yield judged(part, name, cell)
        return
    with ThreadPoolExecutor(jobs, thread_name_prefix="cell") as pool:
        yield from pool.map(lambda named: judged(part, *named), cells)
