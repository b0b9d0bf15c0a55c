"""Topics on a real broker, and events read back through the command line."""

from __future__ import annotations

import json
import uuid
from typing import Any

import msgspec
import pytest
from confluent_kafka import Producer

from rollwire.ops.cli import run
from rollwire.ops.stack import StackInfo
from rollwire.ops.topics import apply_topics, list_topics
from rollwire.schemas.catalogue import TOPICS
from rollwire.schemas.errors import TopicMismatch
from rollwire.schemas.golden import all_examples, load_examples
from rollwire.schemas.partitioner import partition_for
from rollwire.streams.emit import decode_record
from rollwire.streams.seams.log import Outgoing
from rollwire.streams.seams.log_kafka import KafkaLog
from rollwire.streams.seams.scan import scan

pytestmark = pytest.mark.system


def test_topics_are_made_once_and_checked_afterwards(stack: StackInfo) -> None:
    prefix = f"t{uuid.uuid4().hex[:12]}."
    made = apply_topics(stack.bootstrap, prefix)
    assert sorted(made.created) == sorted(prefix + name for name in TOPICS)
    assert made.unchanged == ()
    again = apply_topics(stack.bootstrap, prefix)
    assert again.created == ()
    assert sorted(again.unchanged) == sorted(made.created)
    states = {state.name: state for state in list_topics(stack.bootstrap, prefix)}
    assert {n.removeprefix(prefix): s.partitions for n, s in states.items()} == {
        name: spec.partitions for name, spec in TOPICS.items()
    }


def test_another_partition_count_is_a_mismatch_and_nothing_is_made(stack: StackInfo) -> None:
    prefix = f"t{uuid.uuid4().hex[:12]}."
    other = msgspec.structs.replace(TOPICS["rollouts"], partitions=6, retention_ms=60_000)
    apply_topics(stack.bootstrap, prefix, topics={"rollouts": other})
    with pytest.raises(TopicMismatch, match="6 partitions, 4 are declared") as caught:
        apply_topics(stack.bootstrap, prefix)
    assert "retention.ms=60000" in str(caught.value)
    assert [state.name for state in list_topics(stack.bootstrap, prefix)] == [f"{prefix}rollouts"]


def test_one_broker_cannot_be_production(stack: StackInfo) -> None:
    with pytest.raises(TopicMismatch, match="needs that many brokers"):
        apply_topics(stack.bootstrap, f"t{uuid.uuid4().hex[:12]}.", "production")


def test_every_example_goes_through_the_broker_and_is_read_by_cat(
    stack: StackInfo, prefix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    log = KafkaLog(stack.bootstrap, prefix)
    examples = all_examples()
    log.writer().write([Outgoing(e.topic, e.key, e.value, e.headers) for e in examples])
    log.close()
    capsys.readouterr()
    at = ["--bootstrap", stack.bootstrap, "--prefix", prefix]
    for topic in TOPICS:
        assert run(["cat", topic, *at]) == 0
        lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        ids = sorted(line["headers"]["ce_id"] for line in lines)
        assert ids == sorted((dict(e.headers)["ce_id"] or b"").decode() for e in load_examples(topic))
        assert all("event" in line for line in lines)
    assert run(["cat", "rewards", *at, "--where", "outcome=right", "--from", "-5", "--max", "1"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["event"]["reward"] == 1.0


def test_the_topics_command(stack: StackInfo, capsys: pytest.CaptureFixture[str]) -> None:
    at = ["--bootstrap", stack.bootstrap, "--prefix", f"t{uuid.uuid4().hex[:12]}."]
    assert run(["topics", "list", *at]) == 1
    assert "missing" in capsys.readouterr().out
    assert run(["topics", "apply", *at]) == 0
    assert "created" in capsys.readouterr().out
    assert run(["topics", "list", *at]) == 0
    assert "as declared" in capsys.readouterr().out
    assert run(["topics", "describe", "rollouts", *at]) == 0
    assert "group_id" in capsys.readouterr().out
    assert run(["topics", "describe", "rolouts", *at]) == 2
    assert "did you mean 'rollouts'" in capsys.readouterr().err


def test_c45_records_carry_the_brokers_time(stack: StackInfo, prefix: str) -> None:
    """A producer's clock in another unit cannot keep data for ever or delete it at once (C45)."""
    example = load_examples("rewards")[0]
    in_seconds = 1_700_000_000  # as a time in milliseconds: January 1970
    config: dict[str, Any] = {"bootstrap.servers": stack.bootstrap, "partitioner": "murmur2_random"}
    producer = Producer(config)
    producer.produce(
        f"{prefix}rewards", example.value, example.key, timestamp=in_seconds, headers=list(example.headers)
    )
    assert producer.flush(20.0) == 0
    log = KafkaLog(stack.bootstrap, prefix)
    try:
        (record,) = scan(log, ["rewards"])
    finally:
        log.close()
    assert record.timestamp_ms > 1_767_225_600_000
    assert decode_record(record) == example.event
    assert record.partition == partition_for(example.key, TOPICS["rewards"].partitions)
