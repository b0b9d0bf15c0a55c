"""A record that really kills the process, on the real broker: it ends in the dead letters, its neighbours go on."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial

import pytest

from rollwire.ops.stack import StackInfo
from rollwire.schemas import records as r
from rollwire.streams import synthetic
from rollwire.streams.emit import decode_record, outgoing
from rollwire.streams.seams.log import Outgoing
from rollwire.streams.seams.log_kafka import KafkaLog
from rollwire.streams.seams.scan import scan

pytestmark = pytest.mark.system

# assemble of one partition, with a decoder that overruns its memory on a marked value, as a careless one would.
PROGRAM = """
import ctypes, signal, sys, threading
from rollwire.streams.assemble_config import AssembleConfig
from rollwire.streams.emit import take
from rollwire.streams.run_assemble import drive
from rollwire.streams.runtime import RuntimeConfig, run_step
from rollwire.streams.seams.clock import SystemClock
from rollwire.streams.seams.log_kafka import KafkaLog

def careless(record):
    if record.value is not None and b"deadly" in record.value:
        ctypes.string_at(0)
    return take(record)

stop = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: stop.set())
log = KafkaLog(sys.argv[1], sys.argv[2], "assemble")
assembling = drive(AssembleConfig(group_deadline_s=300), sys.argv[2], 0)._replace(take=careless)
run_step(log, assembling, RuntimeConfig(), stop=stop, clock=SystemClock())
"""


def until(holds: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "the condition did not come true"


def ended_or_done(process: subprocess.Popen[bytes], log: KafkaLog, groups: int) -> bool:
    return process.poll() is not None or len(list(scan(log, ["groups"]))) == groups


def test_a_record_that_kills_the_process_is_set_aside_and_its_neighbours_pass(
    stack: StackInfo, prefix: str
) -> None:
    log = KafkaLog(stack.bootstrap, prefix)
    now_us = time.time_ns() // 1_000

    def member(group: str, index: int) -> list[Outgoing]:
        events: list[r.Event] = [
            synthetic.rollout(group, index, 2, at_us=now_us),
            synthetic.reward(group, index, float(index), at_us=now_us),
            synthetic.trace(group, index, at_us=now_us),
        ]
        return [outgoing(event, source="test", time_us=now_us)._replace(partition=0) for event in events]

    groups = [synthetic.group_id(now_us, number) for number in range(40)]
    before = [record for group in groups for record in member(group, 0)]
    after = [record for group in groups for record in member(group, 1)]
    deadly = Outgoing("rewards", b"k", b"deadly", (), 0)
    log.writer().write([*before, deadly, *after], 60.0)
    deaths = 0
    while True:
        process = subprocess.Popen([sys.executable, "-P", "-c", PROGRAM, stack.bootstrap, prefix])
        try:
            until(partial(ended_or_done, process, log, len(groups)))
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                assert process.wait(10) == 0
                break
            assert process.returncode == -signal.SIGSEGV
            deaths += 1
            assert deaths <= 4
        finally:
            process.kill()
            process.wait(10)
    assert deaths == 3
    (letter,) = [decode_record(record) for record in scan(log, ["dead-letters"])]
    assert isinstance(letter, r.DeadLetter)
    assert (letter.value, letter.reason, letter.source.topic) == (b"deadly", "kills_worker", "rewards")
    assert len({record.key for record in scan(log, ["groups"])}) == len(groups)
    log.close()
