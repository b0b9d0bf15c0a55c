"""Records and Avro schemas say the same, in both directions, and every field is documented."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from rollwire.schemas import records
from rollwire.schemas.catalogue import TOPICS, TopicSpec, avro_folder
from rollwire.schemas.compat import schema_files
from rollwire.schemas.golden import EXAMPLES
from rollwire.schemas.limits import compile_scan

SPECS = list(TOPICS.values())
IDS = list(TOPICS)
PLAIN = {
    msgspec.inspect.IntType: "long",
    msgspec.inspect.FloatType: "double",
    msgspec.inspect.StrType: "string",
    msgspec.inspect.BytesType: "bytes",
}


def shape_of_record(kind: msgspec.inspect.Type) -> Any:
    """A record's type as a comparable shape."""
    if type(kind) in PLAIN:
        return PLAIN[type(kind)]
    if isinstance(kind, msgspec.inspect.NoneType):
        return "null"
    if isinstance(kind, msgspec.inspect.LiteralType):
        return ("enum", frozenset(kind.values))
    if isinstance(kind, msgspec.inspect.UnionType):
        return ("union", frozenset(map(shape_of_record, kind.types)))
    if isinstance(kind, msgspec.inspect.VarTupleType):
        return ("array", shape_of_record(kind.item_type))
    if isinstance(kind, msgspec.inspect.DictType):
        assert isinstance(kind.key_type, msgspec.inspect.StrType)
        return ("map", shape_of_record(kind.value_type))
    assert isinstance(kind, msgspec.inspect.StructType), kind
    return ("record", kind.cls.__name__, tuple((f.name, shape_of_record(f.type)) for f in kind.fields))


def shape_of_schema(schema: Any, named: dict[str, Any]) -> Any:
    if isinstance(schema, list):
        return ("union", frozenset(shape_of_schema(branch, named) for branch in schema))
    if isinstance(schema, str):
        return named.get(schema, schema)
    if schema["type"] == "enum":
        named[schema["name"]] = ("enum", frozenset(schema["symbols"]))
        return named[schema["name"]]
    if schema["type"] == "array":
        return ("array", shape_of_schema(schema["items"], named))
    if schema["type"] == "map":
        return ("map", shape_of_schema(schema["values"], named))
    assert schema["type"] == "record", schema
    fields = tuple((f["name"], shape_of_schema(f["type"], named)) for f in schema["fields"])
    named[schema["name"]] = ("record", schema["name"], fields)
    return named[schema["name"]]


def definitions(schema: Any) -> Iterator[dict[str, Any]]:
    """All records and enums defined inside a schema."""
    if isinstance(schema, list):
        for branch in schema:
            yield from definitions(branch)
    elif isinstance(schema, dict):
        if schema["type"] in ("record", "enum"):
            yield schema
        for field in schema.get("fields", ()):
            yield from definitions(field["type"])
        yield from definitions(schema.get("items"))
        yield from definitions(schema.get("values"))


@pytest.mark.parametrize("spec", SPECS, ids=IDS)
def test_the_current_schema_has_the_records_fields_in_order(spec: TopicSpec) -> None:
    schema = schema_files(spec)[spec.current.version]
    assert shape_of_schema(schema, {}) == shape_of_record(msgspec.inspect.type_info(spec.record_class))


def test_every_event_class_has_a_topic_or_is_part_of_one() -> None:
    named = {d["name"] for spec in SPECS for s in schema_files(spec).values() for d in definitions(s)}
    classes = {
        name
        for name, value in vars(records).items()
        if isinstance(value, type) and issubclass(value, records.Event) and value is not records.Event
    }
    assert classes <= named


@pytest.mark.parametrize("spec", SPECS, ids=IDS)
def test_every_record_and_field_is_documented(spec: TopicSpec) -> None:
    for schema in schema_files(spec).values():
        for definition in definitions(schema):
            if definition["type"] == "record":
                assert definition["doc"].strip(), definition["name"]
                for field in definition["fields"]:
                    assert field["doc"].strip(), (definition["name"], field["name"])


@pytest.mark.parametrize("spec", SPECS, ids=IDS)
def test_enums_can_grow(spec: TopicSpec) -> None:
    for schema in schema_files(spec).values():
        for definition in definitions(schema):
            if definition["type"] == "enum":
                assert definition["default"] == "unknown"
                assert "unknown" in definition["symbols"]


def test_a_name_means_the_same_in_every_current_schema() -> None:
    seen: dict[str, dict[str, Any]] = {}
    for spec in SPECS:
        for definition in definitions(schema_files(spec)[spec.current.version]):
            same = {k: v for k, v in definition.items() if k != "namespace"}
            flat = _by_name(same)
            assert _by_name(seen.setdefault(definition["name"], same)) == flat, definition["name"]


def _by_name(schema: Any) -> Any:
    """A definition with the nested ones replaced by their names: where they are defined differs between files."""

    def short(kind: Any) -> Any:
        if isinstance(kind, list):
            return [short(branch) for branch in kind]
        if isinstance(kind, dict):
            if "name" in kind:
                return kind["name"]
            return {k: short(v) if k in ("items", "values") else v for k, v in kind.items()}
        return kind

    if schema["type"] == "enum":
        return schema
    return {**schema, "fields": [{**f, "type": short(f["type"])} for f in schema["fields"]]}


@pytest.mark.parametrize("spec", SPECS, ids=IDS)
def test_no_schema_is_recursive_and_no_item_is_empty(spec: TopicSpec) -> None:
    for schema in schema_files(spec).values():
        compile_scan(schema)  # raises for a recursive or too deep schema

        def at_least_one_byte(kind: Any) -> bool:
            return kind != "null" and not (isinstance(kind, dict) and kind.get("fields") == [])

        for definition in definitions(schema):
            for field in definition.get("fields", ()):
                kind = field["type"]
                if isinstance(kind, dict) and kind["type"] == "array":
                    assert at_least_one_byte(kind["items"]), field["name"]


def test_a_recursive_schema_is_refused_when_it_is_compiled() -> None:
    node = {"type": "record", "name": "N", "fields": [{"name": "n", "type": ["null", "N"]}]}
    with pytest.raises(ValueError, match="recursive"):
        compile_scan(node)


def test_no_schema_file_and_no_example_is_an_orphan() -> None:
    schemas = {s.file for spec in SPECS for s in spec.schemas}
    assert {f.name for f in avro_folder().iterdir() if f.name.endswith(".avsc")} == schemas
    folders = {s.examples for spec in SPECS for s in spec.schemas}
    found = {str(path.parent.relative_to(EXAMPLES)) for path in EXAMPLES.rglob("*") if path.is_file()}
    assert found == folders
