"""kill -9 of pack in mid-flow, on a real broker: nothing twice, no hole, every group one fate (C15)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest

from rollwire.ops.stack import StackInfo
from rollwire.schemas.golden import all_examples
from rollwire.schemas.ids import new_group_id
from rollwire.schemas.records import Group, GroupFate, PackedBatch, Span, WeightVersion
from rollwire.streams.emit import decode_record, outgoing
from rollwire.streams.seams.log import Record, TopicPartition
from rollwire.streams.seams.log_kafka import KafkaLog
from rollwire.streams.seams.scan import scan

pytestmark = pytest.mark.system

NOW_US = 1_767_225_600_000_000
LINEAGE = "0197a1b2-0000-7000-8000-0000000000aa"
GROUPS_PER_STEP = 4
MAX_LAG = 1
STEPS = 30
_RUN = f"""
import sys, threading
from rollwire.streams.pack import PackConfig
from rollwire.streams.run_pack import run_pack
from rollwire.streams.seams.log_kafka import KafkaLog
config = PackConfig(groups_per_step={GROUPS_PER_STEP}, max_lag_versions={MAX_LAG}, ranks=2, max_steps_ahead=1)
log = KafkaLog(sys.argv[1], sys.argv[2], member_timeout_s=2.0)
run_pack(log, config, prefix=sys.argv[2], model="policy", lineage="{LINEAGE}", stop=threading.Event())
"""


def example(kind: type[Group | WeightVersion]) -> Group | WeightVersion:
    for e in all_examples():
        if e.value is not None:
            event = decode_record(Record(e.topic, 0, 0, 0, e.key, e.value, tuple(e.headers)))
            if isinstance(event, kind):
                return event
    raise LookupError(kind)


def group(number: int, version: int) -> Group:
    """The example group under another id, sampled by `version` alone."""
    one = example(Group)
    assert isinstance(one, Group)
    group_id = new_group_id(NOW_US + number, number)
    members = []
    for member in one.members:
        rollout = member.rollout
        tokens = rollout.spans[-1].end
        changed = msgspec.structs.replace(
            rollout,
            group_id=group_id,
            rollout_id=f"{group_id}.{rollout.index}",
            model="policy",
            lineage=LINEAGE,
            spans=(Span(version=version, start=0, end=tokens),),
        )
        members.append(msgspec.structs.replace(member, rollout=changed))
    return msgspec.structs.replace(
        one, group_id=group_id, model="policy", lineage=LINEAGE, members=tuple(members)
    )


def version(number: int) -> WeightVersion:
    one = example(WeightVersion)
    assert isinstance(one, WeightVersion)
    return msgspec.structs.replace(
        one,
        model="policy",
        lineage=LINEAGE,
        version=number,
        step=number,
        kind="delta" if number else "anchor",
        base_version=number - 1 if number else None,
    )


@contextmanager
def pack(stack: StackInfo, prefix: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", _RUN, stack.bootstrap, prefix],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


class World:
    """The fleet and the trainer around pack: groups of the latest version, now and then an old one; a version a plan."""

    def __init__(self, log: KafkaLog) -> None:
        self._log = log
        self._writer = log.writer()
        self._reader = log.reader()
        self._reader.assign({TopicPartition("packed-batches", 0): 0})
        self.sent: list[str] = []
        self.planned = 0
        self.version = 0
        self._writer.write([outgoing(version(0), source="test", time_us=NOW_US)])

    def turn(self) -> None:
        for record in self._reader.poll(100, 0.05):
            batch = decode_record(record)
            assert isinstance(batch, PackedBatch)
            self.planned = batch.step
        if self.version < self.planned:
            self.version += 1
            self._writer.write([outgoing(version(self.version), source="test", time_us=NOW_US)])
        if len(self.sent) < (self.planned + 3) * GROUPS_PER_STEP * 5 // 4:
            number = len(self.sent)
            old = number % 5 == 0
            made = group(number, max(0, self.version - (4 if old else 0)))
            self.sent.append(made.group_id)
            self._writer.write([outgoing(made, source="test", time_us=NOW_US)])

    def until(self, planned: int, deadline_s: float = 60.0) -> None:
        end = time.monotonic() + deadline_s
        while self.planned < planned:
            assert time.monotonic() < end, f"step {planned} was not planned, the last is {self.planned}"
            self.turn()

    def close(self) -> None:
        self._writer.close()
        self._reader.close()


def test_c15_kill_9_in_mid_flow(stack: StackInfo, prefix: str) -> None:
    log = KafkaLog(stack.bootstrap, prefix)
    world = World(log)
    for killed_at in (7, 8, 15):
        with pack(stack, prefix) as process:
            world.until(killed_at)
            process.send_signal(signal.SIGKILL)
    with pack(stack, prefix) as process:
        world.until(STEPS)
        settled = threading.Event()
        end = time.monotonic() + 30
        while _waiting(log, world) >= GROUPS_PER_STEP and world.version <= world.planned:
            assert time.monotonic() < end, "groups were left over"
            world.turn()
            if world.version == world.planned:
                settled.wait(0.2)
        assert process.poll() is None
    world.close()
    fates = [e for e in (decode_record(r) for r in scan(log, ["group-fates"])) if isinstance(e, GroupFate)]
    plans = [
        e for e in (decode_record(r) for r in scan(log, ["packed-batches"])) if isinstance(e, PackedBatch)
    ]
    for rank in range(2):
        steps = [plan.step for plan in plans if plan.rank == rank]
        assert steps == list(range(1, len(steps) + 1)), "a hole or a repeat"
    assert len({plan.plan_digest for plan in plans}) == len(plans) // 2
    assert all(plan.base_version - plan.oldest_version <= MAX_LAG for plan in plans)
    assert len({fate.group_id for fate in fates}) == len(fates), "two fates for one group"
    assert {fate.group_id for fate in fates} <= set(world.sent)
    trained = [group_id for plan in plans if plan.rank == 0 for group_id in plan.group_ids]
    assert sorted(trained) == sorted(fate.group_id for fate in fates if fate.fate == "kept")
    assert {fate.reason for fate in fates} == {"trained", "stale"}
    assert len(world.sent) - len(fates) < GROUPS_PER_STEP, "groups were lost"
    log.close()


def _waiting(log: KafkaLog, world: World) -> int:
    return len(world.sent) - sum(1 for _ in scan(log, ["group-fates"]))
