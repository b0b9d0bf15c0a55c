"""Attribution on a real broker: killed at any point, joined and left by others, it says what follows from the log alone."""

from __future__ import annotations

import json
import os
import random
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from rollwire.ops.stack import StackInfo
from rollwire.schemas.golden import load_examples
from rollwire.schemas.ids import new_group_id
from rollwire.schemas.records import DeadLetter, Event, Feedback, ProductionRollout, Reward
from rollwire.schemas.rules.parse import default_text
from rollwire.streams.attribution.config import AttributionConfig
from rollwire.streams.attribution.replay import attributed
from rollwire.streams.emit import decode_record, outgoing
from rollwire.streams.seams.log import Log, Outgoing, TopicPartition
from rollwire.streams.seams.log_kafka import KafkaLog
from rollwire.streams.seams.scan import scan

pytestmark = pytest.mark.system

ROLLOUT: Final = load_examples("production-rollouts")[0].event
THUMB: Final = next(e.event for e in load_examples("user-feedback") if e.name == "thumb")
TOPICS: Final = ("user-feedback", "production-rollouts")
_RUN: Final = """
import sys
from rollwire.streams.attribution import run_attribution
from rollwire.streams.attribution.config import AttributionConfig
run_attribution(AttributionConfig.model_validate_json(sys.argv[1]))
"""


def now_us() -> int:
    return time.time_ns() // 1_000


class Traffic:
    """Answers and what people say about them, a little of everything."""

    def __init__(self, log: KafkaLog, seed: int) -> None:
        self.log = log
        self.writer = log.writer()
        self.chance = random.Random(seed)
        self.made = 0
        self.rollouts: set[str] = set()

    def write(self, answers: int) -> None:
        events: list[Event] = []
        for _ in range(answers):
            at_us = now_us()
            group = new_group_id(at_us, secrets.randbits(74))
            known = self.chance.random() < 0.9
            if known:
                self.rollouts.add(f"{group}.0")
                events.append(
                    msgspec.structs.replace(
                        ROLLOUT,
                        group_id=group,
                        rollout_id=f"{group}.0",
                        tenant="acme",
                        outcome=self.chance.choice(["answered", "tool_error"]),
                    )
                )
            for _ in range(self.chance.choice([0, 1, 1, 2, 3])):
                self.made += 1
                said = msgspec.structs.replace(
                    THUMB,
                    group_id=group,
                    rollout_id=f"{group}.0",
                    feedback_id=f"f{self.made}",
                    tenant=self.chance.choice(["acme"] * 9 + ["other"]),
                    value=self.chance.choice([1.0, -1.0]),
                    happened_us=at_us,
                    received_us=at_us + 1,
                )
                events.append(said)
                if self.chance.random() < 0.2:  # again, or with other content
                    events.append(msgspec.structs.replace(said, value=1.0))
        self.chance.shuffle(events)
        records = [outgoing(event, source="test", time_us=now_us()) for event in events]
        records.append(Outgoing("user-feedback", b"poison", b"poison"))
        self.writer.write(records)


@contextmanager
def workers(
    stack: StackInfo, prefix: str, folder: Path, window_s: float
) -> Iterator[Callable[[int | None], subprocess.Popen[bytes]]]:
    rules = folder / "rules.toml"
    text = re.sub(r"window_s = \d+", f"window_s = {window_s}", default_text())
    rules.write_text(re.sub(r"grace_s = \d+", "grace_s = 1", text), "utf-8")
    running: list[subprocess.Popen[bytes]] = []

    def start(port: int | None) -> subprocess.Popen[bytes]:
        """None: as Faust's own command starts it."""
        if port is None:
            faust = Path(sys.executable).with_name("faust")
            variables = {
                "ROLLWIRE_BOOTSTRAP": stack.bootstrap,
                "ROLLWIRE_PREFIX": prefix,
                "ROLLWIRE_RULES": str(rules),
                "ROLLWIRE_CLOCK_SKEW_S": "0.2",
            }
            return ran([str(faust), "-A", "rollwire.streams.attribution", "worker", "-l", "warn"], variables)
        config = AttributionConfig(
            bootstrap=stack.bootstrap,
            prefix=prefix,
            rules=rules,
            web_port=port,
            clock_skew_s=0.2,
            tick_s=0.2,
            commit_s=0.5,
            session_timeout_s=6,
        )
        return ran([sys.executable, "-P", "-c", _RUN, config.model_dump_json()], {})

    def ran(command: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            command, env={**os.environ, "OMP_NUM_THREADS": "1", **environment}, cwd=folder
        )
        running.append(process)
        return process

    try:
        yield start
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
            process.wait(10)


def until(holds: Callable[[], bool], seconds: float = 60) -> None:
    deadline, pause = time.monotonic() + seconds, threading.Event()
    while not holds():
        assert time.monotonic() < deadline, "the condition did not come true"
        pause.wait(0.2)


def events_of(log: Log, topic: str) -> list[Any]:
    return [decode_record(record) for record in scan(log, [topic])]


def rewards_of(log: Log) -> dict[str, Reward]:
    """Each rollout's reward; one that was given twice must be the same to the last byte."""
    found: dict[str, bytes] = {}
    rewards: dict[str, Reward] = {}
    for record in scan(log, ["rewards"]):
        reward = decode_record(record)
        assert isinstance(reward, Reward)
        assert found.setdefault(reward.rollout_id, record.value or b"") == record.value
        rewards[reward.rollout_id] = reward
    return rewards


def letters_of(log: Log) -> dict[tuple[int, int], str]:
    found: dict[tuple[int, int], DeadLetter] = {}
    for letter in events_of(log, "dead-letters"):
        assert isinstance(letter, DeadLetter)
        assert found.setdefault((letter.source.partition, letter.source.offset), letter) == letter
    return {place: letter.reason for place, letter in found.items()}


def behind(log: Log, prefix: str) -> int:
    """Records that the group has not committed."""
    partitions = [TopicPartition(topic, p) for topic in TOPICS for p in range(log.partitions(topic))]
    done, ends = log.committed(f"{prefix}attribute", partitions), log.written_offsets(partitions)
    return sum(ends[p] - done.get(p, 0) for p in partitions)


def check_all(log: KafkaLog, prefix: str, traffic: Traffic) -> None:
    """Everything was said, once in effect, and committed: what follows from the log, and nothing else."""
    expected = attributed(log)
    assert set(expected.rewards) == traffic.rollouts
    until(lambda: len(rewards_of(log)) >= len(expected.rewards))
    until(lambda: len(letters_of(log)) >= len(expected.letters))
    assert rewards_of(log) == expected.rewards
    assert letters_of(log) == expected.letters
    assert {"conflicting_repeat", "unknown_rollout", "tenant_mismatch", "not_framed"} <= set(
        expected.letters.values()
    )
    until(lambda: behind(log, prefix) == 0, 30)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def page(port: int, name: str) -> Any:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/{name}", timeout=5) as answer:
            return json.loads(answer.read())
    except (urllib.error.URLError, TimeoutError):
        return None


def test_c50_c53_c68_killed_at_any_point_it_loses_nothing_and_changes_no_reward(
    stack: StackInfo, prefix: str, tmp_path: Path
) -> None:
    assert isinstance(ROLLOUT, ProductionRollout)
    assert isinstance(THUMB, Feedback)
    log = KafkaLog(stack.bootstrap, prefix)
    traffic = Traffic(log, seed=7)
    chance = random.Random(7)
    with workers(stack, prefix, tmp_path, window_s=4.0) as start:
        for turn in range(2):
            traffic.write(150)
            process = start(0)
            # Somewhere in the middle of its work: it has read a little, or given some of the rewards.
            left, given = behind(log, prefix), len(rewards_of(log)) + chance.randrange(1, 120)
            if turn == 0:
                until(lambda: behind(log, prefix) < left)  # noqa: B023
            else:
                until(lambda: len(rewards_of(log)) >= given)  # noqa: B023
            process.kill()
            process.wait(10)
        port = free_port()
        last = start(port)
        traffic.write(50)
        check_all(log, prefix, traffic)
        found = page(port, "coverage")
        assert {row["outcome"] for row in found["coverage"]} == {"answered", "tool_error"}
        assert sum(row["rollouts"] for row in found["coverage"]) == len(traffic.rollouts)
        assert found["partitions"] == [0, 1, 2, 3]
        evidence = sum(len(reward.evidence) for reward in rewards_of(log).values())
        assert sum(row["events"] for row in page(port, "counts")["counts"]) == evidence
        last.send_signal(signal.SIGTERM)
        assert last.wait(10) == 0
    traffic.writer.close()


def test_c51_others_that_join_and_leave_disorder_nothing_and_commits_go_on(
    stack: StackInfo, prefix: str, tmp_path: Path
) -> None:
    log = KafkaLog(stack.bootstrap, prefix)
    traffic = Traffic(log, seed=11)
    with workers(stack, prefix, tmp_path, window_s=4.0) as start:
        running = [start(0)]
        for turn in range(2):
            traffic.write(60)
            running.append(start(None if turn else 0))  # one joins ...
            left = behind(log, prefix)
            traffic.write(60)
            until(lambda: behind(log, prefix) < left + 60)  # noqa: B023
            gone = running.pop(0)  # ... and one leaves, in peace or without a word
            gone.send_signal(signal.SIGTERM if turn % 2 == 0 else signal.SIGKILL)
            gone.wait(20)
            traffic.write(60)
        check_all(log, prefix, traffic)
    traffic.writer.close()
