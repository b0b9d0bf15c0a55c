"""`rollwire audit ledger` on a real broker, store and gateway: the same account from log and archive, in two time zones."""

from __future__ import annotations

import json
import os
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import TopicPartition as Place
from confluent_kafka.admin import AdminClient

from rollwire.ops.bench.feedback.bodies import Bodies
from rollwire.ops.bench.feedback.run import gateway_server, new_key
from rollwire.ops.demo.supervisor import rollwire_command
from rollwire.ops.stack import StackInfo
from rollwire.ops.stores import stack_store

pytestmark = pytest.mark.system

EVENTS = 400
WAIT_S = 120.0


def rollwire(stack: StackInfo, prefix: str, *words: str, zone: str = "UTC") -> int:
    command = [*rollwire_command(), *words, "--dir", str(stack.dir), "--prefix", prefix]
    done = subprocess.run(
        command, env={**os.environ, "TZ": zone}, capture_output=True, text=True, timeout=WAIT_S, check=False
    )
    assert done.returncode in (0, 1), done.stderr
    return done.returncode


def test_t7_p8_the_account_equals_the_gateways_counters_and_survives_the_log(
    stack: StackInfo, prefix: str, tmp_path: Path
) -> None:
    def audit(zone: str, expected: int) -> dict[str, Any]:
        file = tmp_path / "account.json"
        words = (
            "audit",
            "ledger",
            "--metrics",
            f"http://127.0.0.1:{gateway.port}/metrics",
            "--json",
            str(file),
        )
        assert rollwire(stack, prefix, *words, zone=zone) == expected
        found: dict[str, Any] = json.loads(file.read_bytes())
        return found

    key = new_key(stack)
    bodies = Bodies("audited", time.time_ns() // 1_000)
    with gateway_server(stack, tmp_path, prefix) as gateway:
        request = urllib.request.Request(
            f"http://127.0.0.1:{gateway.port}/v1/feedback",
            data=bodies.lines(0, EVENTS),
            headers={"authorization": f"Bearer {key}", "content-type": "application/x-ndjson"},
        )
        with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
            assert answer.status in (200, 201, 202)

        from_log = audit("UTC", 0)
        assert from_log["results"] == {"ledger.gap": 0.0}
        assert sum(line["received"] for line in from_log["hours"]) == EVENTS
        assert [(one["accepted"], one["pending"]) for one in from_log["live"]] == [(EVENTS, 0)]
        (note,) = from_log["notes"]
        assert f"{EVENTS} events acknowledged" in note
        assert f"{EVENTS} in user-feedback" in note

        assert rollwire(stack, prefix, "archive", "--once") == 0
        admin = AdminClient({"bootstrap.servers": stack.bootstrap})
        deleted = admin.delete_records([Place(f"{prefix}user-feedback", p, -1) for p in range(4)])
        assert sum(one.result(WAIT_S).low_watermark for one in deleted.values()) == EVENTS
        from_archive = audit("Asia/Shanghai", 0)
        assert from_archive["digests"] == from_log["digests"]
        assert from_archive["hours"] == from_log["hours"]

        # What is lost from both is missing against the gateway's word, and against nothing else.
        store = stack_store(stack, None)
        (gone, *_) = store.list(f"archive/{prefix.rstrip('.')}/records/user-feedback/0/")
        store.delete(gone.key)
        lost = audit("UTC", 1)
        kinds = [finding["kind"] for finding in lost["findings"]]
        assert "unaccounted" in kinds
        assert lost["digests"] != from_log["digests"]
