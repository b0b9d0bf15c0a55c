"""Two gateways and the Redis that they share, which dies and comes back (C84): a hint, never the truth."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from itertools import count
from pathlib import Path
from typing import Final

import pytest

from rollwire.ops.chaos.poison.inputs import JSON, event
from rollwire.ops.chaos.poison.wire import Said, post
from rollwire.ops.programs import find_program
from rollwire.ops.stack import StackInfo
from rollwire.ops.stack.ports import HOST, choose_port
from rollwire.schemas.ids import new_group_id, rollout_id
from rollwire.schemas.records import Feedback
from rollwire.streams.emit import decode_record
from rollwire.streams.seams.log_kafka import KafkaLog
from rollwire.streams.seams.scan import scan

pytestmark = pytest.mark.system

SCRIPT: Final = Path(sys.executable).with_name("rollwire")
ROLLOUT: Final = rollout_id(new_group_id(time.time_ns() // 1_000, 7), 0)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.1)


@contextmanager
def redis_at(port: int, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    line = [
        str(find_program("redis-server")),
        "--port",
        str(port),
        "--bind",
        HOST,
        "--save",
        "",
        "--dir",
        str(folder),
    ]
    with subprocess.Popen(line, stdout=subprocess.DEVNULL) as process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def gateway(stack: StackInfo, prefix: str, redis: str) -> Iterator[str]:
    line: list[str | Path] = [
        SCRIPT,
        "gateway",
        "--open",
        "--port",
        "0",
        "--prefix",
        prefix,
        "--dir",
        stack.dir,
    ]
    with subprocess.Popen([*line, "--redis", redis], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().split()[-1]
        finally:
            process.terminate()
            assert process.wait(30) == 0


def test_c84_c70_a_redis_that_dies_makes_no_repeats_and_loses_no_events(
    stack: StackInfo, prefix: str, tmp_path: Path
) -> None:
    sent: Counter[str] = Counter()  # by id, as acknowledged and not called a repeat
    fresh = (f"id-{number}" for number in count())

    def send(url: str, feedback_id: str, value: float = 1.0) -> Said:
        said = post(url, event(ROLLOUT, feedback_id=feedback_id, value=value), JSON)
        if said.status == 200:
            sent[feedback_id] += not said.json["repeated"]
        return said

    def repeated(url: str, feedback_id: str) -> bool:
        said = send(url, feedback_id)
        assert said.status == 200, said
        again: bool = said.json["repeated"]
        return again

    def shared() -> bool:
        """Whether the second gateway knows what the first one has acknowledged a moment ago."""
        feedback_id = next(fresh)
        assert not repeated(one, feedback_id)
        threading.Event().wait(0.1)
        return repeated(two, feedback_id)

    port = choose_port("redis", None, None, set())
    with ExitStack() as running:
        first = running.enter_context(redis_at(port, tmp_path))
        url = f"redis://{HOST}:{port}/0"
        one, two = (running.enter_context(gateway(stack, prefix, url)) for _ in range(2))
        until(shared)
        known = next(fresh)
        assert not repeated(one, known)
        until(lambda: repeated(two, known))
        assert send(two, known, 0.5).problem == (409, "conflicting_repeat", "feedback_id")
        first.kill()
        first.wait(30)
        for number in range(20):
            here, there = (one, two) if number % 2 else (two, one)
            feedback_id = next(fresh)
            assert not repeated(here, feedback_id)  # away is not "there already"
            assert repeated(here, feedback_id)  # what a gateway acknowledged itself it knows
            assert not repeated(there, feedback_id)  # and the other cannot: the stream removes this one
        running.enter_context(redis_at(port, tmp_path))
        until(shared)
    with closing(KafkaLog(stack.bootstrap, prefix=prefix, client_id="test")) as log:
        stored: Counter[str] = Counter()
        for record in scan(log, ["user-feedback"]):
            found = decode_record(record)
            assert isinstance(found, Feedback)
            stored[found.feedback_id] += found.value == 1.0
    assert stored == sent
    assert min(stored.values()) >= 1
