"""A real Apicurio registry: our events for others, others' events for us, and its verdict on changes.

Needs a Java 21+ (looked for in JAVA_HOME, PATH, the system's JVM folder and the Python environment) and Maven's repository.
"""

from __future__ import annotations

import copy
import json
import os
import uuid
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from confluent_kafka.schema_registry import Schema, SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroDeserializer, AvroSerializer
from confluent_kafka.serialization import MessageField, SerializationContext

from rollwire.ops.cli import run
from rollwire.ops.registry import set_registry
from rollwire.ops.stack import StackInfo
from rollwire.ops.stack.apicurio import running_registry
from rollwire.ops.stack.config import default_cache
from rollwire.schemas.catalogue import TOPICS
from rollwire.schemas.codec import decode, encode, schema_for, use_registry
from rollwire.schemas.compat import read_break, schema_files
from rollwire.schemas.errors import EnvironmentMissing, Refused
from rollwire.schemas.framing import confluent_id
from rollwire.schemas.golden import Example, all_examples, load_examples
from rollwire.streams.emit import decode_record, outgoing
from rollwire.streams.seams.log import Outgoing
from rollwire.streams.seams.log_kafka import KafkaLog
from rollwire.streams.seams.registry_confluent import ConfluentRegistry
from rollwire.streams.seams.scan import scan

pytestmark = [pytest.mark.system, pytest.mark.timeout(1_200)]

US = 1_767_225_600_000_000


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    try:
        with running_registry(default_cache(), tmp_path_factory.mktemp("registry")) as address:
            yield address
    except EnvironmentMissing as error:
        if os.environ.get("CI"):
            pytest.fail(f"NO SCHEMA REGISTRY WAS TRIED: {error}")
        pytest.skip(f"NO SCHEMA REGISTRY WAS TRIED: {error}")


@pytest.fixture
def own_prefix() -> str:
    return f"t{uuid.uuid4().hex[:12]}."


@pytest.fixture
def registry(url: str, own_prefix: str) -> Iterator[ConfluentRegistry]:
    """The registry of this process for the time of a test."""
    made = ConfluentRegistry(url, own_prefix)
    use_registry(made)
    yield made
    set_registry(None, "")


@pytest.fixture
def client(url: str) -> Iterator[SchemaRegistryClient]:
    # Without a time-out of its own it waits for ever for an answer that a busy registry never sends.
    with SchemaRegistryClient({"url": url, "timeout": 5, "max.retries": 5}) as made:
        yield made


EXAMPLES = all_examples()


@pytest.mark.parametrize("example", EXAMPLES, ids=[f"{e.topic}/{e.name}" for e in EXAMPLES])
def test_confluents_deserializer_reads_what_we_write(
    example: Example, registry: ConfluentRegistry, client: SchemaRegistryClient, own_prefix: str
) -> None:
    written = encode(example.event, source="test", time_us=US)
    read = AvroDeserializer(client)(  # pyright: ignore[reportCallIssue]  (its __new__ hides the arguments)
        written.value, SerializationContext(own_prefix + example.topic, MessageField.VALUE)
    )
    assert msgspec.convert(read, type(example.event)) == example.event
    assert decode(written.topic, written.value, written.headers, written.key) == example.event
    assert f"{own_prefix}{example.topic}-value" in client.get_subjects()


def test_we_read_what_confluents_serializer_writes(
    registry: ConfluentRegistry, client: SchemaRegistryClient, own_prefix: str
) -> None:
    example = load_examples("rewards")[0]
    text = schema_for(type(example.event)).text
    serializer = AvroSerializer(client, text)  # pyright: ignore[reportCallIssue]
    value = serializer(
        msgspec.to_builtins(example.event, builtin_types=(bytes,)),
        SerializationContext(f"{own_prefix}rewards", MessageField.VALUE),
    )
    assert value is not None
    assert confluent_id(value) is not None
    assert decode("rewards", value, example.headers, example.key) == example.event


def test_a_schema_of_others_and_an_unknown_id_are_refused(
    registry: ConfluentRegistry, client: SchemaRegistryClient, own_prefix: str
) -> None:
    recursive = {"type": "record", "name": "N", "fields": [{"name": "n", "type": ["null", "N"]}]}  # C56
    schema_id = client.register_schema(f"{own_prefix}foreign-value", Schema(json.dumps(recursive), "AVRO"))
    for wrong in (schema_id, 2**31 - 1):
        with pytest.raises(Refused) as caught:
            decode("rewards", b"\x00" + wrong.to_bytes(4, "big") + b"\x02" * 5_000 + b"\x00", ())
        assert caught.value.reason == "unknown_schema"


def test_both_framings_lie_in_one_topic_and_are_read(
    stack: StackInfo, prefix: str, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    example = next(one for one in load_examples("rewards") if one.name == "right")
    log = KafkaLog(stack.bootstrap, prefix)
    set_registry(url, prefix)
    try:
        framed = outgoing(example.event, source="test", time_us=US)
        plain = Outgoing("rewards", example.key, example.value, example.headers)
        log.writer().write([framed, plain, framed])
        records = list(scan(log, ["rewards"]))
        assert [(r.value or b"")[:1] for r in records] == [b"\x00", b"\xc3", b"\x00"]
        assert [decode_record(record) for record in records] == [example.event] * 3
        capsys.readouterr()
        at = ["--bootstrap", stack.bootstrap, "--prefix", prefix, "--schema-registry", url]
        assert run(["cat", "rewards", *at]) == 0
        shown = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [line["event"]["reward"] for line in shown] == [1.0] * 3
    finally:
        set_registry(None, "")
        log.close()


def test_the_registry_agrees_about_what_breaks(
    registry: ConfluentRegistry, client: SchemaRegistryClient, own_prefix: str
) -> None:
    notices = schema_files(TOPICS["notices"])[1]
    subject = f"{own_prefix}notices-value"
    encode(load_examples("notices")[0].event, source="test", time_us=US)
    client.set_compatibility(subject, "FULL_TRANSITIVE")
    for field, fine in (
        ({"name": "room", "type": "string", "default": ""}, True),
        ({"name": "room", "type": "string"}, False),
    ):
        changed: dict[str, Any] = copy.deepcopy(notices)
        changed["fields"].append(field)
        assert (read_break(changed, notices) is None) is fine
        assert client.test_compatibility(subject, Schema(json.dumps(changed), "AVRO")) is fine
