"""Sealing, verifying and proving on the real broker and the real S3 server, as a person runs them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import TopicPartition as WirePartition
from confluent_kafka.admin import AdminClient

from rollwire.ops.commands.audit_prove import prove
from rollwire.ops.commands.audit_seal import seal
from rollwire.ops.commands.audit_verify import verify
from rollwire.ops.stack import StackInfo
from rollwire.ops.stores import stack_store
from rollwire.streams.archive.layout import head_key
from rollwire.streams.findings import Kind
from rollwire.streams.seams.log import Outgoing
from rollwire.streams.seams.log_kafka import KafkaLog

pytestmark = pytest.mark.system


def fill(stack: StackInfo, prefix: str, first: int, count: int) -> None:
    """Events `e<n>` in transactions, so that control records stand among them."""
    log = KafkaLog(stack.bootstrap, prefix)
    writer = log.transactional_writer(f"{prefix}fill")
    try:
        for start in range(first, first + count, 100):
            writer.begin()
            writer.write(
                [
                    Outgoing(
                        "rollouts",
                        b"key",
                        b"value %d" % i,
                        (("ce_id", b"e%d" % i), ("nothing", None)),
                        i % 2,
                    )
                    for i in range(start, start + 100)
                ]
            )
            writer.commit("fill", {})
    finally:
        writer.close()
        log.close()


def test_t8_c86_a_sealed_log_is_verified_and_proven_and_what_is_taken_from_it_is_named(
    stack: StackInfo, prefix: str, tmp_path: Path
) -> None:
    report = tmp_path / "report.json"

    def verified(*, memory: bool = True) -> tuple[int, dict[str, Any]]:
        code = verify(dir=stack.dir, prefix=prefix, json=report, memory=memory)
        return code, json.loads(report.read_bytes())

    fill(stack, prefix, 0, 1_000)
    assert seal(once=True, dir=stack.dir, prefix=prefix) == 0
    fill(stack, prefix, 1_000, 400)
    assert seal(once=True, dir=stack.dir, prefix=prefix) == 0
    code, found = verified()
    assert (code, found["findings"]) == (0, [])
    assert found["checked"]["records of the log"] == 1_400
    assert found["checked"]["heads"] == 2

    proof = tmp_path / "proof.json"
    assert prove(event="e777", topic=("rollouts",), out=proof, dir=stack.dir, prefix=prefix) == 0
    assert prove(check=proof, dir=stack.dir) == 0
    told = json.loads(proof.read_bytes())
    proof.write_text(json.dumps({**told, "offset": told["offset"] + 1}))
    assert prove(check=proof, dir=stack.dir, json=report) == 1
    assert [f["kind"] for f in json.loads(report.read_bytes())["findings"]] == [Kind.PROOF_INVALID]
    assert prove(event="e-none", topic=("rollouts",), dir=stack.dir, prefix=prefix) == 1

    # An administrator deletes a beginning that no policy has let go of.
    admin = AdminClient({"bootstrap.servers": stack.bootstrap})
    cut = 100
    for future in admin.delete_records([WirePartition(f"{prefix}rollouts", 1, cut)]).values():
        future.result(30)
    code, found = verified()
    assert code == 1
    assert [(f["kind"], f["position"]) for f in found["findings"]] == [
        (Kind.RECORDS_MISSING, {"topic": "rollouts", "partition": 1, "offset": 0})
    ]

    # And the newest head is taken away: the store alone could not tell.
    stack_store(stack, None).delete(head_key(prefix.rstrip("."), 2))
    code, found = verified()
    assert code == 1
    assert Kind.HEAD_ROLLED_BACK in [f["kind"] for f in found["findings"]]
    code, found = verified(memory=False)
    assert [f["kind"] for f in found["findings"]] == [Kind.RECORDS_MISSING]
