"""Writes docs/topics.md and docs/asyncapi.json from the topic catalogue, the schemas, the golden examples and the reason codes.

`python -P -m rollwire.ops.docs_topics` writes them; a test compares them with what they would be.
"""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from rollwire.ops.asyncapi.document import document_text
from rollwire.ops.readable import readable_event
from rollwire.schemas import reasons
from rollwire.schemas.advice import ADVICE
from rollwire.schemas.catalogue import CLAIM_CHECK_BYTES, TOPICS, Placement, TopicSpec, avro_folder
from rollwire.schemas.codec import event_type, fingerprint_of
from rollwire.schemas.golden import load_examples

TARGET: Final = Path(__file__).resolve().parent.parent / "docs" / "topics.md"
ASYNCAPI_TARGET: Final = TARGET.with_name("asyncapi.json")

_HEAD: Final = f"""# Topics and events

This page is generated from `schemas/` by `python -P -m rollwire.ops.docs_topics`.

Names are shown without the prefix (`rollwire.` by default). Values are Avro in single-object encoding: the bytes `C3 01`,
the 8-byte little-endian CRC-64-AVRO fingerprint of the schema, the body. Headers are CloudEvents 1.0 in Kafka's binary mode:
`ce_specversion`, `ce_type`, `ce_source`, `ce_id`, `ce_time`, `content-type` (`application/avro`). `ce_id` is the event's
natural key, so writing the same fact twice gives the same id. Arrays are little-endian bytes; the field says their dtype and shape.

Every producer hashes keys with murmur2 (librdkafka: `partitioner=murmur2_random`). Record times are the broker's; the times
in events are microseconds since the epoch. A payload above {CLAIM_CHECK_BYTES // 1024} KiB goes to the object store and the event
carries a claim: key, size, SHA-256.

`rollwire topics apply` makes the topics, `rollwire cat TOPIC` prints their events. The same as an AsyncAPI 3.1 document, with
the Avro schemas in it: [asyncapi.json](asyncapi.json).
"""


def topics_page() -> str:
    """The page as Markdown."""
    parts = [_HEAD, "\n".join(_overview())]
    parts += ["\n".join(_topic(spec)) for spec in TOPICS.values()]
    parts.append("\n".join(_reasons()))
    return "\n".join(part.rstrip() + "\n" for part in parts)


def _overview() -> Iterator[str]:
    yield "| topic | key | partitions | kept | archived | what |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for spec in TOPICS.values():
        link = f"[`{spec.name}`](#{spec.name})"
        yield f"| {link} | {spec.key} | {spec.partitions} | {kept(spec)} | {archived(spec)} | {spec.description} |"


def kept(spec: TopicSpec) -> str:
    """Retention for people: `30 d`, `compacted, 7 d`, `unlimited`."""
    span = "unlimited" if spec.retention_ms == -1 else _span(spec.retention_ms)
    return f"compacted, {span}" if spec.compacted else span


def archived(spec: TopicSpec) -> str:
    """How long the archive keeps it, for people: `for ever`, `30 d`, `not`."""
    return {-1: "for ever", 0: "not"}.get(spec.archive_ms) or _span(spec.archive_ms)


def _span(ms: int) -> str:
    return f"{ms // 86_400_000} d" if ms % 86_400_000 == 0 else f"{ms / 3_600_000:g} h"


def _place(place: Placement) -> str:
    unclean = "unclean election" if place.unclean_leader_election else "no unclean election"
    return (
        f"replication {place.replication_factor}, min.insync.replicas {place.min_insync_replicas}, {unclean}"
    )


def _topic(spec: TopicSpec) -> Iterator[str]:
    yield f"## {spec.name}"
    yield ""
    yield spec.description
    yield ""
    yield f"- owner: {spec.owner}; producers: {', '.join(spec.producers)}; consumers: {', '.join(spec.consumers)}"
    yield f"- key: `{spec.key}`; partitions: {spec.partitions}; kept: {kept(spec)}; archived: {archived(spec)}"
    yield f"- largest record: {spec.max_message_bytes // 2**20} MiB"
    yield f"- production: {_place(spec.production)}; local: {_place(spec.local)}"
    for released in spec.schemas:
        avro = json.loads((avro_folder() / released.file).read_text("utf-8"))
        yield (
            f"- schema {released.version}: `schemas/avro/{released.file}`, fingerprint "
            f"`{fingerprint_of(avro).hex()}`, `ce_type` `{event_type(spec.name, released.version)}`, "
            f"{released.compatibility} compatible"
        )
    yield ""
    current = json.loads((avro_folder() / spec.current.file).read_text("utf-8"))
    yield from _record(current)
    example = load_examples(spec.name)[0]
    yield f"Example `{example.name}`, as `rollwire cat {spec.name}` shows it:"
    yield ""
    yield "```json"
    yield json.dumps(readable_event(example.event), ensure_ascii=False)
    yield "```"


def _record(schema: Any) -> Iterator[str]:
    yield f"**{schema['name']}**: {schema['doc']}"
    yield ""
    yield "| field | type | meaning |"
    yield "| --- | --- | --- |"
    nested: list[Any] = []
    for field in schema["fields"]:
        kind = _kind(field["type"], nested).replace("|", "\\|")
        yield f"| `{field['name']}` | {kind} | {field['doc'].replace('|', chr(92) + '|')} |"
    yield ""
    for inner in nested:
        yield from _record(inner)


def _kind(kind: Any, nested: list[Any]) -> str:
    """A type for people; records defined inside are collected to be shown below."""
    if isinstance(kind, list):
        return " | ".join(_kind(branch, nested) for branch in kind)
    if isinstance(kind, str):
        return kind
    if kind["type"] == "array":
        return f"array of {_kind(kind['items'], nested)}"
    if kind["type"] == "map":
        return f"map of {_kind(kind['values'], nested)}"
    if kind["type"] == "enum":
        return "enum: " + ", ".join(kind["symbols"])
    nested.append(kind)
    return str(kind["name"])


def reason_texts() -> dict[str, str]:
    """Reason code to its meaning: the comment beside it in `schemas/reasons.py`."""
    found: dict[str, str] = {}
    for line in inspect.getsource(reasons).splitlines():
        code, comma, comment = line.strip().partition(",")
        if comma and code.startswith('"') and comment.strip().startswith("#"):
            found[ast.literal_eval(code)] = comment.strip().removeprefix("#").strip()
    return found


def _reasons() -> Iterator[str]:
    yield "## Reason codes"
    yield ""
    yield "Why an event stands in `dead-letters`, or a group was not trained on (`group-fates`)."
    yield ""
    yield "| code | meaning | what to do |"
    yield "| --- | --- | --- |"
    for code, text in reason_texts().items():
        yield f"| `{code}` | {text} | {ADVICE[code]} |"


def main() -> None:
    TARGET.write_text(topics_page(), "utf-8")
    ASYNCAPI_TARGET.write_text(document_text(), "utf-8")


if __name__ == "__main__":
    main()
