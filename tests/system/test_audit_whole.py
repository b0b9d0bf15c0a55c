"""The promise of audits as a whole: what they said before retention took the topics' beginnings, they say after it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import TopicPartition as WirePartition
from confluent_kafka.admin import AdminClient

from rollwire.consumers.trainer.arithmetic import run_arithmetic_trainer
from rollwire.consumers.trainer.config import TrainerConfig
from rollwire.consumers.weights.publisher import PublisherConfig
from rollwire.ops.cli import run
from rollwire.ops.stack import StackInfo
from rollwire.schemas.catalogue import TOPICS
from rollwire.schemas.records import Event
from rollwire.streams import synthetic
from rollwire.streams.assemble_config import AssembleConfig
from rollwire.streams.emit import outgoing
from rollwire.streams.pack import PackConfig
from rollwire.streams.run_assemble import run_assemble
from rollwire.streams.run_pack import run_pack
from rollwire.streams.seams.log import TopicPartition
from rollwire.streams.seams.log_kafka import KafkaLog
from rollwire.streams.seams.scan import scan
from rollwire.streams.seams.store_s3 import S3Store

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]

STEPS, GROUPS_PER_STEP, MEMBERS = 6, 2, 4


def write_groups(log: KafkaLog) -> list[str]:
    """As many groups as the steps take, of rewards that differ; gives their ids."""
    now_us = time.time_ns() // 1_000
    groups = [synthetic.group_id(now_us, number) for number in range(STEPS * GROUPS_PER_STEP)]
    events: list[Event] = []
    for group in groups:
        for index in range(MEMBERS):
            events.append(synthetic.rollout(group, index, MEMBERS, at_us=now_us))
            events.append(synthetic.reward(group, index, float(index % 2), at_us=now_us))
            events.append(synthetic.trace(group, index, at_us=now_us))
    writer = log.writer()
    writer.write([outgoing(event, source="test", time_us=now_us) for event in events], 60.0)
    writer.close()
    return groups


def flow(log: KafkaLog, store: S3Store, prefix: str) -> list[str]:
    """From rollouts to the last version, through the real processors."""
    stop, ended = threading.Event(), list[BaseException]()
    pack = PackConfig(groups_per_step=GROUPS_PER_STEP, max_lag_versions=100, max_steps_ahead=100)

    def kept(work: Callable[[], object]) -> threading.Thread:
        def target() -> None:
            try:
                work()
            except BaseException as error:
                ended.append(error)
                raise

        thread = threading.Thread(target=target, daemon=True)
        thread.start()
        return thread

    running = [
        kept(lambda: run_assemble(log, AssembleConfig(), prefix=prefix, partitions=range(4), stop=stop)),
        kept(
            lambda: run_pack(log, pack, prefix=prefix, model="policy", lineage=synthetic.LINEAGE, stop=stop)
        ),
    ]
    groups = write_groups(log)
    try:
        last = run_arithmetic_trainer(
            log,
            store,
            TrainerConfig(checkpoint_every=2),
            prefix=prefix,
            model="policy",
            lineage=synthetic.LINEAGE,
            stop=threading.Event(),
            until_step=STEPS,
            publisher_config=PublisherConfig(anchor_every=4),
        )
    finally:
        stop.set()
        for thread in running:
            thread.join(30)
    assert not ended
    assert last is not None
    assert last.version == STEPS
    return groups


def retention_takes_all(stack: StackInfo, prefix: str, log: KafkaLog) -> int:
    """Deletes every record of the topics that are not compacted; how many partitions had some."""
    partitions = [
        TopicPartition(topic, number)
        for topic, spec in TOPICS.items()
        if not spec.compacted
        for number in range(log.partitions(topic))
    ]
    ends = {at: end for at, end in log.written_offsets(partitions).items() if end}
    admin = AdminClient({"bootstrap.servers": stack.bootstrap, "broker.address.family": "v4"})
    wire = [WirePartition(prefix + at.topic, at.partition, end) for at, end in ends.items()]
    for future in admin.delete_records(wire).values():
        future.result(30)
    assert log.beginning_offsets(list(ends)) == ends
    return len(ends)


def test_after_retention_lineage_verify_rebuild_and_ledger_are_as_before_from_the_archive(
    stack: StackInfo, prefix: str, log: KafkaLog, store: S3Store, tmp_path: Path
) -> None:
    groups = flow(log, store, prefix)
    where = ["--dir", str(stack.dir), "--prefix", prefix]

    def asked(*question: str) -> Any:
        file = tmp_path / "answer.json"
        assert run(["audit", *question, "--json", str(file), *where]) == 0, question
        return json.loads(file.read_bytes())

    def audits() -> dict[str, Any]:
        rebuilt = [asked("rebuild", "--all", "--via", via) for via in ("deltas", "training")]
        assert [report["results"]["rebuild.versions"] for report in rebuilt] == [STEPS + 1, STEPS]
        return {
            "digests": [report["digests"] for report in rebuilt],
            "equal": [report["results"] for report in rebuilt],
            "versions": [asked("lineage", "--version", str(v))["answer"] for v in range(STEPS + 1)],
            "rollout": asked("lineage", "--rollout", f"{groups[0]}.1")["answer"],
            "ledger": asked("ledger"),
        }

    for _ in scan(log, ["train-steps", "weight-versions"], hidden=True):
        pass  # until the last transaction is to be read
    before = audits()
    assert len(before["digests"][0]) == STEPS + 1
    assert before["rollout"]["versions"], "a rollout that was trained on reached a version"

    assert run(["archive", "--once", *where]) == 0
    sealed = asked("verify", "--no-memory")
    # All is sealed; what is not archived is what `assemble` remembers of closed groups, one record each.
    archived = sealed["checked"]["records of the archive"]
    assert sealed["checked"]["records of the log"] == archived + len(groups)

    assert retention_takes_all(stack, prefix, log) > 8
    assert audits() == before
    again = asked("verify", "--no-memory")
    assert again["digests"] == sealed["digests"]
    assert again["checked"]["segments verified"] == sealed["checked"]["segments verified"] > 0
    assert again["checked"]["records of the archive"] == archived
    assert again["checked"]["records of the log"] == len(groups)
    # A bucket that is not there is no archive that has nothing.
    with pytest.raises(SystemExit) as ended:
        run(["audit", "lineage", "--version", "1", "--bucket", "no-such-bucket", *where])
    assert ended.value.code == 2
