"""The compiled reader gives what fastavro gives, and refuses at least what fastavro refuses."""

from __future__ import annotations

import io
import json
import struct
from typing import Any, Final

import msgspec
import pytest
from fastavro import schemaless_reader, schemaless_writer
from hypothesis import given, settings
from hypothesis import strategies as st

from rollwire.schemas.catalogue import TOPICS
from rollwire.schemas.codec import Schema, schema_for
from rollwire.schemas.framing import PREFIX_BYTES
from rollwire.schemas.golden import Example, all_examples
from rollwire.schemas.limits import Malformed
from rollwire.schemas.read import Read, compile_read

SCHEMAS: Final = {name: schema_for(spec.record_class) for name, spec in TOPICS.items()}
EXAMPLES: Final = all_examples()
REFUSALS: Final = (Malformed, LookupError, ValueError, OverflowError, struct.error)
long = st.integers(-(2**63), 2**63 - 1) | st.integers(-200, 200) | st.integers(-(2**21), 2**21)
text = st.text(st.characters(exclude_categories=["Cs"]), max_size=80)
LEAVES: Final[dict[str, st.SearchStrategy[Any]]] = {
    "null": st.none(),
    "long": long,
    "double": st.floats(),
    "string": text,
    "bytes": st.binary(max_size=80),
}


def values(schema: Any, named: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Anything that a schema can say, sense or not."""
    if isinstance(schema, list):
        return st.one_of([values(branch, named) for branch in schema])
    if isinstance(schema, str):
        return LEAVES[schema] if schema in LEAVES else values(named[schema], named)
    kind = schema["type"]
    if kind in ("record", "enum"):
        named[schema["name"]] = schema
    if kind == "record":
        return st.fixed_dictionaries({f["name"]: values(f["type"], named) for f in schema["fields"]})
    if kind == "enum":
        return st.sampled_from(schema["symbols"])
    if kind == "array":
        return st.lists(values(schema["items"], named), max_size=3)
    if kind == "map":
        return st.dictionaries(text, values(schema["values"], named), max_size=3)
    return LEAVES[kind]


STRATEGIES: Final = {name: values(json.loads(schema.text), {}) for name, schema in SCHEMAS.items()}


def reader(schema: Schema) -> Read:
    assert schema.read is not None, f"{schema.spec.name} is not read by its own reader"
    return schema.read


def written(schema: Schema, plain: Any) -> bytes:
    out = io.BytesIO()
    schemaless_writer(out, schema.avro, plain)
    return out.getvalue()


def by_fastavro(schema: Schema, body: bytes) -> tuple[Any, int] | None:
    stream = io.BytesIO(body)
    try:
        fields = schemaless_reader(stream, schema.avro, None)
        return msgspec.convert(fields, schema.spec.record_class), stream.tell()
    except (AttributeError, EOFError, LookupError, MemoryError, OverflowError, TypeError, ValueError):
        return None


def by_us(schema: Schema, body: bytes) -> tuple[Any, int] | None:
    try:
        return reader(schema)(body, 0)
    except REFUSALS:
        return None


def same(one: tuple[Any, int] | None, other: tuple[Any, int] | None) -> bool:
    """Bit by bit, NaNs too."""
    if one is None or other is None:
        return one is other
    return one[1] == other[1] and msgspec.msgpack.encode(one[0]) == msgspec.msgpack.encode(other[0])


@given(data=st.data(), name=st.sampled_from(sorted(SCHEMAS)), before=st.binary(max_size=12))
@settings(max_examples=400)
def test_any_body_is_read_as_fastavro_reads_it(data: st.DataObject, name: str, before: bytes) -> None:
    schema = SCHEMAS[name]
    body = written(schema, data.draw(STRATEGIES[name]))
    wanted = by_fastavro(schema, body)
    assert wanted is not None
    event, end = reader(schema)(before + body + b"behind", len(before))
    assert same((event, end - len(before)), wanted)
    assert end == len(before) + len(body)
    assert type(event) is schema.spec.record_class
    assert schema.typed(event)


@pytest.mark.parametrize("example", EXAMPLES, ids=[f"{e.topic}-{e.name}" for e in EXAMPLES])
def test_every_truncation_is_refused_and_every_flipped_bit_read_alike(example: Example) -> None:
    schema, body = SCHEMAS[example.topic], example.value[PREFIX_BYTES:]
    for at in range(len(body)):
        assert by_us(schema, body[:at]) is None
        for bit in range(8):
            agree(schema, body[:at] + bytes([body[at] ^ 1 << bit]) + body[at + 1 :])


def agree(schema: Schema, body: bytes) -> None:
    """What we read is what fastavro reads; what we refuse and it reads, it writes in other bytes."""
    ours, theirs = by_us(schema, body), by_fastavro(schema, body)
    if ours is not None:
        assert same(ours, theirs)
    elif theirs is not None:
        again = written(schema, msgspec.to_builtins(theirs[0], builtin_types=(bytes,)))
        assert again != body[: theirs[1]], "a body as a writer writes it was refused"


@given(data=st.data(), name=st.sampled_from(sorted(SCHEMAS)))
@settings(max_examples=400)
def test_any_damage_is_refused_or_read_alike(data: st.DataObject, name: str) -> None:
    schema = SCHEMAS[name]
    body = written(schema, data.draw(STRATEGIES[name]))
    for _ in range(8):
        start = data.draw(st.integers(0, len(body)))
        end = data.draw(st.integers(start, min(len(body), start + 12)))
        odd = st.sampled_from(
            [b"\x00", b"\x01", b"\x80\x00", b"\x81\x00", b"\xff" * 9 + b"\x01", b"\xff" * 9 + b"\x03"]
        )
        agree(schema, body[:start] + data.draw(st.binary(max_size=12) | odd) + body[end:])


@given(name=st.sampled_from(sorted(SCHEMAS)), body=st.binary(max_size=200))
def test_random_bytes_are_refused_or_read_alike(name: str, body: bytes) -> None:
    agree(SCHEMAS[name], body)


class Inner(msgspec.Struct, frozen=True, kw_only=True):
    n: int


class Row(msgspec.Struct, frozen=True, kw_only=True):
    items: tuple[int, ...]
    inner: Inner | None
    table: dict[str, float]


INNER: Final = {"type": "record", "name": "Inner", "fields": [{"name": "n", "type": "long"}]}
FIELDS: Final[list[Any]] = [
    {"name": "items", "type": {"type": "array", "items": "long"}},
    {"name": "inner", "type": ["null", INNER]},
    {"name": "table", "type": {"type": "map", "values": "double"}},
]
ROW: Final = {"type": "record", "name": "Row", "fields": FIELDS}


def row(body: bytes) -> Any:
    read = compile_read(ROW, Row)
    assert read is not None
    event, end = read(body, 0)
    assert end == len(body)
    return event


def test_blocks_of_every_form_are_read() -> None:
    rest = b"\x00\x00"
    assert row(b"\x04\x02\x04\x02\x06\x00" + rest).items == (1, 2, 3)
    assert row(b"\x03\x04\x02\x04\x02\x06\x00" + rest).items == (
        1,
        2,
        3,
    )  # a negative count, then the block's bytes
    assert row(b"\x02\x02\x80\x00" + rest).items == (1,)  # the zero of the end in two bytes
    assert row(b"\x00\x02\x0a\x00").inner == Inner(n=5)
    assert row(b"\x00\x82\x00\x0a\x00").inner == Inner(n=5)
    table = b"\x02\x02a" + struct.pack("<d", 1.5) + b"\x01\x14\x02b" + struct.pack("<d", -0.5) + b"\x00"
    assert row(b"\x00\x00" + table).table == {"a": 1.5, "b": -0.5}


@pytest.mark.parametrize(
    ("number", "body"),
    [
        (2**63 - 1, b"\xfe" + b"\xff" * 8 + b"\x01"),
        (-(2**63), b"\xff" * 9 + b"\x01"),
        (0, b"\x80" * 9 + b"\x00"),
        (2**62 - 1, b"\xfe" + b"\xff" * 7 + b"\x7f"),
        (2**55 - 1, b"\xfe" + b"\xff" * 6 + b"\x7f"),
        (2**48 - 1, b"\xfe" + b"\xff" * 5 + b"\x7f"),
        (-65, b"\x81\x01"),
    ],
)
def test_numbers_of_every_length_are_read(number: int, body: bytes) -> None:
    assert row(b"\x02" + body + b"\x00\x00\x00").items == (number,)


@given(st.lists(long, max_size=20))
def test_all_numbers_are_read(numbers: list[int]) -> None:
    out = io.BytesIO()
    schemaless_writer(out, ROW, {"items": numbers, "inner": None, "table": {}})
    assert row(out.getvalue()).items == tuple(numbers)


@pytest.mark.parametrize(
    "body",
    [
        b"\x02" + b"\xff" * 9 + b"\x02\x00\x00\x00",  # 65 bits
        b"\x02" + b"\xff" * 10 + b"\x01\x00\x00\x00",  # 11 bytes
        b"\x02" + b"\x80" * 10 + b"\x00\x00\x00\x00",
        b"\x02" + b"\xff" * 7,  # ends inside a number, where the next byte would be the last of 8
        b"\xfe" + b"\xff" * 8 + b"\x01\x02",  # 2**63 - 1 items
        b"\xff" * 9 + b"\x01\x02\x02",  # -2**63 items
        b"\x00\x01\x02\x00",  # branch -1
        b"\x00\x04\x02\x00",  # branch 2
        b"\x00\x00\x02\x01a" + bytes(9),  # a key of -1 bytes
        b"\x00\x00\x02\x02a" + bytes(7),  # the double ends early
        b"\x00\x00\x02\x02\xff" + bytes(9),  # a key that is not UTF-8
        b"\x00\x00\x02\xfe" + b"\xff" * 8 + b"\x01a",  # a key of 2**63 - 1 bytes
        b"\x00\x00",
        b"",
    ],
)
def test_what_is_no_body_is_refused(body: bytes) -> None:
    with pytest.raises(REFUSALS):
        row(body)


@pytest.mark.parametrize(
    "fields",
    [
        FIELDS[:2],
        [*FIELDS, {"name": "more", "type": "long"}],
        [FIELDS[1], FIELDS[0], FIELDS[2]],
        [{"name": "items", "type": {"type": "array", "items": "string"}}, *FIELDS[1:]],
        [{"name": "items", "type": {"type": "array", "items": "null"}}, *FIELDS[1:]],
        [FIELDS[0], {"name": "inner", "type": ["null", INNER, "long"]}, FIELDS[2]],
        [FIELDS[0], {"name": "inner", "type": ["null", "Row"]}, FIELDS[2]],
        [FIELDS[0], {"name": "inner", "type": INNER}, FIELDS[2]],
    ],
    ids=["missing", "more", "order", "type", "empty items", "branches", "recursive", "no union"],
)
def test_a_schema_that_is_not_the_class_is_left_to_fastavro(fields: list[Any]) -> None:
    assert compile_read({"type": "record", "name": "Row", "fields": fields}, Row) is None
