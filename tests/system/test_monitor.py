"""The monitor on a real broker and Redis: confluent-kafka writes, Faust reads, committed events only."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import msgspec
import pytest

from rollwire.ops.stack import StackInfo
from rollwire.schemas.golden import all_examples
from rollwire.schemas.records import Event, GroupFate
from rollwire.streams.emit import decode_record, outgoing
from rollwire.streams.monitor.config import MonitorConfig
from rollwire.streams.monitor.page import Page, from_json
from rollwire.streams.seams.cache_redis import RedisCache
from rollwire.streams.seams.log import Outgoing, Record
from rollwire.streams.seams.log_kafka import KafkaLog

pytestmark = pytest.mark.system

NOW_US = 1_767_225_600_000_000
_RUN = "import sys; from rollwire.streams.monitor import run_monitor; run_monitor(sys.argv[1], sys.argv[2], sys.argv[3])"
_T = TypeVar("_T")


def events() -> list[Event]:
    return [
        decode_record(Record(e.topic, 0, 0, 0, e.key, e.value, tuple(e.headers)))
        for e in all_examples()
        if e.value is not None
    ]


def fates(count: int, reason: str) -> list[Outgoing]:
    """Fates of as many groups, over all partitions."""
    one = next(e for e in events() if isinstance(e, GroupFate))
    made: list[Outgoing] = []
    for number in range(count):
        group_id = f"{one.group_id[:-12]}{number:012x}"
        fate = msgspec.structs.replace(one, group_id=group_id, members=(), fate="dropped", reason=reason)
        made.append(outgoing(fate, source="test", time_us=NOW_US))
    return made


@contextmanager
def monitor(stack: StackInfo, prefix: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", _RUN, stack.bootstrap, prefix, stack.redis_url],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def until(ask: Callable[[], _T | None], deadline_s: float = 60.0) -> _T:
    end = time.monotonic() + deadline_s
    pause = threading.Event()
    while (answer := ask()) is None:
        assert time.monotonic() < end, "not within the deadline"
        pause.wait(0.1)
    return answer


def count(page: Page, reason: str) -> int:
    return sum(f.groups for f in page.fates if f.reason == reason)


def test_the_page_shows_committed_events_in_redis_and_over_http(stack: StackInfo, prefix: str) -> None:
    config = MonitorConfig(prefix=prefix)
    log, cache = KafkaLog(stack.bootstrap, prefix), RedisCache(stack.redis_url)
    writer = log.writer()
    writer.write([outgoing(e, source="test", time_us=NOW_US) for e in events()])
    aborted = log.transactional_writer(f"{prefix}test.aborted")
    aborted.begin()
    aborted.write(fates(40, "over_budget"))
    aborted.abort()
    # Poison on a topic that it folds must not stop it.
    writer.write([Outgoing("train-steps", b"key", b"poison"), *fates(40, "stale")])

    def page_with(stale: int) -> Callable[[], Page | None]:
        def ask() -> Page | None:
            data = cache.get(config.page_key)
            page = None if data is None else from_json(data)
            return page if page is not None and count(page, "stale") >= stale and page.rates else None

        return ask

    with monitor(stack, prefix) as process:
        page = until(page_with(40))
        assert count(page, "stale") == 40
        assert count(page, "over_budget") == 0
        assert page.steps_done > 0
        assert page.latest_version > 0
        assert {r.topic for r in page.rates} >= {"rollouts", "rewards", "packed-batches"}
        # It follows: transactions that commit are seen, each once.
        committing = log.transactional_writer(f"{prefix}test.committing")
        committing.begin()
        committing.write(fates(25, "stale"))
        committing.commit(f"{prefix}test", {})
        page = until(page_with(65))
        assert count(page, "stale") == 65
        url = cache.get(config.url_key)
        assert url is not None
        over_http = until(lambda: _fetch(url.decode()))
        assert count(from_json(over_http), "stale") == 65
        assert json.loads(over_http)["lineage"] == page.lineage
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
    # A new start reads everything again and says the same.
    cache.set(config.page_key, b"{}")
    with monitor(stack, prefix):
        assert until(page_with(65)).fates == page.fates
    for writer_ in (committing, aborted, writer):
        writer_.close()
    log.close()
    cache.close()


def _fetch(url: str) -> bytes | None:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            data: bytes = answer.read()
            return data
    except (urllib.error.URLError, TimeoutError):
        return None
