"""An engine over HTTP behind `rollwire fleet follow` and `rollwire run fleet`, on the real broker and S3 server."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from rollwire.consumers.weights.gate_proxy import GateConfig, gate_app
from rollwire.consumers.weights.publisher import PublisherConfig, SnapshotPublisher
from rollwire.kernels.policy.config import PolicyConfig
from rollwire.kernels.tensors import State
from rollwire.ops.http_server import served
from rollwire.ops.settings import build_settings, save_settings
from rollwire.ops.stack import StackInfo
from rollwire.ops.stub_engine.config import Kind, StubEngineConfig
from rollwire.ops.stub_engine.serve import StubServer, running_stub
from rollwire.ops.stub_engine.weights import checksums, fresh_policy, write_policy
from rollwire.producers.engine_http import EngineConfig
from rollwire.producers.fleet import FleetConfig
from rollwire.schemas.records import Rollout, RoutingTrace, WeightVersion
from rollwire.streams.emit import decode_record, outgoing
from rollwire.streams.seams.log_kafka import KafkaLog
from rollwire.streams.seams.scan import scan
from rollwire.streams.seams.store_s3 import S3Store

WAIT = 60.0
WaitFor = Callable[[Callable[[], bool], float], None]
SCRIPT = Path(sys.executable).with_name("rollwire")
CONFIG = PolicyConfig()

pytestmark = [pytest.mark.system, pytest.mark.torch]


class Trainer:
    """Publishes random policies."""

    def __init__(self, stack: StackInfo, prefix: str) -> None:
        self.bucket = f"engine-{uuid.uuid4().hex[:12]}"
        store = S3Store(stack.s3_endpoint, self.bucket, stack.access_key, stack.secret_key)
        store.ensure_bucket()
        self.lineage = str(uuid.uuid4())
        self.states: list[State] = []
        self.log = KafkaLog(stack.bootstrap, prefix=prefix, client_id="test-engine")
        self._writer = self.log.writer()
        self._publisher = SnapshotPublisher(
            store, model="policy", lineage=self.lineage, config=PublisherConfig(anchor_every=3)
        )

    def publish(self) -> WeightVersion:
        version = len(self.states)
        self.states.append(fresh_policy(CONFIG, version + 1))
        event = self._publisher.submit(version, version, self.states[-1]).result(WAIT)
        self._writer.write([outgoing(event, source="rollwire/trainer", time_us=event.published_us)])
        self._publisher.committed(version)
        return event

    def close(self) -> None:
        self._publisher.close()
        self._writer.close()
        self.log.close()


@pytest.fixture
def trainer(stack: StackInfo, prefix: str) -> Iterator[Trainer]:
    trainer = Trainer(stack, prefix)
    yield trainer
    trainer.close()


@pytest.fixture
def first(tmp_path: Path) -> Path:
    write_policy(tmp_path / "first", fresh_policy(CONFIG, 0), CONFIG)
    return tmp_path / "first"


def serves(server: StubServer, version: int, state: State) -> bool:
    core = server.core
    return core.label == str(version) and core.checksums() == checksums(state) and not core.paused


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_c34_an_engine_follows_through_kills_of_its_follower(
    stack: StackInfo,
    prefix: str,
    trainer: Trainer,
    first: Path,
    tmp_path: Path,
    kind: Kind,
    wait_for: WaitFor,
) -> None:
    """Killed at random moments, one version after another: in the end the engine serves the newest, whole, and is not paused."""
    where = ["--dir", str(stack.dir), "--prefix", prefix, "--bucket", trainer.bucket, "--replica", "r0"]
    with running_stub(StubEngineConfig(kind=kind, model_path=first)) as server:
        engine = [
            "--target",
            kind,
            "--url",
            server.url,
            "--folder",
            str(tmp_path / "root"),
            "--extra",
            str(first),
        ]
        line = [str(SCRIPT), "fleet", "follow", *engine, "--fingerprint", *where]
        trainer.publish()
        follower = subprocess.Popen(line)
        try:
            wait_for(lambda: serves(server, 0, trainer.states[0]), WAIT)
            draw = random.Random(5)
            for _ in range(2):
                asked = len(server.core.calls)
                trainer.publish()
                calls = draw.randrange(1, 6)
                wait_for(lambda asked=asked, calls=calls: len(server.core.calls) >= asked + calls, WAIT)  # type: ignore[misc]
                follower.kill()
                assert follower.wait(WAIT) == -signal.SIGKILL
                follower = subprocess.Popen(line)
                wait_for(lambda: serves(server, len(trainer.states) - 1, trainer.states[-1]), WAIT)
            # The engine is started anew: it holds the weights that it was started with, under another name.
            server.core.load(first)
            server.core.set_label("default")
            wait_for(lambda: serves(server, 2, trainer.states[2]), WAIT)
            with served(gate_app(GateConfig(kind=kind, url=server.url)), lifespan=True) as gate:
                body: dict[str, Any] = {"prompt": [3, 4, 5], "max_tokens": 4, "exact_weight_version": 2}
                answer = httpx.post(f"{gate.url}/v1/completions", json=body, timeout=WAIT)
                assert answer.status_code == 200, answer.text
                assert answer.headers["X-Rollwire-Served-Version"] == "2"
                body["exact_weight_version"] = 1
                assert httpx.post(f"{gate.url}/v1/completions", json=body, timeout=WAIT).status_code == 409
            follower.send_signal(signal.SIGTERM)
            assert follower.wait(WAIT) == 0
        finally:
            follower.kill()
            follower.wait(WAIT)


def test_a_rollout_worker_samples_on_vllm(
    stack: StackInfo, prefix: str, trainer: Trainer, first: Path, tmp_path: Path, wait_for: WaitFor
) -> None:
    with running_stub(StubEngineConfig(kind="vllm", model_path=first)) as server:
        engine = EngineConfig(kind="vllm", url=server.url, root=tmp_path / "root", first=first)
        fleet = FleetConfig(engine=engine, max_open_groups=64, group_size=4, max_running=32)
        values = {"prefix": prefix, "bucket": trainer.bucket, "lineage": trainer.lineage, "fleet": fleet}
        settings = build_settings(values, where="the test")
        save_settings(tmp_path / "run", settings)
        trainer.publish()
        line = [str(SCRIPT), "run", "fleet", "--run", str(tmp_path / "run"), "--dir", str(stack.dir)]
        worker = subprocess.Popen(line)
        try:
            wait_for(lambda: {0} <= versions(trainer.log), WAIT)
            trainer.publish()
            wait_for(lambda: serves(server, 1, trainer.states[1]), WAIT)
            worker.send_signal(signal.SIGTERM)
            assert worker.wait(WAIT) == 0
        finally:
            worker.kill()
            worker.wait(WAIT)
    events = [decode_record(record) for record in scan(trainer.log, ["rollouts", "routing-traces"])]
    rollouts = {event.rollout_id for event in events if isinstance(event, Rollout)}
    assert rollouts
    assert {event.rollout_id for event in events if isinstance(event, RoutingTrace)} == rollouts
    assert versions(trainer.log) <= {0, 1}


def versions(log: KafkaLog) -> set[int]:
    events = [decode_record(record) for record in scan(log, ["rollouts"])]
    return {span.version for event in events if isinstance(event, Rollout) for span in event.spans}
