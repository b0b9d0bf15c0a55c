"""The AsyncAPI 3.1 document of all topics, derived from the topic files, the Avro schemas and the golden examples.

Source of the format: AsyncAPI 3.1.0; its Kafka binding 0.5.0. A component's sends and receives are operations, named
`<component>-sends-<topic>` and `<component>-receives-<topic>`; the names of components are those of the topic files.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

from rollwire.schemas.catalogue import TOPICS, Placement, SchemaVersion, TopicSpec, avro_folder
from rollwire.schemas.codec import CONTENT_TYPE, event_type
from rollwire.schemas.golden import Example, load_examples

ASYNCAPI_VERSION: Final = "3.1.0"
BINDING_VERSION: Final = "0.5.0"
DEFAULT_PREFIX: Final = "rollwire."
DEFAULT_BOOTSTRAP: Final = "127.0.0.1:9092"
AVRO_FORMAT: Final = "application/vnd.apache.avro+json;version=1.9.0"
DOCUMENT_VERSION: Final = "1"  # of the set of topics; their schemas carry versions of their own

_ABOUT: Final = """\
The events of Rollwire, the event-sourced data plane for RL post-training of language models.

Values are Avro: the bytes C3 01, the 8-byte little-endian CRC-64-AVRO fingerprint of the schema, the body (single-object \
encoding); or, where a schema registry is set, the byte 00, the 4-byte big-endian id, the body (Confluent's wire format). \
Readers take both. Headers are CloudEvents 1.0 in Kafka's binary mode. Producers hash keys with murmur2. In examples \
bytes stand as base64."""


def asyncapi_document(
    *,
    prefix: str = DEFAULT_PREFIX,
    bootstrap: str = DEFAULT_BOOTSTRAP,
    registry_url: str | None = None,
) -> dict[str, Any]:
    """The document as JSON says it. With a `registry_url` the messages are those that a registry's users see."""
    server: dict[str, Any] = {"bindingVersion": BINDING_VERSION}
    if registry_url is not None:
        server |= {"schemaRegistryUrl": registry_url, "schemaRegistryVendor": "confluent"}
    return {
        "asyncapi": ASYNCAPI_VERSION,
        "info": {
            "title": "Rollwire",
            "version": DOCUMENT_VERSION,
            "description": _ABOUT,
            "license": {"name": "Apache-2.0"},
        },
        "defaultContentType": CONTENT_TYPE.decode(),
        "servers": {
            "kafka": {"host": bootstrap, "protocol": "kafka", "bindings": {"kafka": server}},
        },
        "channels": {spec.name: _channel(spec, prefix) for spec in TOPICS.values()},
        "operations": dict(sorted(pair for spec in TOPICS.values() for pair in _operations(spec))),
        "components": {
            "messages": {
                message_name(spec, version): _message(spec, version, registry_url is not None)
                for spec in TOPICS.values()
                for version in spec.schemas
            }
        },
    }


def document_text(**options: Any) -> str:
    """The document as the file has it."""
    return json.dumps(asyncapi_document(**options), ensure_ascii=False, indent=2) + "\n"


def message_name(spec: TopicSpec, version: SchemaVersion) -> str:
    return f"{spec.name}-v{version.version}"


def _channel(spec: TopicSpec, prefix: str) -> dict[str, Any]:
    return {
        "address": prefix + spec.name,
        "title": spec.name,
        "description": f"{spec.description} Owner: {spec.owner}.",
        "messages": {
            message_name(spec, version): {"$ref": f"#/components/messages/{message_name(spec, version)}"}
            for version in spec.schemas
        },
        "bindings": {
            "kafka": {
                "topic": prefix + spec.name,
                "partitions": spec.partitions,
                "replicas": spec.production.replication_factor,
                "topicConfiguration": {
                    "cleanup.policy": spec.cleanup_policy.split(","),
                    "retention.ms": spec.retention_ms,
                    "max.message.bytes": spec.max_message_bytes,
                    **_durability(spec.production),
                },
                "bindingVersion": BINDING_VERSION,
            }
        },
    }


def _durability(place: Placement) -> dict[str, Any]:
    return {
        "min.insync.replicas": place.min_insync_replicas,
        "unclean.leader.election.enable": place.unclean_leader_election,
    }


def _operations(spec: TopicSpec) -> Iterator[tuple[str, dict[str, Any]]]:
    for action, verb, components in (
        ("send", "sends", spec.producers),
        ("receive", "receives", spec.consumers),
    ):
        for component in components:
            yield (
                f"{component.replace('/', '-')}-{verb}-{spec.name}",
                {
                    "action": action,
                    "title": f"{component} {verb} {spec.name}",
                    "channel": {"$ref": f"#/channels/{spec.name}"},
                    "tags": [{"name": component}],
                },
            )


def _message(spec: TopicSpec, version: SchemaVersion, in_registry: bool) -> dict[str, Any]:
    avro = json.loads((avro_folder() / version.file).read_text("utf-8"))
    kafka: dict[str, Any] = {
        "key": {"type": "string", "description": f"UTF-8: {spec.key} of the event"},
        "bindingVersion": BINDING_VERSION,
    }
    if in_registry:
        kafka |= {
            "schemaIdLocation": "payload",
            "schemaIdPayloadEncoding": "confluent",
            "schemaLookupStrategy": "TopicNameStrategy",
        }
    return {
        "name": event_type(spec.name, version.version),
        "title": f"{spec.record} v{version.version}",
        "summary": avro["doc"],
        "contentType": CONTENT_TYPE.decode(),
        "headers": _headers(event_type(spec.name, version.version)),
        "payload": {"schemaFormat": AVRO_FORMAT, "schema": avro},
        "bindings": {"kafka": kafka},
        "examples": [_example(one) for one in load_examples(spec.name) if one.version == version.version],
    }


def _headers(kind: str) -> dict[str, Any]:
    """CloudEvents' attributes as Kafka headers; each is UTF-8 text."""

    def text(description: str, **more: Any) -> dict[str, Any]:
        return {"type": "string", "description": description, **more}

    return {
        "type": "object",
        "required": ["ce_specversion", "ce_type", "ce_source", "ce_id", "ce_time", "content-type"],
        "properties": {
            "ce_specversion": text("version of CloudEvents", const="1.0"),
            "ce_type": text("topic and version of the schema", const=kind),
            "ce_source": text("who wrote it", minLength=1),
            "ce_id": text("natural key of the event: the same fact written twice has the same id"),
            "ce_time": text("when it was written, RFC 3339", format="date-time"),
            "content-type": text("of the value", const=CONTENT_TYPE.decode()),
        },
    }


def _example(example: Example) -> dict[str, Any]:
    headers = {name: (value or b"").decode() for name, value in example.headers}
    return {"name": example.name, "headers": headers, "payload": example.plain}
