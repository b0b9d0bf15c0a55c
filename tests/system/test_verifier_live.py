"""Fleet and verifier on the real broker: kill -9 and SIGTERM of the verifier, a restart of the broker under both."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from rollwire.ops.stack import StackInfo, restart_broker
from rollwire.producers.emit import decode_record
from rollwire.producers.environments.countdown import Countdown
from rollwire.producers.fleet import FleetConfig, FleetReport, run_fleet
from rollwire.producers.verifier.verifier import VerifierConfig, run_verifier
from rollwire.schemas.records import Reward, Rollout
from rollwire.streams.seams.engine_memory import MemoryEngine
from rollwire.streams.seams.log import TopicPartition
from rollwire.streams.seams.log_kafka import KafkaLog
from rollwire.streams.seams.weights_memory import MemoryWeights

pytestmark = pytest.mark.system

LINEAGE = "0197a1b2-0000-7000-8000-0000000000aa"

# What `rollwire run verifier` does, without a run's folder.
VERIFIER = """
import signal, sys, threading
from rollwire.producers.environments.countdown import Countdown
from rollwire.producers.verifier.verifier import VerifierConfig, run_verifier
from rollwire.streams.seams.log_kafka import KafkaLog

stop = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: stop.set())
bootstrap, prefix, max_batch = sys.argv[1:]
log = KafkaLog(bootstrap, prefix=prefix, client_id="verifier")
run_verifier(log, Countdown(), VerifierConfig(max_batch=int(max_batch)), prefix=prefix, stop=stop)
log.close()
"""


class Follow:
    """Counts rollouts and rewards as they become readable."""

    def __init__(self, log: KafkaLog) -> None:
        self._reader = log.reader()
        topics = ("rollouts", "rewards")
        self._reader.assign({TopicPartition(t, p): 0 for t in topics for p in range(log.partitions(t))})
        self.rollouts: Counter[str] = Counter()
        self.rewards: Counter[str] = Counter()

    def until(self, holds: Callable[[], bool], timeout_s: float = 60.0) -> None:
        assert self.comes(holds, timeout_s), f"{len(self.rollouts)} rollouts, {len(self.rewards)} rewards"

    def comes(self, holds: Callable[[], bool], timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while not holds():
            if time.monotonic() > deadline:
                return False
            for record in self._reader.poll(500, 0.1):
                event = decode_record(record)
                if isinstance(event, Rollout):
                    self.rollouts[event.rollout_id] += 1
                elif isinstance(event, Reward):
                    self.rewards[event.rollout_id] += 1
        return True

    def settle(self, seconds: float = 1.0) -> None:
        """Reads on for a while: repeats would show."""
        end = time.monotonic() + seconds
        self.until(lambda: time.monotonic() > end)

    def close(self) -> None:
        self._reader.close()


@contextmanager
def verifier_process(stack: StackInfo, prefix: str, max_batch: int) -> Iterator[subprocess.Popen[bytes]]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", "-c", VERIFIER, stack.bootstrap, prefix, str(max_batch)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as process:
        try:
            yield process
        finally:
            process.kill()


def sample(log: KafkaLog, prefix: str, stop: threading.Event, *, groups: int) -> FleetReport:
    weights = MemoryWeights()
    weights.offer(0, {})
    return run_fleet(
        log,
        MemoryEngine(vocab_size=20, end_id=1),
        Countdown(),
        weights,
        FleetConfig(max_open_groups=groups, group_size=8),
        model="policy",
        lineage=LINEAGE,
        prefix=prefix,
        stop=stop,
    )


def children(pid: int) -> list[int]:
    found = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False
    )
    return [int(line) for line in found.stdout.split()]


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    status = subprocess.run(
        ["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False
    )
    return status.stdout.strip().startswith("Z") or not status.stdout.strip()


def test_kill_9_and_sigterm_of_the_verifier_lose_and_repeat_nothing(
    stack: StackInfo, prefix: str, log: KafkaLog
) -> None:
    stop = threading.Event()
    follow = Follow(log)
    with ThreadPoolExecutor(1) as pool:
        fleet = pool.submit(sample, log, prefix, stop, groups=250)
        try:
            follow.until(lambda: len(follow.rollouts) == 2_000)
        finally:
            stop.set()
        assert fleet.result(timeout=15.0).written == 2_000
    with verifier_process(stack, prefix, max_batch=50) as first:
        follow.until(lambda: len(follow.rewards) >= 200)
        evaluators = children(first.pid)
        first.send_signal(signal.SIGKILL)
        first.wait(10.0)
    assert len(evaluators) == 1
    follow.until(lambda: gone(evaluators[0]), timeout_s=10.0)  # no orphan goes on without its verifier
    before = len(follow.rewards)
    with verifier_process(stack, prefix, max_batch=50) as second:
        follow.until(lambda: len(follow.rewards) >= min(before + 200, 2_000))
        began = time.monotonic()
        second.send_signal(signal.SIGTERM)
        assert second.wait(15.0) == 0
        assert time.monotonic() - began < 10.0
    with verifier_process(stack, prefix, max_batch=2_000):
        follow.until(lambda: len(follow.rewards) == 2_000)
        follow.settle()
    assert set(follow.rewards) == set(follow.rollouts)
    assert set(follow.rewards.values()) == {1}
    follow.close()


def test_a_restart_of_the_broker_under_fleet_and_verifier(
    stack: StackInfo, prefix: str, log: KafkaLog
) -> None:
    stop_fleet, stop_verifier = threading.Event(), threading.Event()
    follow = Follow(log)

    def whole() -> bool:
        return len(follow.rewards) == len(follow.rollouts) == 800

    with ThreadPoolExecutor(2) as pool:
        verifier = pool.submit(
            run_verifier, log, Countdown(), VerifierConfig(max_batch=50), prefix=prefix, stop=stop_verifier
        )
        fleet: Future[FleetReport] = pool.submit(sample, log, prefix, stop_fleet, groups=100)
        try:
            follow.until(lambda: len(follow.rewards) >= 100)
            restart_broker(stack)
            for _ in range(3):
                if follow.comes(whole, 40.0):
                    break
                # A broker that is killed may start without the markers of a transaction that was decided, and answers
                # whoever asks for it with CONCURRENT_TRANSACTIONS until it starts again (Kafka's; docs/operations.md).
                restart_broker(stack)
            follow.until(whole, timeout_s=90.0)
            follow.settle()
        finally:
            stop_fleet.set()
            stop_verifier.set()
        assert fleet.result(timeout=15.0).written == 800
        assert verifier.result(timeout=15.0).unscorable == 0
    assert set(follow.rewards) == set(follow.rollouts)
    assert set(follow.rewards.values()) == {1}
    follow.close()
