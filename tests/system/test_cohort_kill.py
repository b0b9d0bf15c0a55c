"""Live traffic beside sampled groups on a real broker, through kill -9 of both assemblers and of pack."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import pytest

from rollwire.ops.stack import StackInfo
from rollwire.schemas import records as r
from rollwire.streams import synthetic
from rollwire.streams.emit import decode_record, outgoing
from rollwire.streams.pack_cohort import coverage_of
from rollwire.streams.seams.log import TopicPartition
from rollwire.streams.seams.log_kafka import KafkaLog
from rollwire.streams.seams.scan import scan

pytestmark = pytest.mark.system

PROGRAM = """
import signal, sys, threading
from rollwire.streams.assemble_config import AssembleConfig, ProductionConfig
from rollwire.streams.pack import PackConfig
from rollwire.streams.pack_cohort import CohortConfig
from rollwire.streams.run_assemble import run_assemble
from rollwire.streams.run_pack import run_pack
from rollwire.streams.seams.log import TopicPartition
from rollwire.streams.seams.log_kafka import KafkaLog
from rollwire.streams.synthetic import LINEAGE
bootstrap, prefix = sys.argv[1:]
log, stop = KafkaLog(bootstrap, prefix, "both", member_timeout_s=2.0), threading.Event()
signal.signal(signal.SIGTERM, lambda *_: stop.set())
cohort = CohortConfig(production_share=0.5, coverage_floor=0.5, coverage_min_rollouts=2, max_wait_s=1e4, max_age_s=1e4)
pack = PackConfig(groups_per_step=8, max_lag_versions=100, max_steps_ahead=1, cohort=cohort)
named = {"prefix": prefix, "stop": stop}
configs = (AssembleConfig(require_traces=False), ProductionConfig())
threads = [threading.Thread(target=run_assemble, args=(log, c), kwargs=named, daemon=True) for c in configs]
for thread in threads:
    thread.start()
run_pack(log, pack, model="policy", lineage=LINEAGE, **named)
for thread in threads:
    thread.join()
"""


@contextmanager
def running(stack: StackInfo, prefix: str, *, kill: bool) -> Iterator[None]:
    """Until it is killed, or else told to stop: then no transaction is left open."""
    process = subprocess.Popen([sys.executable, "-P", "-c", PROGRAM, stack.bootstrap, prefix])
    try:
        yield
        assert process.poll() is None
        if not kill:
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait(10)


def now_us() -> int:
    return time.time_ns() // 1_000


def written(number: int) -> list[r.Event]:
    """Every third group is an answer; of those, in blocks of four, one block in three says nothing."""
    group, at_us = synthetic.group_id(now_us(), number), now_us()
    if number % 3:
        events: list[r.Event] = []
        for i in range(2):
            events += [
                synthetic.rollout(group, i, 2, at_us=at_us),
                synthetic.reward(group, i, float(i), at_us=at_us),
            ]
        return events
    silent = number // 12 % 3 == 1
    value = None if silent else float(number // 3 % 2)
    said = synthetic.said(group, value, at_us=at_us, signals=0 if silent else 2)
    return [synthetic.answer(group, at_us=at_us), said]


def decoded(log: KafkaLog, *topics: str) -> list[r.Event]:
    return [decode_record(record) for record in scan(log, topics)]


def test_c78_two_kinds_of_groups_through_kills(
    stack: StackInfo, prefix: str, log: KafkaLog, wait_for: Callable[[Callable[[], bool], float], None]
) -> None:
    """C78: also on the broker a silent cohort is dropped, said so, and the next one trained on."""
    writer = log.writer()
    groups: set[str] = set()
    version = 0

    def write(events: list[r.Event]) -> None:
        writer.write([outgoing(event, source="test", time_us=now_us()) for event in events], 60.0)

    reader = log.reader()
    reader.assign({TopicPartition("packed-batches", 0): 0})
    planned = version = 0

    def turn() -> None:
        """The fleet, the traffic and the trainer around them: a version for every plan."""
        nonlocal planned, version
        for record in reader.poll(100, 0.05):
            batch = decode_record(record)
            assert isinstance(batch, r.PackedBatch)
            planned = batch.step
        while version < planned:
            version += 1
            write([synthetic.version(version, at_us=now_us())])
        if len(groups) < (planned + 3) * 16:
            made = [written(len(groups) + i) for i in range(12)]
            groups.update(one[0].group_id for one in made if isinstance(one[0], r.Rollout))
            write([event for events in made for event in events])

    def has_planned(steps: int) -> bool:
        turn()
        return planned >= steps

    write([synthetic.version(0, at_us=now_us())])
    for steps, kill in ((3, True), (6, False)):
        with running(stack, prefix, kill=kill):
            wait_for(partial(has_planned, steps), 120)
    reader.close()
    made = {e.group_id: e for e in decoded(log, "groups") if isinstance(e, r.Group)}
    fates = [e for e in decoded(log, "group-fates") if isinstance(e, r.GroupFate)]
    assert len(list(scan(log, ["groups"]))) == len(made)
    assert len({fate.group_id for fate in fates}) == len(fates)
    assert {*made, *(fate.group_id for fate in fates)} <= groups
    plans = [e for e in decoded(log, "packed-batches") if isinstance(e, r.PackedBatch)]
    assert [plan.step for plan in plans] == list(range(1, len(plans) + 1))
    assert sorted(i for plan in plans for i in plan.group_ids) == sorted(
        fate.group_id for fate in fates if fate.fate == "kept"
    )
    for plan in plans:
        cohort = [made[i] for i in plan.group_ids if made[i].baseline == "cohort"]
        assert len(cohort) == plan.cohort_size == 4
        assert plan.coverage == coverage_of(cohort)
        assert all(2 * row.signalled >= row.rollouts for row in plan.coverage)
    dropped = Counter(fate.reason for fate in fates if fate.decided_by == "pack" and fate.fate != "kept")
    notices = [e for e in decoded(log, "notices") if isinstance(e, r.Notice) and e.name == "coverage"]
    assert dropped["coverage"] == 4 * len(notices) > 0
    assert not decoded(log, "dead-letters")
