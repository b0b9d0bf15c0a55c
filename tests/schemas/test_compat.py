"""Schemas evolve under FULL compatibility; a break is caught; an old event is read by the current schema."""

from __future__ import annotations

import copy
import io
from typing import Any

import fastavro
import msgspec
import pytest

from rollwire.schemas.catalogue import TOPICS, SchemaVersion, TopicSpec
from rollwire.schemas.codec import build_schemas, decode_value, encode_value
from rollwire.schemas.compat import full_breaks, read_break, schema_files
from rollwire.schemas.framing import PREFIX_BYTES
from rollwire.schemas.golden import load_examples
from rollwire.schemas.identity import IDS
from rollwire.schemas.records import Event, Notice

NOTICES = TOPICS["notices"]
V1 = schema_files(NOTICES)[1]


def changed(**field: Any) -> Any:
    schema = copy.deepcopy(V1)
    schema["fields"].append(field)
    return schema


@pytest.mark.parametrize("spec", TOPICS.values(), ids=list(TOPICS))
def test_all_released_versions_read_each_other(spec: TopicSpec) -> None:
    assert full_breaks(spec, schema_files(spec)) == []


def test_a_field_without_a_default_is_a_break_and_names_who_breaks() -> None:
    breaks = full_breaks(NOTICES, {1: V1, 2: changed(name="room", type="string", doc="x")})
    assert len(breaks) == 1
    assert "a reader of v2 cannot read v1" in breaks[0]
    assert "room" in breaks[0]
    assert "producers/fleet" in breaks[0]


def test_a_field_that_vanishes_is_a_break_for_the_old_readers() -> None:
    schema = copy.deepcopy(V1)
    schema["fields"] = [f for f in schema["fields"] if f["name"] != "text"]
    breaks = full_breaks(NOTICES, {1: V1, 2: schema})
    assert len(breaks) == 1
    assert "a reader of v1 cannot read v2" in breaks[0]
    assert "streams/monitor" in breaks[0]


def test_another_type_is_a_break() -> None:
    schema = copy.deepcopy(V1)
    schema["fields"][-1]["type"] = "string"
    assert read_break(schema, V1)
    assert read_break(V1, schema)


def test_a_field_with_a_default_and_a_new_symbol_are_no_breaks() -> None:
    schema = changed(name="room", type="string", default="", doc="x")
    severity = next(f for f in schema["fields"] if f["name"] == "severity")
    severity["type"]["symbols"].append("page")
    assert full_breaks(NOTICES, {1: V1, 2: schema}) == []


class NoticeV2(Notice, frozen=True, kw_only=True, gc=False):
    room: str


def test_an_event_of_an_old_version_is_read_as_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    v2 = changed(name="room", type="string", default="ops", doc="x")
    second = SchemaVersion(version=2, file="notices.v2.avsc", compatibility="FULL", examples="notices/v2")
    spec = msgspec.structs.replace(NOTICES, schemas=(NOTICES.schemas[0], second), record="NoticeV2")
    monkeypatch.setattr("rollwire.schemas.records.NoticeV2", NoticeV2, raising=False)
    new: type[Event] = NoticeV2
    monkeypatch.setitem(IDS, new, lambda e: e.name)
    old, current = build_schemas(spec, {1: V1, 2: v2})
    example = load_examples("notices")[0]
    assert example.value[2:PREFIX_BYTES] == old.fingerprint != current.fingerprint

    event = decode_value(example.value, old)
    assert event == NoticeV2(**{**_plain(example.event), "room": "ops"})

    # And the other way: a reader that stopped at version 1 reads what version 2 wrote.
    written = encode_value(event, current)
    fields = fastavro.schemaless_reader(io.BytesIO(written[PREFIX_BYTES:]), current.avro, old.avro)
    assert msgspec.convert(fields, Notice) == example.event


def _plain(event: Any) -> dict[str, Any]:
    return {name: getattr(event, name) for name in event.__struct_fields__}
