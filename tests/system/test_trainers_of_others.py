"""The example for Hugging Face models on the real broker and store, killed in its middle; and an alarm that pauses a trainer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from rollwire.consumers.trainer.config import TrainerConfig
from rollwire.consumers.trainer.history import BATCHES, STEPS, VERSIONS, read_history
from rollwire.consumers.trainer.rehearsal import TINY as POLICY
from rollwire.consumers.trainer.rehearsal import Rehearsal, write_plans
from rollwire.consumers.trainer.run import run_trainer
from rollwire.consumers.weights.paths import plan_path
from rollwire.consumers.weights.reader import load_version
from rollwire.kernels.digest import StateDigest
from rollwire.kernels.policy.model import Policy
from rollwire.kernels.policy.states import to_state
from rollwire.ops.stack import StackInfo
from rollwire.schemas.errors import MismatchDrift
from rollwire.schemas.records import Notice
from rollwire.streams.emit import decode_record
from rollwire.streams.seams.clock import SystemClock
from rollwire.streams.seams.log import TopicPartition
from rollwire.streams.seams.log_kafka import KafkaLog
from rollwire.streams.seams.scan import scan
from rollwire.streams.seams.store_s3 import S3Store

pytestmark = [pytest.mark.system, pytest.mark.torch]

LINEAGE = "0197a1b2-0000-7000-8000-0000000000aa"
SPEC = Rehearsal(POLICY, LINEAGE, sequences=8)
PARTITION = TopicPartition(BATCHES, 0)
LAST = 60
WAIT_S = 120.0

RUN = """
import json, sys
from transformers import Qwen2Config, Qwen2ForCausalLM
from rollwire.consumers.trainer.connect import LiveStack
given = json.loads(sys.argv[1])
sys.path.insert(0, given["examples"])
from train_hf import train
model = Qwen2ForCausalLM(Qwen2Config(
    vocab_size=20, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, tie_word_embeddings=False,
))
log, store = LiveStack(**given["stack"])()
train(model, log, store, given["stack"]["prefix"], given["lineage"], given["steps"])
"""


def start(stack: StackInfo, prefix: str, output: Path) -> subprocess.Popen[bytes]:
    given = {
        "stack": {
            "bootstrap": stack.bootstrap,
            "prefix": prefix,
            "endpoint": stack.s3_endpoint,
            "bucket": stack.bucket,
            "access_key": stack.access_key,
            "secret_key": stack.secret_key,
        },
        "examples": str(Path(__file__).parents[2] / "examples"),
        "lineage": LINEAGE,
        "steps": LAST,
    }
    with output.open("wb") as file:
        return subprocess.Popen(
            [sys.executable, "-P", "-c", RUN, json.dumps(given)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=file,
            stderr=subprocess.STDOUT,
        )


def test_a_hugging_face_trainer_that_is_killed_leaves_no_hole_and_no_repeat(
    stack: StackInfo, prefix: str, log: KafkaLog, store: S3Store, tmp_path: Path
) -> None:
    write_plans(log, SPEC, range(1, LAST + 1))
    output = tmp_path / "trainer.log"
    process = start(stack, prefix, output)
    reader = log.reader()
    try:
        reader.assign({TopicPartition(VERSIONS, 0): 0})
        deadline_s, seen = time.monotonic() + WAIT_S, 0
        while seen < 4:
            seen += len(reader.poll(100, 0.1))
            assert process.poll() is None, output.read_text()[-3000:]
            assert time.monotonic() < deadline_s, output.read_text()[-3000:]
    finally:
        process.kill()
        process.wait(timeout=10.0)
        reader.close()
    process = start(stack, prefix, output)
    assert process.wait(timeout=WAIT_S) == 0, output.read_text()[-3000:]

    history = read_history(log, "policy", LINEAGE, deadline_s=WAIT_S, clock=SystemClock())
    assert [step.step for step in history.steps] == list(range(1, LAST + 1))
    assert len(list(scan(log, (VERSIONS,)))) == LAST + 1
    assert len(list(scan(log, (STEPS,)))) == LAST
    assert log.committed(f"{prefix}trainer", [PARTITION]) == {PARTITION: history.steps[-1].consumed[0].end}
    state = load_version(store, plan_path(history.versions, (), None, LAST), None)
    assert StateDigest.of(state).hex == history.versions[-1].state_digest
    assert "model.layers.0.self_attn.q_proj.weight" in state


def test_an_alarm_stands_in_the_log_once_and_pauses_the_trainer(
    prefix: str, log: KafkaLog, store: S3Store
) -> None:
    write_plans(log, SPEC, range(1, 6))

    def run(**settings: object) -> None:
        config = TrainerConfig(mismatch_bound=0.01, mismatch_steps=2, mismatch_min_tokens=5)
        run_trainer(
            log,
            store,
            POLICY,
            config.model_copy(update=settings),
            prefix=prefix,
            model="policy",
            lineage=LINEAGE,
            initial=to_state(Policy(POLICY, seed=3), "F32"),
            stop=threading.Event(),
            until_step=5,
        )

    for _ in range(2):
        with pytest.raises(MismatchDrift, match="mismatch_accepted_step=2"):
            run(mismatch_action="pause")
    run(mismatch_action="warn")
    events = [decode_record(record) for record in scan(log, ("notices",))]
    assert [(e.name, e.attributes["step"]) for e in events if isinstance(e, Notice)] == [
        ("mismatch_drift", "2"),
        ("mismatch_drift", "4"),
    ]
    assert len(list(scan(log, (STEPS,)))) == 5
