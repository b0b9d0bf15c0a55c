"""Take-over on the real broker: assemble's partitions between two processes, and the pack that stands by."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
import pytest
from confluent_kafka.admin import AdminClient

from rollwire.ops.stack import StackInfo
from rollwire.schemas import records as r
from rollwire.schemas.golden import all_examples
from rollwire.streams import synthetic
from rollwire.streams.emit import decode_record, outgoing
from rollwire.streams.seams.log import Log, Record
from rollwire.streams.seams.log_kafka import KafkaLog
from rollwire.streams.seams.rdkafka_logs import bridge
from rollwire.streams.seams.scan import scan

pytestmark = pytest.mark.system

LINEAGE = synthetic.LINEAGE
_SETUP = """
import signal, sys, threading
from rollwire.streams.seams.log_kafka import KafkaLog
stop = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: stop.set())
log = KafkaLog(sys.argv[1], sys.argv[2], sys.argv[3])
"""
ASSEMBLE = f"""{_SETUP}
from rollwire.streams.assemble_config import AssembleConfig
from rollwire.streams.run_assemble import run_assemble
run_assemble(log, AssembleConfig(group_deadline_s=300), prefix=sys.argv[2], stop=stop)
"""
PACK = f"""{_SETUP}
from rollwire.streams.pack import PackConfig
from rollwire.streams.run_pack import run_pack
config = PackConfig(groups_per_step=1, max_lag_versions=1_000, max_steps_ahead=1_000)
run_pack(log, config, prefix=sys.argv[2], model="policy", lineage="{LINEAGE}", stop=stop)
"""


@contextmanager
def process(program: str, stack: StackInfo, prefix: str, name: str) -> Iterator[subprocess.Popen[bytes]]:
    started = subprocess.Popen([sys.executable, "-P", "-c", program, stack.bootstrap, prefix, name])
    try:
        yield started
    finally:
        started.kill()
        started.wait(10)


def terminate(started: subprocess.Popen[bytes]) -> None:
    began = time.monotonic()
    started.send_signal(signal.SIGTERM)
    assert started.wait(12) == 0
    assert time.monotonic() - began < 10


def until(holds: Callable[[], bool], seconds: float = 60) -> float:
    """How long it took."""
    began = time.monotonic()
    while not holds():
        assert time.monotonic() - began < seconds, "the condition did not come true"
    return time.monotonic() - began


def now_us() -> int:
    return time.time_ns() // 1_000


def write(log: Log, *events: r.Event) -> None:
    writer = log.writer()
    writer.write([outgoing(event, source="test", time_us=now_us()) for event in events], 60.0)
    writer.close()


def members(number: int, size: int) -> list[r.Event]:
    group = synthetic.group_id(now_us(), number)
    events: list[r.Event] = []
    for i in range(size):
        events.append(synthetic.rollout(group, i, size, at_us=now_us()))
        events.append(synthetic.reward(group, i, float(i % 2), at_us=now_us()))
        events.append(synthetic.trace(group, i, at_us=now_us()))
    return events


def assembled(log: Log) -> Counter[str]:
    found: Counter[str] = Counter()
    for record in scan(log, ["groups", "group-fates"]):
        event = decode_record(record)
        assert isinstance(event, r.Group | r.GroupFate)
        found[event.group_id] += 1
    return found


def test_c15_of_two_assemblers_one_is_killed_and_the_other_takes_its_partitions(
    stack: StackInfo, prefix: str
) -> None:
    log = KafkaLog(stack.bootstrap, prefix)
    groups = [members(number, 4) for number in range(240)]
    halves = [event for group in groups for event in group[: len(group) // 2]]
    rest = [event for group in groups for event in group[len(group) // 2 :]]
    with process(ASSEMBLE, stack, prefix, "one") as one, process(ASSEMBLE, stack, prefix, "two") as two:
        write(log, *members(1_000, 2))
        until(lambda: len(assembled(log)) == 1)
        for start in range(0, len(halves), 200):
            write(log, *halves[start : start + 200])
        write(log, *rest[: len(rest) // 2])
        until(lambda: len(assembled(log)) > 60)
        one.kill()
        write(log, *rest[len(rest) // 2 :])
        took_s = until(lambda: len(assembled(log)) == 241)
        assert two.poll() is None
        terminate(two)
    assert set(assembled(log).values()) == {1}
    assert list(scan(log, ["dead-letters"])) == []
    assert took_s < 15
    log.close()


def version_event() -> r.WeightVersion:
    for example in all_examples():
        if example.topic == "weight-versions":
            event = decode_record(
                Record(example.topic, 0, 0, 0, example.key, example.value, tuple(example.headers))
            )
            if isinstance(event, r.WeightVersion) and event.kind == "anchor" and event.base_version is None:
                return msgspec.structs.replace(event, model="policy", lineage=LINEAGE, version=0, step=0)
    raise LookupError("no anchor among the examples")


def group(number: int) -> r.Group:
    group_id = synthetic.group_id(now_us(), number)
    rollouts = [synthetic.rollout(group_id, i, 2, at_us=now_us()) for i in range(2)]
    first = rollouts[0]
    return r.Group(
        group_id=group_id,
        model=first.model,
        lineage=first.lineage,
        environment=first.environment,
        task_id=first.task_id,
        group_size=2,
        baseline="mean",
        members=tuple(
            r.Member(rollout=rollout, reward=float(i), advantage=i - 0.5, trace=None)
            for i, rollout in enumerate(rollouts)
        ),
        cut=r.Cut(inputs=(), clock_us=now_us()),
    )


def plans(log: Log) -> list[int]:
    return [
        event.step
        for record in scan(log, ["packed-batches"])
        if isinstance(event := decode_record(record), r.PackedBatch)
    ]


def test_c15_the_pack_that_stands_by_takes_over_within_ten_seconds_of_a_kill(
    stack: StackInfo, prefix: str
) -> None:
    log = KafkaLog(stack.bootstrap, prefix)
    admin = AdminClient({"bootstrap.servers": stack.bootstrap}, logger=bridge())
    name = f"{prefix}pack"
    write(log, version_event())
    with process(PACK, stack, prefix, "one") as one:
        write(log, group(1))
        until(lambda: plans(log) == [1])
        with process(PACK, stack, prefix, "two") as two:
            sent = 1
            # The standby has joined when the one that packs was interrupted for it: it goes on, nothing is fenced.
            until(lambda: len(admin.describe_consumer_groups([name])[name].result(10).members) == 2)
            sent += 1
            write(log, group(sent))
            until(lambda: len(plans(log)) == sent)
            one.kill()
            killed = time.monotonic()
            write(log, group(sent + 1))
            until(lambda: len(plans(log)) == sent + 1, 20)
            took_s = time.monotonic() - killed
            terminate(two)
    assert plans(log) == list(range(1, sent + 2))
    assert took_s <= 10, f"{took_s:.1f} s from the kill to the first plan"
    log.close()
