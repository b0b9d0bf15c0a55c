"""assemble on the real broker: killed in mid-flow, poisoned, and with the broker restarted under it."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Self

import pytest

from rollwire.ops.stack import StackInfo, restart_broker
from rollwire.schemas import records as r
from rollwire.streams import synthetic
from rollwire.streams.assemble_config import SAMPLED
from rollwire.streams.emit import decode_record, outgoing
from rollwire.streams.runtime import read_group
from rollwire.streams.seams.log import Log, Outgoing, TopicPartition
from rollwire.streams.seams.log_kafka import KafkaLog
from rollwire.streams.seams.scan import scan

pytestmark = pytest.mark.system

# What `rollwire run assemble` does, without its settings.
PROGRAM = """
import signal, sys, threading
from rollwire.streams.assemble_config import AssembleConfig
from rollwire.streams.run_assemble import run_assemble
from rollwire.streams.seams.log_kafka import KafkaLog
bootstrap, prefix, deadline_s = sys.argv[1:]
stop = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: stop.set())
log = KafkaLog(bootstrap, prefix, "assemble", member_timeout_s=2.0)
run_assemble(log, AssembleConfig(group_deadline_s=float(deadline_s)), prefix=prefix, stop=stop)
"""


class Assemble:
    """assemble as a process of its own."""

    def __init__(self, stack: StackInfo, prefix: str, deadline_s: float = 300) -> None:
        self._command = [sys.executable, "-P", "-c", PROGRAM, stack.bootstrap, prefix, str(deadline_s)]
        self._process = subprocess.Popen(self._command)

    def kill(self) -> None:
        """kill -9, and a new one."""
        self._process.kill()
        self._process.wait(10)
        self._process = subprocess.Popen(self._command)

    def terminate(self) -> int:
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(10)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait(10)


def now_us() -> int:
    return time.time_ns() // 1_000


def until(holds: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "the condition did not come true"


def group_events(number: int, size: int) -> list[r.Event]:
    """A whole group; every third one has equal rewards."""
    group = synthetic.group_id(now_us(), number)
    events: list[r.Event] = []
    for i in range(size):
        events.append(synthetic.rollout(group, i, size, at_us=now_us()))
        events.append(synthetic.reward(group, i, 1.0 if number % 3 == 0 else float(i % 2), at_us=now_us()))
        events.append(synthetic.trace(group, i, at_us=now_us()))
    return events


def write(log: Log, events: list[r.Event]) -> None:
    log.writer().write([outgoing(e, source="test", time_us=now_us()) for e in events], 60.0)


def said(log: Log) -> Counter[str]:
    """How often something was decided for each group; no group decided twice is the law."""
    found: Counter[str] = Counter()
    for record in scan(log, ["groups", "group-fates"]):
        event = decode_record(record)
        assert isinstance(event, r.Group | r.GroupFate)
        found[event.group_id] += 1
    return found


def has_decided(log: Log, count: int) -> bool:
    return sum(said(log).values()) >= count


def letters(log: Log) -> list[r.DeadLetter]:
    return [
        e for record in scan(log, ["dead-letters"]) if isinstance(e := decode_record(record), r.DeadLetter)
    ]


def test_killed_in_mid_flow_nothing_is_lost_or_doubled(stack: StackInfo, prefix: str) -> None:
    log = KafkaLog(stack.bootstrap, prefix)
    draw = random.Random(7)
    total, size = 600, 4
    groups = [group_events(number, size) for number in range(total)]
    # Members of about thirty groups at a time are on their way, in any order, some twice.
    events: list[r.Event] = []
    for start in range(0, total, 30):
        block = [event for group in groups[start : start + 30] for event in group]
        draw.shuffle(block)
        events += block
    parts = [events[i : i + 240] for i in range(0, len(events), 240)]
    with Assemble(stack, prefix) as assemble:
        for number, part in enumerate(parts):
            if (
                number % 4 == 1
            ):  # it is up and has decided all that it could: killed while it takes the next part
                until(partial(has_decided, log, 30 * (20 * number // 30)))
            write(log, part)
            if number % 4 == 1:
                assemble.kill()
        until(lambda: len(said(log)) == total)
        assert assemble.terminate() == 0
    found = said(log)
    assert set(found.values()) == {1}
    kinds = Counter(type(decode_record(record)).__name__ for record in scan(log, ["groups", "group-fates"]))
    assert kinds == {"Group": 400, "GroupFate": 200}
    assert letters(log) == []


def test_c44_c56_poison_between_good_events(stack: StackInfo, prefix: str) -> None:
    """A poison event on `rollouts` and one on `rewards`: kept whole, and the good ones behind them go on."""
    log = KafkaLog(stack.bootstrap, prefix)
    first, second = group_events(1, 2), group_events(2, 2)
    with Assemble(stack, prefix) as assemble:
        write(log, first[:3])
        poison = [
            Outgoing("rollouts", b"k", b"\xc3\x01" + os.urandom(200), (("ce_id", b"1"),)),
            Outgoing("rewards", b"k", None),
            *(Outgoing("rewards", b"k", b"hello", (), p) for p in range(4)),
        ]
        log.writer().write(poison)
        write(log, first[3:])
        write(log, second)
        until(lambda: len(said(log)) == 2)
        until(lambda: len(letters(log)) == len(poison))
        assert assemble.terminate() == 0
    assert Counter((x.source.topic, x.value) for x in letters(log)) == Counter(
        (p.topic, p.value) for p in poison
    )


def test_a_deadline_strikes_on_the_real_broker(stack: StackInfo, prefix: str) -> None:
    log = KafkaLog(stack.bootstrap, prefix)
    events = group_events(1, 4)
    with Assemble(stack, prefix, deadline_s=3) as assemble:
        write(log, events[:-1])
        until(lambda: len(said(log)) == 1)
        write(log, events[-1:])
        until(lambda: len(letters(log)) == 1)
        assert assemble.terminate() == 0
    (fate,) = [decode_record(x) for x in scan(log, ["group-fates"])]
    assert isinstance(fate, r.GroupFate)
    assert (fate.fate, fate.reason) == ("dropped", "incomplete")
    assert letters(log)[0].reason == "late"


def test_a_stop_takes_less_than_ten_seconds_and_starts_again_where_it_was(
    stack: StackInfo, prefix: str
) -> None:
    log = KafkaLog(stack.bootstrap, prefix)
    events = group_events(1, 4)
    with Assemble(stack, prefix) as assemble:
        write(log, events[:5])
        inputs = [TopicPartition(topic, p) for topic in SAMPLED.joined for p in range(4)]
        until(lambda: sum(log.committed(read_group(f"{prefix}assemble"), inputs).values()) == 5)
        assert assemble.terminate() == 0
    write(log, events[5:])
    with Assemble(stack, prefix) as assemble:
        until(lambda: len(said(log)) == 1)
        assert assemble.terminate() == 0
    assert set(said(log).values()) == {1}


def test_a_restart_of_the_broker_costs_time_and_nothing_else(stack: StackInfo, prefix: str) -> None:
    log = KafkaLog(stack.bootstrap, prefix)
    groups = [group_events(number, 4) for number in range(1, 60)]
    with Assemble(stack, prefix) as assemble:
        write(log, group_events(0, 4))
        until(lambda: len(said(log)) == 1)
        write(log, [event for group in groups for event in group[:7]])
        assert restart_broker(stack).bootstrap == stack.bootstrap
        write(log, [event for group in groups for event in group[7:]])
        until(lambda: len(said(log)) == len(groups) + 1, 90)
        assert assemble.terminate() == 0
    assert set(said(log).values()) == {1}
    assert letters(log) == []
