"""kill -9 of a trainer on the real broker and store: it restores, replays, finds the same digests and goes on (C15)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

import pytest

from rollwire.consumers.trainer.config import TrainerConfig
from rollwire.consumers.trainer.connect import LiveStack
from rollwire.consumers.trainer.history import BATCHES, STEPS, VERSIONS, History, read_history
from rollwire.consumers.trainer.rehearsal import TINY as POLICY
from rollwire.consumers.trainer.rehearsal import Rehearsal, rehearsal_log, write_plans
from rollwire.consumers.trainer.run import run_trainer
from rollwire.consumers.weights.paths import plan_path
from rollwire.consumers.weights.reader import load_version
from rollwire.kernels.digest import StateDigest
from rollwire.kernels.policy.model import Policy
from rollwire.kernels.policy.states import to_state
from rollwire.ops.stack import StackInfo
from rollwire.streams.seams.clock import SystemClock
from rollwire.streams.seams.log import TopicPartition
from rollwire.streams.seams.log_kafka import KafkaLog
from rollwire.streams.seams.scan import scan
from rollwire.streams.seams.store_memory import MemoryStore
from rollwire.streams.seams.store_s3 import S3Store

pytestmark = [pytest.mark.system, pytest.mark.torch]

LINEAGE = "0197a1b2-0000-7000-8000-0000000000aa"
SPEC = Rehearsal(POLICY, LINEAGE, sequences=8)
CONFIG = TrainerConfig(checkpoint_every=7)
LAST = 40
WAIT_S = 90.0

# What `rollwire run trainer` does, for a stack that is handed over as JSON.
TRAINER = """
import json, sys, threading
from rollwire.consumers.trainer.connect import LiveStack
from rollwire.consumers.trainer.config import TrainerConfig
from rollwire.consumers.trainer.run import run_trainer
from rollwire.kernels.policy.config import PolicyConfig
from rollwire.kernels.policy.model import Policy
from rollwire.kernels.policy.states import to_state
from rollwire.streams.seams.log_kafka import KafkaLog
from rollwire.streams.seams.store_s3 import S3Store
given = json.loads(sys.argv[1])
policy = PolicyConfig(**given["policy"])
last = run_trainer(
    KafkaLog(given["bootstrap"], prefix=given["prefix"], client_id="test-trainer"),
    S3Store(given["endpoint"], given["bucket"], given["access_key"], given["secret_key"]),
    policy, TrainerConfig(**given["config"]), prefix=given["prefix"], model="policy", lineage=given["lineage"],
    initial=to_state(Policy(policy, seed=3), "F32"), stop=threading.Event(), until_step=given["until_step"],
)
sys.exit(0 if last is not None and last.version == given["until_step"] else 3)
"""


class Trainers:
    """Starts trainers one after another, each with its own log file."""

    def __init__(self, stack: StackInfo, prefix: str, folder: Path) -> None:
        self._folder = folder
        self._given = json.dumps(
            {
                "bootstrap": stack.bootstrap,
                "prefix": prefix,
                "endpoint": stack.s3_endpoint,
                "bucket": stack.bucket,
                "access_key": stack.access_key,
                "secret_key": stack.secret_key,
                "policy": POLICY.model_dump(),
                "config": CONFIG.model_dump(),
                "lineage": LINEAGE,
                "until_step": LAST,
            }
        )

    def start(self) -> subprocess.Popen[bytes]:
        with (self._folder / f"trainer-{uuid.uuid4().hex[:6]}.log").open("wb") as output:
            return subprocess.Popen(
                [sys.executable, "-P", "-c", TRAINER, self._given],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def logs(self) -> str:
        return "\n".join(path.read_text()[-3000:] for path in sorted(self._folder.glob("*.log")))


def test_c15_a_killed_trainer_leaves_no_hole_and_no_repeat(
    stack: StackInfo, prefix: str, log: KafkaLog, store: S3Store, tmp_path: Path
) -> None:
    write_plans(log, SPEC, range(1, LAST + 1))
    trainers = Trainers(stack, prefix, tmp_path)
    for version in (4, 19):
        process = trainers.start()
        try:
            _wait_for_version(log, version, process, trainers)
        finally:
            process.kill()
            process.wait(timeout=10.0)
        assert process.returncode == -9, trainers.logs()
        # It died in the middle of things, not at its end.
        assert len(_history(log).steps) < LAST
    assert trainers.start().wait(timeout=WAIT_S) == 0, trainers.logs()

    history = _history(log)  # refuses holes, gaps between consumed ranges and diverging digests itself
    assert [step.step for step in history.steps] == list(range(1, LAST + 1))
    assert len(list(scan(log, (VERSIONS,)))) == LAST + 1
    assert len(list(scan(log, (STEPS,)))) == LAST
    ends = history.steps[-1].consumed[0].end
    partition = TopicPartition(BATCHES, 0)
    assert log.committed(f"{prefix}trainer", [partition]) == {partition: ends}
    assert [v.state_digest for v in history.versions] == _undisturbed()
    state = load_version(store, plan_path(history.versions, (), None, LAST), None)
    assert StateDigest.of(state).hex == history.versions[-1].state_digest


def test_two_ranks_read_their_own_partitions_and_commit_as_one(
    stack: StackInfo, prefix: str, log: KafkaLog, store: S3Store
) -> None:
    spec = SPEC._replace(ranks=2)
    write_plans(log, spec, range(1, 4))
    run_trainer(
        log,
        store,
        POLICY,
        CONFIG.model_copy(update={"ranks": 2}),
        prefix=prefix,
        model="policy",
        lineage=LINEAGE,
        initial=to_state(Policy(POLICY, seed=3), "F32"),
        stop=threading.Event(),
        until_step=3,
        connect=LiveStack(
            stack.bootstrap, prefix, stack.s3_endpoint, stack.bucket, stack.access_key, stack.secret_key
        ),
    )
    history = _history(log)
    partitions = [TopicPartition(BATCHES, rank) for rank in range(2)]
    ends = {TopicPartition(BATCHES, r.partition): r.end for r in history.steps[-1].consumed}
    assert log.committed(f"{prefix}trainer", partitions) == ends
    assert [v.state_digest for v in history.versions] == _undisturbed()[:4]


def _history(log: KafkaLog) -> History:
    return read_history(log, "policy", LINEAGE, deadline_s=WAIT_S, clock=SystemClock())


def _wait_for_version(
    log: KafkaLog, version: int, process: subprocess.Popen[bytes], trainers: Trainers
) -> None:
    reader = log.reader()
    try:
        reader.assign({TopicPartition(VERSIONS, 0): 0})
        deadline = time.monotonic() + WAIT_S
        seen = 0
        while seen <= version:
            seen += len(reader.poll(100, 0.2))
            if process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"{seen} versions, exit code {process.returncode}\n{trainers.logs()}")
    finally:
        reader.close()


def _undisturbed() -> list[str]:
    """The same plans, trained without a crash and without a broker."""
    log = rehearsal_log(SPEC, LAST)
    run_trainer(
        log,
        MemoryStore(),
        POLICY,
        CONFIG,
        prefix="t.",
        model="policy",
        lineage=LINEAGE,
        initial=to_state(Policy(POLICY, seed=3), "F32"),
        stop=threading.Event(),
        until_step=LAST,
    )
    history = read_history(log, "policy", LINEAGE, deadline_s=WAIT_S, clock=SystemClock())
    return [version.state_digest for version in history.versions]
