"""The monitor, which is a Faust app, where Faust's own guarantees end (C50, C51, C55): killed, joined, left.

Each start is a group of its own that reads from the beginning and folds each record once: neither a committed offset nor
a rebalance can lose or disorder anything.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
import pytest

from rollwire.ops.stack import StackInfo
from rollwire.schemas.golden import load_examples
from rollwire.schemas.records import FleetStatus, GroupFate
from rollwire.streams.emit import outgoing
from rollwire.streams.monitor.config import MonitorConfig
from rollwire.streams.monitor.page import Page, from_json
from rollwire.streams.seams.cache_redis import RedisCache
from rollwire.streams.seams.log import Outgoing
from rollwire.streams.seams.log_kafka import KafkaLog

pytestmark = pytest.mark.system

NOW_US = 1_767_225_600_000_000
_RUN = "import sys; from rollwire.streams.monitor import run_monitor; run_monitor(sys.argv[1], sys.argv[2], sys.argv[3])"


def start(stack: StackInfo, prefix: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-P", "-c", _RUN, stack.bootstrap, prefix, stack.redis_url],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@contextmanager
def ended(*processes: subprocess.Popen[bytes]) -> Iterator[None]:
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait(10)


def fates(numbers: range) -> list[Outgoing]:
    one = next(e.event for e in load_examples("group-fates") if isinstance(e.event, GroupFate))
    made = []
    for number in numbers:
        group_id = f"{one.group_id[:-12]}{number:012x}"
        fate = msgspec.structs.replace(one, group_id=group_id, members=(), fate="dropped", reason="stale")
        made.append(outgoing(fate, source="test", time_us=NOW_US))
    return made


def statuses(numbers: range) -> list[Outgoing]:
    """What one replica says, in order: all under one key."""
    one = next(e.event for e in load_examples("fleet-status") if e.name == "swapped")
    assert isinstance(one, FleetStatus)
    return [
        outgoing(
            msgspec.structs.replace(one, version=n, wanted_version=n, at_us=NOW_US + n),
            source="test",
            time_us=NOW_US,
        )
        for n in numbers
    ]


def page_of(cache: RedisCache, prefix: str) -> Page | None:
    data = cache.get(MonitorConfig(prefix=prefix).page_key)
    return None if data is None else from_json(data)


def stale(page: Page | None) -> int:
    return 0 if page is None else sum(f.groups for f in page.fates if f.reason == "stale")


def until(holds: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    pause = threading.Event()
    while not holds():
        assert time.monotonic() < deadline, "the condition did not come true"
        pause.wait(0.05)


def test_c50_c55_killed_in_the_middle_of_its_work_it_counts_each_event_once(
    stack: StackInfo, prefix: str
) -> None:
    log, cache = KafkaLog(stack.bootstrap, prefix), RedisCache(stack.redis_url)
    log.writer().write(fates(range(6_000)))
    first = start(stack, prefix)
    with ended(first):
        until(lambda: stale(page_of(cache, prefix)) > 0)
        first.kill()
        first.wait(10)
    cache.set(MonitorConfig(prefix=prefix).page_key, b"{}")
    again = start(stack, prefix)
    with ended(again):
        until(lambda: stale(page_of(cache, prefix)) >= 6_000)
        assert stale(page_of(cache, prefix)) == 6_000
        again.send_signal(signal.SIGTERM)
        assert again.wait(10) == 0
    log.close()
    cache.close()


def test_c51_others_that_join_and_leave_disorder_nothing(stack: StackInfo, prefix: str) -> None:
    log, cache = KafkaLog(stack.bootstrap, prefix), RedisCache(stack.redis_url)
    writer = log.writer()
    running: list[subprocess.Popen[bytes]] = []
    written = 0

    def write_more() -> None:
        nonlocal written
        writer.write(fates(range(written, written + 50)) + statuses(range(written, written + 50)))
        written += 50

    def seen() -> bool:
        page = page_of(cache, prefix)
        return (
            page is not None
            and stale(page) == written
            and {s.version for s in page.served.values()} == {written - 1}
        )

    write_more()
    try:
        for _ in range(2):
            running.append(start(stack, prefix))  # one joins ...
            write_more()
            until(seen)
            if len(running) > 1:
                gone = running.pop(0)  # ... and one leaves without a word
                gone.kill()
                gone.wait(10)
                write_more()
                until(seen)
        # The last one alone, from what it read itself.
        cache.set(MonitorConfig(prefix=prefix).page_key, b"{}")
        write_more()
        until(seen)
    finally:
        for process in running:
            process.kill()
            process.wait(10)
    writer.close()
    log.close()
    cache.close()
