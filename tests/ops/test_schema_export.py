"""The exported schemas say what the catalogue says, and describe the golden examples."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from rollwire.ops.asyncapi.document import asyncapi_document, document_text
from rollwire.ops.cli import run
from rollwire.ops.docs_topics import ASYNCAPI_TARGET
from rollwire.ops.schema_export import exported
from rollwire.schemas.catalogue import TOPICS
from rollwire.schemas.compat import schema_files
from rollwire.schemas.golden import load_examples


def test_the_committed_document_is_current() -> None:
    assert ASYNCAPI_TARGET.read_text("utf-8") == document_text(), (
        "run `python -P -m rollwire.ops.docs_topics`"
    )


def test_every_topic_is_a_channel_with_its_settings_and_every_component_an_operation() -> None:
    document = asyncapi_document(prefix="p.")
    assert list(document["channels"]) == list(TOPICS)
    for name, spec in TOPICS.items():
        channel = document["channels"][name]
        kafka = channel["bindings"]["kafka"]
        assert (channel["address"], kafka["topic"], kafka["partitions"]) == (
            f"p.{name}",
            f"p.{name}",
            spec.partitions,
        )
        assert kafka["topicConfiguration"]["retention.ms"] == spec.retention_ms
        assert kafka["topicConfiguration"]["cleanup.policy"] == spec.cleanup_policy.split(",")
        for released in spec.schemas:
            message = document["components"]["messages"][f"{name}-v{released.version}"]
            assert message["payload"]["schema"] == schema_files(spec)[released.version]
            assert message["examples"], f"{name} v{released.version} has no example"
    operations = {
        (one["action"], one["tags"][0]["name"], one["channel"]["$ref"].rpartition("/")[2])
        for one in document["operations"].values()
    }
    assert operations == {
        *(("send", who, spec.name) for spec in TOPICS.values() for who in spec.producers),
        *(("receive", who, spec.name) for spec in TOPICS.values() for who in spec.consumers),
    }


def test_a_registry_is_named_where_there_is_one() -> None:
    document = asyncapi_document(registry_url="http://registry:8081")
    assert document["servers"]["kafka"]["bindings"]["kafka"]["schemaRegistryUrl"] == "http://registry:8081"
    bindings = [one["bindings"]["kafka"] for one in document["components"]["messages"].values()]
    assert {one["schemaIdPayloadEncoding"] for one in bindings} == {"confluent"}
    assert "schemaRegistryUrl" not in document_text()


def test_avro_files_are_the_released_schemas() -> None:
    files = exported("avro", prefix="", bootstrap="", registry_url=None)
    assert {json.loads(text)["name"] for text in files.values()} == {spec.record for spec in TOPICS.values()}


@pytest.mark.parametrize("topic", list(TOPICS))
def test_json_schemas_know_every_field_of_the_examples(topic: str) -> None:
    files = exported("json", prefix="", bootstrap="", registry_url=None)
    spec = TOPICS[topic]
    schema = json.loads(files[f"{topic}.v{spec.current.version}.schema.json"])
    record = schema["$defs"][spec.record]
    assert record["additionalProperties"] is False
    for example in load_examples(topic):
        if example.version == spec.current.version:
            assert set(example.plain) <= set(record["properties"])
            assert set(record.get("required", ())) <= set(msgspec.to_builtins(example.event))


def test_the_command_writes_the_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for kind, count in (("asyncapi", 1), ("avro", len(TOPICS)), ("json", len(TOPICS))):
        assert run(["schemas", "export", "--format", kind, "--out", str(tmp_path / kind)]) == 0
        assert len(list((tmp_path / kind).iterdir())) >= count
    assert str(tmp_path / "asyncapi" / "asyncapi.json") in capsys.readouterr().out
    assert json.loads((tmp_path / "asyncapi" / "asyncapi.json").read_text())["asyncapi"] == "3.1.0"
