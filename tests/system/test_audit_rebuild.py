"""A run with two ranks on the real broker and store: every version made anew both ways, and an old one served again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from rollwire.consumers.trainer.config import TrainerConfig
from rollwire.consumers.trainer.connect import LiveStack
from rollwire.consumers.trainer.history import History, read_history
from rollwire.consumers.trainer.rehearsal import TINY as POLICY
from rollwire.consumers.trainer.rehearsal import Rehearsal, write_plans
from rollwire.consumers.weights.anchor import AnchorFile, read_anchor
from rollwire.consumers.weights.publisher import PublisherConfig
from rollwire.kernels.digest import StateDigest
from rollwire.ops.cli import run
from rollwire.ops.demo.supervisor import child_environment
from rollwire.ops.stack import StackInfo
from rollwire.schemas.records import FleetStatus
from rollwire.streams.emit import decode_record
from rollwire.streams.seams.clock import SystemClock
from rollwire.streams.seams.log_kafka import KafkaLog
from rollwire.streams.seams.scan import scan
from rollwire.streams.seams.store_s3 import S3Store

pytestmark = [pytest.mark.system, pytest.mark.torch, pytest.mark.timeout(240)]

LINEAGE = "0197a1b2-0000-7000-8000-0000000000aa"
SPEC = Rehearsal(POLICY, LINEAGE, ranks=2, sequences=8)
STEPS = 5


def trained(stack: StackInfo, prefix: str, log: KafkaLog, store: S3Store) -> History:
    from rollwire.consumers.trainer.run import run_trainer
    from rollwire.kernels.policy.model import Policy
    from rollwire.kernels.policy.states import to_state

    write_plans(log, SPEC, range(1, STEPS + 1))
    run_trainer(
        log,
        store,
        POLICY,
        TrainerConfig(checkpoint_every=2, ranks=2),
        prefix=prefix,
        model="policy",
        lineage=LINEAGE,
        initial=to_state(Policy(POLICY, seed=3), "F32"),
        stop=threading.Event(),
        until_step=STEPS,
        publisher_config=PublisherConfig(anchor_every=4),
        connect=LiveStack(
            stack.bootstrap, prefix, stack.s3_endpoint, stack.bucket, stack.access_key, stack.secret_key
        ),
    )
    return read_history(log, "policy", LINEAGE, deadline_s=60, clock=SystemClock())


def test_every_version_is_made_anew_both_ways_and_an_old_one_is_served(
    stack: StackInfo, prefix: str, log: KafkaLog, store: S3Store, tmp_path: Path
) -> None:
    history = trained(stack, prefix, log, store)
    where = ["--dir", str(stack.dir), "--prefix", prefix]
    digests = {f"version {v.version}": v.state_digest for v in history.versions}
    for via in ("deltas", "training"):
        file = tmp_path / f"{via}.json"
        assert run(["audit", "rebuild", "--all", "--via", via, "--json", str(file), *where]) == 0
        report = json.loads(file.read_bytes())
        assert (report["findings"], report["digests"]) == ([], digests)
        assert report["results"][f"rebuild.{via}_equal"] == report["results"]["rebuild.versions"]

    out = tmp_path / "two.safetensors"
    line = ["audit", "rebuild", "--version", "2", *where]
    assert run([*line, "--out", str(out)]) == 0
    with pytest.raises(SystemExit, match="2"):
        run([*line, "--out", str(out)])  # never written over
    assert run(["audit", "rebuild", "--version", "99", *where]) == 1
    state = read_anchor([AnchorFile(out.name, out.read_bytes())])
    assert StateDigest.of(state).hex == digests["version 2"]

    serve = subprocess.Popen(
        [
            str(Path(sys.executable).with_name("rollwire")),
            *("serve-at", "--version", "2", "--kind", "sglang", "--port", "0", *where),
        ],
        stdout=subprocess.PIPE,
        text=True,
        env=child_environment(os.environ),
    )
    try:
        assert serve.stdout is not None
        said = serve.stdout.readline()
        assert said.startswith(f"version 2 ({digests['version 2'][:16]})"), said
        url = said.split(" at ")[1].split(",")[0]
        assert post(url, "/generate", BODY)["meta_info"]["weight_version"] == "2"
        # What would change what is served is refused.
        refused = httpx.post(url + "/update_weight_version", json={"new_version": "3"}, timeout=60)
        assert (refused.status_code, "pinned to version 2" in refused.text) == (403, True)
        load = {"model_path": str(tmp_path)}
        assert httpx.post(url + "/update_weights_from_disk", json=load, timeout=60).status_code == 403
    finally:
        serve.send_signal(signal.SIGTERM)
        serve.communicate(timeout=60)
    assert serve.returncode == 0
    statuses = [
        event
        for record in scan(log, ["fleet-status"])
        if isinstance(event := decode_record(record), FleetStatus)
    ]
    assert [(s.fleet, s.replica, s.state, s.version) for s in statuses] == [
        ("serve-at", "at-2", "swapped", 2),
        ("serve-at", "at-2", "stopped", 2),
    ]


BODY = {"input_ids": [3, 4, 5], "sampling_params": {"max_new_tokens": 4, "temperature": 0.0}}


def post(url: str, path: str, body: Any) -> Any:
    answer = httpx.post(url + path, json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()
