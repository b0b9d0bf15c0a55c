"""Fleet, verifier and assemble together on the in-memory log: groups come out whole, slots come back, nothing is lost."""

from __future__ import annotations

import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

from rollwire.producers.emit import decode_record
from rollwire.producers.environments.countdown import Countdown
from rollwire.producers.fleet import FleetConfig, run_fleet
from rollwire.producers.slots import SlotCounts
from rollwire.producers.verifier.verifier import VerifierConfig, run_verifier
from rollwire.schemas.catalogue import TOPICS
from rollwire.schemas.records import DeadLetter, Event, Group, GroupFate, Reward, Rollout
from rollwire.streams.assemble_config import AssembleConfig
from rollwire.streams.run_assemble import run_assemble
from rollwire.streams.seams.clock import SystemClock
from rollwire.streams.seams.engine_memory import MemoryEngine
from rollwire.streams.seams.log import TopicPartition
from rollwire.streams.seams.log_memory import MemoryLog
from rollwire.streams.seams.weights_memory import MemoryWeights

LINEAGE = "0197a1b2-0000-7000-8000-0000000000aa"


def events(log: MemoryLog, topic: str) -> list[Event]:
    reader = log.reader()
    reader.assign({TopicPartition(topic, p): 0 for p in range(log.partitions(topic))})
    found: list[Event] = []
    while records := reader.poll(10_000, 0.0):
        found += [decode_record(record) for record in records]
    return found


def test_the_producing_half_of_the_loop() -> None:
    log = MemoryLog({name: spec.partitions for name, spec in TOPICS.items()})
    stop, stop_fleet = threading.Event(), threading.Event()
    weights = MemoryWeights()
    weights.offer(0, {})
    counts: list[SlotCounts] = []
    with ThreadPoolExecutor(3) as pool:
        verifier = pool.submit(
            run_verifier, log, Countdown(), VerifierConfig(poll_s=0.05), prefix="t.", stop=stop
        )
        assemble = pool.submit(
            run_assemble, log, AssembleConfig(), prefix="t.", partitions=None, stop=stop, clock=SystemClock()
        )
        fleet = pool.submit(
            run_fleet,
            log,
            MemoryEngine(vocab_size=20, end_id=1),
            Countdown(),
            weights,
            FleetConfig(max_open_groups=16, group_size=4),
            model="policy",
            lineage=LINEAGE,
            prefix="t.",
            stop=stop_fleet,
            observe=counts.append,
        )
        # Random text earns nothing, so every group is filtered: the fleet must go on far beyond its 16 slots.
        deadline = time.monotonic() + 30.0
        while not (counts and counts[-1].filtered >= 64) and time.monotonic() < deadline:
            stop.wait(0.02)
            if fleet.done() or verifier.done() or assemble.done():
                break
        stop_fleet.set()
        report = fleet.result(timeout=15.0)
        groups = report.slots.submitted
        while len(events(log, "group-fates")) < groups and time.monotonic() < deadline:
            stop.wait(0.05)
        stop.set()
        scored = verifier.result(timeout=15.0)
        assemble.result(timeout=15.0)
    assert all(each.balanced for each in counts)
    assert max(each.pending for each in counts) <= 16
    assert report.slots.filtered >= 64
    rollouts = [e for e in events(log, "rollouts") if isinstance(e, Rollout)]
    rewards = [e for e in events(log, "rewards") if isinstance(e, Reward)]
    fates = [e for e in events(log, "group-fates") if isinstance(e, GroupFate)]
    whole = [e for e in events(log, "groups") if isinstance(e, Group)]
    assert len(rollouts) == len(rewards) == report.written == scored.scored == 4 * groups
    assert len(fates) + len(whole) == groups
    assert {fate.reason for fate in fates} == {"equal_rewards"}
    assert Counter(reward.reward for reward in rewards)[None] == 0
    assert [e for e in events(log, "dead-letters") if isinstance(e, DeadLetter)] == []
