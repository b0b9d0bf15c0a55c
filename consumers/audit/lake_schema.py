"""The Parquet schema of a topic, derived from its current Avro schema, and columns built from decoded events.

Avro            Arrow
long            int64; a name that ends in `_us` (everywhere: microseconds since the Unix epoch, UTC) timestamp[us, UTC];
                logicalType timestamp-micros, timestamp-millis the same in their unit
double, float   double, float
string          string (ids, UUIDs and digests too: that is what they are compared with)
bytes           binary
enum            dictionary<int32, string> with the schema's symbols, in their order
array, map      list, map
record          struct
["null", X]     X, nullable

Each field carries its documentation. What a record has besides its value stands in columns that begin with `_`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence, Sized
from functools import cache, lru_cache
from itertools import accumulate, chain
from operator import itemgetter
from typing import Any, Final, NamedTuple

import pyarrow as pa  # type: ignore[import-untyped]
from msgspec.structs import astuple

from rollwire.schemas.catalogue import TOPICS
from rollwire.schemas.codec import schema_for
from rollwire.schemas.errors import ConfigError
from rollwire.schemas.records import Event
from rollwire.streams.seams.log import Record

WITHHELD: Final[Mapping[str, frozenset[str]]] = {"dead-letters": frozenset({"key", "value", "headers"})}
"""Raw bytes of refused events may be what a person wrote, in plain text. The log keeps them 30 days at most; a lake is kept as
long as its owner likes, so they do not go there. The place of the refused record does."""

_SIMPLE: Final = {
    "long": pa.int64(),
    "int": pa.int32(),
    "double": pa.float64(),
    "float": pa.float32(),
    "string": pa.string(),
    "bytes": pa.binary(),
    "boolean": pa.bool_(),
}
_LOGICAL: Final = {
    "timestamp-micros": pa.timestamp("us", "UTC"),
    "timestamp-millis": pa.timestamp("ms", "UTC"),
}
_NAMES: Final = ["ce_specversion", "ce_type", "ce_source", "ce_id", "ce_time", "content-type"]
_ID: Final = _NAMES.index("ce_id")
_HEADERS: Final = pa.list_(pa.struct([("name", pa.string()), ("value", pa.binary())]))

POSITION: Final = (
    pa.field("_partition", pa.int32(), nullable=False),
    pa.field("_offset", pa.int64(), nullable=False),
    pa.field(
        "_timestamp", pa.timestamp("ms", "UTC"), nullable=False, metadata={"doc": "the broker's timestamp"}
    ),
)
OF_RECORD: Final = (
    *POSITION,
    pa.field("_key", pa.string()),
    pa.field("_event_id", pa.string(), metadata={"doc": "ce_id"}),
    pa.field("_headers", _HEADERS),
)
UNDECODED: Final = pa.schema(
    (
        *POSITION,
        pa.field("reason", pa.string(), nullable=False),
        pa.field("detail", pa.string(), nullable=False),
        pa.field("value_bytes", pa.int64()),
        pa.field("value_blake3", pa.string()),
    )
)
DELETED: Final = pa.schema((*POSITION, pa.field("_key", pa.string())))

Build = Callable[[Sequence[Any]], Any]


class _Column(NamedTuple):
    type: Any  # pyarrow.DataType
    build: Build  # values, some of them None, to an array of that type


class Table(NamedTuple):
    """What makes batches of a topic's events."""

    schema: Any  # pyarrow.Schema
    fields: tuple[tuple[int, Build], ...]  # which of an event's fields, and its column

    def batch(self, records: Sequence[Record], events: Sequence[Event]) -> Any:
        """A `pyarrow.RecordBatch`, one row a record."""
        # All fields at once take half the time of one after the other.
        values = list(zip(*map(astuple, events), strict=True))
        columns = [*_of_records(records), *(build(values[place]) for place, build in self.fields)]
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)


@cache
def table_of(topic: str) -> Table:
    """Raises `ConfigError` for a topic whose schema has what Parquet does not: no released one does."""
    record_class = TOPICS[topic].record_class
    avro = json.loads(schema_for(record_class).text)
    names: dict[str, Any] = {}
    withheld = WITHHELD.get(topic, frozenset())
    schema_fields: list[Any] = list(OF_RECORD)
    fields: list[tuple[int, Build]] = []
    for field in avro["fields"]:
        column, nullable = _column(field["type"], field["name"], names)
        if field["name"] in withheld:
            continue
        metadata = {"doc": field.get("doc", "")}
        schema_fields.append(pa.field(field["name"], column.type, nullable=nullable, metadata=metadata))
        fields.append((record_class.__struct_fields__.index(field["name"]), column.build))
    metadata = {"topic": topic, "avro": f"{avro['namespace']}.{avro['name']}"}
    return Table(pa.schema(schema_fields, metadata=metadata), tuple(fields))


def positions(records: Sequence[Record]) -> list[Any]:
    """The columns of `POSITION`."""
    return [
        pa.array([record.partition for record in records], pa.int32()),
        pa.array([record.offset for record in records], pa.int64()),
        pa.array([record.timestamp_ms for record in records], pa.int64()).view(pa.timestamp("ms", "UTC")),
    ]


def _of_records(records: Sequence[Record]) -> list[Any]:
    keys = pa.array([record.key for record in records], pa.binary()).cast(pa.string())
    headers = [record.headers for record in records]
    flat = list(chain.from_iterable(headers))
    found = list(map(_first, flat))
    values = list(map(_second, flat))
    if found == _NAMES * len(headers):
        # As the codec writes them: nothing has to be looked for.
        ids, names = values[_ID :: len(_NAMES)], _named(len(headers))
    else:
        ids, names = list(map(_id_of, headers)), pa.array(found, pa.string())
    pairs = pa.StructArray.from_arrays(
        [names, pa.array(values, pa.binary())], fields=list(_HEADERS.value_type)
    )
    listed = pa.ListArray.from_arrays(_offsets(headers), pairs, type=_HEADERS)
    return [*positions(records), keys, pa.array(ids, pa.binary()).cast(pa.string()), listed]


@lru_cache(maxsize=8)
def _named(count: int) -> Any:
    return pa.array(_NAMES * count, pa.string())


_first, _second = itemgetter(0), itemgetter(1)


def _id_of(headers: Sequence[tuple[str, bytes | None]]) -> bytes | None:
    for name, value in headers:
        if name == "ce_id":
            return value
    return None


def _offsets(lists: Sequence[Sized]) -> Any:
    return pa.array(list(accumulate(map(len, lists), initial=0)), pa.int32())


def _column(avro: Any, name: str, names: dict[str, Any]) -> tuple[_Column, bool]:
    """Of a field, and whether it may be null."""
    if isinstance(avro, list):
        others = [branch for branch in avro if branch != "null"]
        if len(others) != 1:
            raise ConfigError(f"field {name!r}: a union of several types has no column")
        return _branch(others[0], name, names), len(others) < len(avro)
    return _branch(avro, name, names), False


def _branch(avro: Any, name: str, names: dict[str, Any]) -> _Column:
    """Of a type that is no union. `names`: the named types seen so far; one that is seen is added."""
    known: dict[str, Any] = names.get(avro, {"type": avro}) if isinstance(avro, str) else avro
    if "name" in known:
        names[known["name"]] = known
    kind = known["type"]
    if kind in _SIMPLE:
        return _simple(kind, known.get("logicalType"), name)
    match kind:
        case "enum":
            return _enum(tuple(known["symbols"]))
        case "array":
            return _list(_column(known["items"], name, names)[0])
        case "map":
            return _map(_column(known["values"], name, names)[0])
        case "record":
            inner = {one["name"]: _column(one["type"], one["name"], names)[0] for one in known["fields"]}
            return _struct(inner)
    raise ConfigError(f"field {name!r}: Avro type {kind!r} has no column")


def _simple(kind: str, logical: str | None, name: str) -> _Column:
    plain = _SIMPLE[kind]
    time = _LOGICAL.get(logical or "")
    if time is None and kind == "long" and name.endswith("_us"):
        time = _LOGICAL["timestamp-micros"]
    if time is None:
        return _Column(plain, lambda values: pa.array(values, plain))
    return _Column(time, lambda values: pa.array(values, plain).view(time))


def _enum(symbols: tuple[str, ...]) -> _Column:
    # A column of dictionary type says which words there are; of every word its place.
    places = {symbol: place for place, symbol in enumerate(symbols)}
    words = pa.array(symbols, pa.string())

    def build(values: Sequence[Any]) -> Any:
        codes = pa.array(list(map(places.get, values)), pa.int32())
        return pa.DictionaryArray.from_arrays(codes, words)

    return _Column(pa.dictionary(pa.int32(), pa.string()), build)


def _list(item: _Column) -> _Column:
    kind = pa.list_(item.type)

    def build(values: Sequence[Any]) -> Any:
        filled = [() if value is None else value for value in values]
        array = item.build(list(chain.from_iterable(filled)))
        return pa.ListArray.from_arrays(_offsets(filled), array, type=kind, mask=_missing(values))

    return _Column(kind, build)


def _map(content: _Column) -> _Column:
    kind = pa.map_(pa.string(), content.type)

    def build(values: Sequence[Any]) -> Any:
        filled: list[dict[str, Any]] = [{} if value is None else value for value in values]
        keys = pa.array(list(chain.from_iterable(filled)), pa.string())
        items = content.build(list(chain.from_iterable(one.values() for one in filled)))
        return pa.MapArray.from_arrays(_offsets(filled), keys, items, type=kind, mask=_missing(values))

    return _Column(kind, build)


def _struct(inner: Mapping[str, _Column]) -> _Column:
    kind = pa.struct([pa.field(name, column.type) for name, column in inner.items()])
    builds = list(inner.items())

    def build(values: Sequence[Any]) -> Any:
        mask = _missing(values)
        present = values if mask is None else [value for value in values if value is not None]
        if not present:
            return pa.nulls(len(values), kind)
        columns = dict(
            zip(present[0].__struct_fields__, zip(*map(astuple, present), strict=True), strict=True)
        )
        if mask is not None:
            columns = {name: _spread(column, values) for name, column in columns.items()}
        arrays = [column.build(columns[name]) for name, column in builds]
        return pa.StructArray.from_arrays(arrays, fields=list(kind), mask=mask)

    return _Column(kind, build)


def _spread(column: Sequence[Any], values: Sequence[Any]) -> list[Any]:
    """A column of those that are there, with None for the others."""
    more = iter(column)
    return [None if value is None else next(more) for value in values]


def _missing(values: Sequence[Any]) -> Any:
    """Which are null; None where none is."""
    return pa.array([value is None for value in values], pa.bool_()) if None in values else None
