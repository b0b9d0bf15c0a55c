"""Drives `assemble`: one transactional loop for each partition, all in one process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from functools import partial

from rollwire.schemas.errors import LogUnavailable, SplitPair, TopicMismatch
from rollwire.streams.assemble import CLOSED, JOINED, NAME, AssembleConfig, Assembler
from rollwire.streams.runtime import Drive, RuntimeConfig, run_step
from rollwire.streams.seams.clock import Clock, SystemClock
from rollwire.streams.seams.log import Log


def run_assemble(
    log: Log,
    config: AssembleConfig,
    *,
    prefix: str,
    partitions: Sequence[int] | None = None,
    stop: threading.Event,
    clock: Clock | None = None,
    runtime: RuntimeConfig | None = None,
) -> None:
    """Assembles until `stop` is set; `partitions` None = all of them.

    Raises `TopicMismatch` where the joined topics differ in their partition counts, `SplitPair` for a partition that
    they do not have, and what `run_step` raises: the first failure stops the other partitions.
    """
    clock = clock or SystemClock()
    runtime = runtime or RuntimeConfig()
    chosen = _patiently(partial(co_partitions, log, partitions), runtime, stop)
    if chosen is None:
        return
    failed = threading.Event()
    until = _Either(stop, failed)
    with ThreadPoolExecutor(max_workers=len(chosen), thread_name_prefix=NAME) as pool:
        futures = [
            pool.submit(run_step, log, drive(config, prefix, p), runtime, stop=until, clock=clock)
            for p in chosen
        ]
        done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        failed.set()
    for future in (*done, *futures):
        future.result()


def drive(config: AssembleConfig, prefix: str, partition: int) -> Drive:
    """What drives one partition: its ids on the broker and its state machine."""
    return Drive(f"{prefix}{NAME}.{partition}", f"{prefix}{NAME}", partial(Assembler, partition, config))


def co_partitions(log: Log, partitions: Sequence[int] | None) -> list[int]:
    """The partitions to work on, after proof that each has all halves of the join."""
    counts = {topic: log.partitions(topic) for topic in (*JOINED, CLOSED)}
    if len(set(counts.values())) != 1:
        text = ", ".join(f"{topic} {count}" for topic, count in counts.items())
        raise TopicMismatch(
            f"joined topics must have equal partition counts: {text}; see `rollwire topics describe`"
        )
    count = counts[CLOSED]
    chosen = list(range(count)) if partitions is None else sorted(set(partitions))
    outside = [p for p in chosen if not 0 <= p < count]
    if outside or not chosen:
        raise SplitPair(
            f"partitions {outside or 'none'} were asked for, the joined topics have 0 to {count - 1}"
        )
    return chosen


def _patiently(
    ask: Callable[[], list[int]], config: RuntimeConfig, stop: threading.Event
) -> list[int] | None:
    """Asks until the broker answers; None = stopped before. Raises the last `LogUnavailable` after the patience."""
    deadline = time.monotonic() + config.patience_s
    while not stop.is_set():
        try:
            return ask()
        except LogUnavailable:
            if time.monotonic() > deadline:
                raise
        stop.wait(config.backoff_s)
    return None


class _Either(threading.Event):
    """Set when either of two events is; waits on the caller's."""

    def __init__(self, stop: threading.Event, failed: threading.Event) -> None:
        super().__init__()
        self._stop, self._failed = stop, failed

    def is_set(self) -> bool:
        return self._stop.is_set() or self._failed.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        return self._failed.is_set() or self._stop.wait(timeout)
