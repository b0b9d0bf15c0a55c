"""A trainer that ends in the middle of things, or is too slow to be polled, on the real broker and store (C15, C47).

The trainer of integers: its weights are a function of the rollouts trained, of how often and in which order, so equal
digests say "each once, in order"; commits, checkpoints and publications are the real ones.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollwire.consumers.trainer.arithmetic import ArithmeticLearner, arithmetic_run, run_arithmetic_trainer
from rollwire.consumers.trainer.config import TrainerConfig
from rollwire.consumers.trainer.figures import Figures
from rollwire.consumers.trainer.history import BATCHES, STEPS, VERSIONS, History, read_history
from rollwire.consumers.trainer.life import run_sessions
from rollwire.consumers.trainer.rehearsal import Rehearsal, write_plans
from rollwire.consumers.trainer.sums import NOTHING, fold, state_of, sums_of
from rollwire.consumers.weights.paths import plan_path
from rollwire.consumers.weights.reader import load_version
from rollwire.kernels.digest import StateDigest
from rollwire.kernels.policy.config import PolicyConfig
from rollwire.ops.stack import StackInfo
from rollwire.schemas.errors import Fenced
from rollwire.schemas.records import PackedBatch
from rollwire.streams.emit import decode_record
from rollwire.streams.seams.clock import SystemClock
from rollwire.streams.seams.log import TopicPartition
from rollwire.streams.seams.log_kafka import KafkaLog
from rollwire.streams.seams.scan import scan
from rollwire.streams.seams.store_s3 import S3Store

pytestmark = pytest.mark.system

LINEAGE = "0197a1b2-0000-7000-8000-0000000000aa"
SPEC = Rehearsal(PolicyConfig(num_hidden_layers=1, num_experts=2), LINEAGE, sequences=4, microbatches=1)
CONFIG = TrainerConfig(checkpoint_every=4)
GROUPS = 16  # one a step
TRAINED, IN_FLIGHT, BUFFERED = 6, 3, 4
PARTITION = TopicPartition(BATCHES, 0)
WAIT_S = 60.0

# Commits `trained` steps; the objects of the next one do not get into the store. So two steps are uncommitted, the third
# plan is in hand, and what is behind it waits in the client. It says so and stays there until it is told to end.
TRAINER = """
import json, signal, sys, threading
from rollwire.consumers.trainer.arithmetic import arithmetic_run
from rollwire.consumers.trainer.config import TrainerConfig
from rollwire.consumers.trainer.session import Session
from rollwire.streams.seams.log_kafka import KafkaLog
from rollwire.streams.seams.store_s3 import S3Store

given = json.loads(sys.argv[1])
stop, held, learners = threading.Event(), threading.Event(), []
signal.signal(signal.SIGTERM, lambda *_: stop.set())

class Slow(S3Store):
    manifests = 0
    def create(self, key, data):
        if "/manifests/" in key:
            self.manifests += 1
            if self.manifests > given["trained"] + 1:  # version 0 has one too
                held.set()
                stop.wait()
        return super().create(key, data)

run = arithmetic_run(
    KafkaLog(given["bootstrap"], prefix=given["prefix"], client_id="test-trainer"),
    Slow(given["endpoint"], given["bucket"], given["access_key"], given["secret_key"]),
    TrainerConfig(**given["config"]), prefix=given["prefix"], model="policy", lineage=given["lineage"], stop=stop,
)

def learner():
    learners.append(run.learner())
    return learners[0]

session, said = Session(run._replace(learner=learner)), False
while (turned := session.turn()) != "done":
    plan, last = learners[0].plan, session.result
    if not said and held.is_set() and plan is not None and plan.step == given["in_hand"]:
        if turned == "waiting" and last.version == given["trained"]:
            print(json.dumps({"committed": last.version, "in_hand": plan.step}), flush=True)
            said = True
session.close()
"""


@pytest.mark.parametrize(
    ("end", "kept"), [(signal.SIGKILL, TRAINED), (signal.SIGTERM, TRAINED + 2)], ids=["SIGKILL", "SIGTERM"]
)
def test_c15_a_restart_skips_and_repeats_no_group(
    stack: StackInfo,
    prefix: str,
    log: KafkaLog,
    store: S3Store,
    tmp_path: Path,
    end: signal.Signals,
    kept: int,
) -> None:
    write_plans(log, SPEC, range(1, TRAINED + IN_FLIGHT + BUFFERED + 1))
    given = {
        "bootstrap": stack.bootstrap,
        "prefix": prefix,
        "endpoint": stack.s3_endpoint,
        "bucket": stack.bucket,
        "access_key": stack.access_key,
        "secret_key": stack.secret_key,
        # Long enough to finish what was taken on a machine that does much else.
        "config": CONFIG.model_copy(update={"shutdown_s": WAIT_S / 2}).model_dump(),
        "lineage": LINEAGE,
        "trained": TRAINED,
        "in_hand": TRAINED + IN_FLIGHT,
    }
    errors = tmp_path / "trainer.log"
    with errors.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", TRAINER, json.dumps(given)], stdout=subprocess.PIPE, stderr=output
        )
    try:
        assert process.stdout is not None
        told = _line(process, errors)
        process.send_signal(end)
        code = process.wait(timeout=WAIT_S)
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
    assert told == {"committed": TRAINED, "in_hand": TRAINED + IN_FLIGHT}
    assert code == (-9 if end is signal.SIGKILL else 0), errors.read_text()[-3000:]

    # The cursor is what was trained, not what was read; on SIGTERM, what was already taken is finished first.
    trained = _history(log).steps
    assert len(trained) == kept, errors.read_text()[-3000:]
    assert log.committed(f"{prefix}trainer", [PARTITION]) == {PARTITION: trained[-1].consumed[0].end}

    write_plans(log, SPEC, range(TRAINED + IN_FLIGHT + BUFFERED + 1, GROUPS + 1))
    _train(log, store, prefix, until_step=GROUPS)
    _check(log, store, prefix, GROUPS)


class Impatient(KafkaLog):
    """Its consumers count as dead when nobody polls them for a second."""

    INTERVAL_S = 1.0

    def _consumer_config(self, group: str) -> dict[str, Any]:
        interval_ms = round(self.INTERVAL_S * 1_000)
        return super()._consumer_config(group) | {
            "max.poll.interval.ms": interval_ms,
            "session.timeout.ms": interval_ms,
        }


class Slow(ArithmeticLearner):
    """Computes step `slow` until `go` is set, for `at_least_s` in any case."""

    def __init__(
        self, *args: Any, slow: int, go: threading.Event, at_least_s: float, **settings: Any
    ) -> None:
        super().__init__(*args, **settings)
        self._slow, self._go, self._at_least_s = slow, go, at_least_s
        self.reached = threading.Event()

    def compute(self) -> list[Figures]:
        if self.plan is not None and self.plan.step == self._slow:
            self.reached.set()
            began_s = time.monotonic()
            assert self._go.wait(WAIT_S)
            while (left_s := self._at_least_s - (time.monotonic() - began_s)) > 0:
                threading.Event().wait(left_s)
        return super().compute()


@pytest.fixture
def impatient(stack: StackInfo, prefix: str) -> Iterator[Impatient]:
    log = Impatient(stack.bootstrap, prefix=prefix, client_id="test-impatient")
    yield log
    log.close()


def test_c47_a_step_longer_than_the_poll_interval_loses_nothing(
    impatient: Impatient, log: KafkaLog, store: S3Store, prefix: str
) -> None:
    write_plans(
        log, SPEC, range(1, 21)
    )  # more than one poll takes: the consumer is needed again after the slow step
    go = threading.Event()
    go.set()
    learner = _slow(impatient, store, go, at_least_s=2.5 * Impatient.INTERVAL_S)
    run = arithmetic_run(
        impatient,
        store,
        CONFIG,
        prefix=prefix,
        model="policy",
        lineage=LINEAGE,
        stop=threading.Event(),
        until_step=20,
    )
    last = run_sessions(run._replace(learner=lambda: learner), threading.Event().wait)
    assert learner.reached.is_set()
    assert last is not None
    assert last.version == 20
    _check(log, store, prefix, 20)


def test_c47_the_old_owner_cannot_commit_after_a_hand_over(
    impatient: Impatient, log: KafkaLog, store: S3Store, prefix: str
) -> None:
    write_plans(log, SPEC, range(1, 7))
    go, ended = threading.Event(), []
    learner = _slow(impatient, store, go, at_least_s=0.0)
    run = arithmetic_run(
        impatient,
        store,
        CONFIG,
        prefix=prefix,
        model="policy",
        lineage=LINEAGE,
        stop=threading.Event(),
        until_step=6,
    )

    def old() -> None:
        try:
            run_sessions(run._replace(learner=lambda: learner), threading.Event().wait)
        except Fenced as error:
            ended.append(error)

    thread = threading.Thread(target=old)
    thread.start()
    try:
        assert learner.reached.wait(WAIT_S)
        _train(log, store, prefix, until_step=6)  # takes over, and takes the slow step itself
        before = _history(log)
    finally:
        go.set()
        thread.join(WAIT_S)
    assert len(ended) == 1
    assert "took over" in str(ended[0])
    assert _history(log) == before
    _check(log, store, prefix, 6)


def _slow(log: KafkaLog, store: S3Store, go: threading.Event, *, at_least_s: float) -> Slow:
    return Slow(
        log,
        store,
        CONFIG,
        model="policy",
        lineage=LINEAGE,
        clock=SystemClock(),
        slow=3,
        go=go,
        at_least_s=at_least_s,
    )


def _train(log: KafkaLog, store: S3Store, prefix: str, *, until_step: int) -> None:
    last = run_arithmetic_trainer(
        log,
        store,
        CONFIG,
        prefix=prefix,
        model="policy",
        lineage=LINEAGE,
        stop=threading.Event(),
        until_step=until_step,
    )
    assert last is not None
    assert last.version == until_step


def _line(process: subprocess.Popen[bytes], errors: Path) -> Any:
    """The first JSON line of its output; the log's lines go there too."""
    assert process.stdout is not None
    timer = threading.Timer(WAIT_S, process.kill)
    timer.start()
    try:
        for line in process.stdout:
            if line.startswith(b"{"):
                return json.loads(line)
    finally:
        timer.cancel()
    raise AssertionError(errors.read_text()[-3000:])


def _history(log: KafkaLog) -> History:
    return read_history(log, "policy", LINEAGE, deadline_s=WAIT_S, clock=SystemClock())


def _check(log: KafkaLog, store: S3Store, prefix: str, steps: int) -> None:
    """`steps` plans were trained, each once and in order: the log, the group's offset and the weights' bytes say so."""
    sums, digests, groups = NOTHING, [StateDigest.of(state_of(NOTHING)).hex], set[str]()
    for record in scan(log, (BATCHES,)):
        plan = decode_record(record)
        assert isinstance(plan, PackedBatch)
        sums = fold(sums, [plan])
        digests.append(StateDigest.of(state_of(sums)).hex)
        groups.update(plan.group_ids)
    history = _history(log)  # refuses holes and ranges that do not join
    assert [version.state_digest for version in history.versions] == digests
    assert len(groups) == len(history.steps) == steps
    assert len(list(scan(log, (VERSIONS,)))) == steps + 1
    assert len(list(scan(log, (STEPS,)))) == steps
    ends = {PARTITION: history.steps[-1].consumed[0].end}
    assert log.committed(f"{prefix}trainer", [PARTITION]) == ends
    state = load_version(store, plan_path(history.versions, (), None, steps), None)
    assert sums_of(state) == sums
