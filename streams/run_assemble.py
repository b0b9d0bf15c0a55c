"""Drives `assemble`: one transactional loop for each partition; the processes of a prefix share the partitions out."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from rollwire.schemas.errors import LogUnavailable, SplitPair, TopicMismatch
from rollwire.streams.assemble import Assembler
from rollwire.streams.assemble_config import JoinConfig, Kind
from rollwire.streams.runtime import Drive, RuntimeConfig
from rollwire.streams.seams.clock import Clock, SystemClock
from rollwire.streams.seams.log import Log, SharedLog, TopicPartition
from rollwire.streams.workers import run_by_hand, run_shared


def run_assemble(
    log: SharedLog,
    config: JoinConfig,
    *,
    prefix: str,
    partitions: Sequence[int] | None = None,
    stop: threading.Event,
    clock: Clock | None = None,
    runtime: RuntimeConfig | None = None,
) -> None:
    """Assembles the groups of the config's kind until `stop` is set. `partitions`: those to work on, whatever others do; None = this process's share.

    Raises `TopicMismatch` where the joined topics differ in their partition counts, `SplitPair` for a partition of
    which only some of the joined topics were asked for or assigned, and what `run_step` raises: the first failure stops
    the other partitions.
    """
    clock = clock or SystemClock()
    runtime = runtime or RuntimeConfig()
    chosen = _patiently(partial(co_partitions, log, config.kind, partitions), runtime, stop, clock)
    if chosen is None:
        return
    if partitions is not None:
        run_by_hand(log, _drives(config, prefix, chosen), runtime, stop=stop, clock=clock)
        return
    topics = config.topics

    def plan(held: frozenset[TopicPartition]) -> Mapping[str, Drive]:
        return _drives(config, prefix, whole_pairs(held, topics))

    run_shared(log, f"{prefix}{config.kind.name}", topics, plan, runtime, stop=stop, clock=clock)


def drive(config: JoinConfig, prefix: str, partition: int) -> Drive:
    """What drives one partition: its ids on the broker and its state machine."""
    name = f"{prefix}{config.kind.name}"
    return Drive(f"{name}.{partition}", name, partial(Assembler, partition, config))


def whole_pairs(held: frozenset[TopicPartition], topics: Sequence[str]) -> list[int]:
    """The partitions of an assignment. Raises `SplitPair` where some of `topics` lack one that others have."""
    numbers = sorted({partition.partition for partition in held})
    for number in numbers:
        missing = [topic for topic in topics if TopicPartition(topic, number) not in held]
        if missing:
            raise SplitPair(
                f"partition {number} was assigned without {', '.join(missing)}: do all members of the group read "
                f"{', '.join(topics)}, with the `range` assignor?"
            )
    return numbers


def co_partitions(log: Log, kind: Kind, partitions: Sequence[int] | None) -> list[int]:
    """The partitions to work on, after proof that each has all halves of the join."""
    counts = {topic: log.partitions(topic) for topic in (*kind.joined, kind.closed)}
    if len(set(counts.values())) != 1:
        text = ", ".join(f"{topic} {count}" for topic, count in counts.items())
        raise TopicMismatch(
            f"joined topics must have equal partition counts: {text}; see `rollwire topics describe`"
        )
    count = counts[kind.closed]
    chosen = list(range(count)) if partitions is None else sorted(set(partitions))
    outside = [p for p in chosen if not 0 <= p < count]
    if outside or not chosen:
        raise SplitPair(
            f"partitions {outside or 'none'} were asked for, the joined topics have 0 to {count - 1}"
        )
    return chosen


def _drives(config: JoinConfig, prefix: str, partitions: Sequence[int]) -> dict[str, Drive]:
    drives = [drive(config, prefix, p) for p in partitions]
    return {one.transactional_id: one for one in drives}


def _patiently(
    ask: Callable[[], list[int]], config: RuntimeConfig, stop: threading.Event, clock: Clock
) -> list[int] | None:
    """Asks until the broker answers; None = stopped before. Raises the last `LogUnavailable` after the patience."""
    deadline = clock.monotonic_s() + config.patience_s
    while not stop.is_set():
        try:
            return ask()
        except LogUnavailable:
            if clock.monotonic_s() > deadline:
                raise
        stop.wait(config.backoff_s)
    return None
