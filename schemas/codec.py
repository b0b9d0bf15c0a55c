"""Events to bytes and back: the only door in and out of the log.

Value: Avro, framed (`framing.py`): single-object encoding, or Confluent's wire format where `use_registry` named a schema
registry; both are read. Headers: CloudEvents 1.0, Kafka binding, binary mode. Whatever passes `decode` is well-formed;
`encode` applies the same checks, so that nothing is written that would be refused.

Source of the headers: CloudEvents Kafka binding 1.0.2.
"""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Any, Final, NamedTuple

import msgspec
from fastavro import parse_schema, schemaless_reader, schemaless_writer
from fastavro.schema import SchemaParseException, fingerprint, to_parsing_canonical_form

from rollwire.schemas import identity
from rollwire.schemas.catalogue import TOPICS, TopicSpec, avro_folder
from rollwire.schemas.errors import Refused
from rollwire.schemas.field_types import Check, compile_check, wrong_field
from rollwire.schemas.framing import CONFLUENT_BYTES, MARKER, PREFIX_BYTES, SchemaRegistry, confluent_id
from rollwire.schemas.limits import SCAN_ABOVE, LimitExceeded, Malformed, compile_scan
from rollwire.schemas.read import Read, compile_read
from rollwire.schemas.records import Event
from rollwire.schemas.validate import check_time, validate

Headers = Iterable[tuple[str, bytes | None]]

CONTENT_TYPE: Final = b"application/avro"

# What fastavro, msgspec and `read.py` raise over bytes or values that do not fit a schema (C59: several, not one).
_BAD_BODY: Final = (
    AttributeError,
    EOFError,
    IndexError,
    KeyError,
    MemoryError,
    OverflowError,
    TypeError,
    ValueError,  # of it: UnicodeError, msgspec.ValidationError
    struct.error,
)


class Encoded(NamedTuple):
    topic: str  # without the prefix
    key: bytes
    value: bytes
    headers: tuple[tuple[str, bytes | None], ...]
    partition: int | None  # None = murmur2 of the key


class Schema(NamedTuple):
    """One released schema of a topic, ready to use."""

    spec: TopicSpec
    most: int  # bytes of a value
    version: int
    fingerprint: bytes  # 8 bytes, as framed
    text: str  # JSON, as a registry gets it
    avro: Any  # parsed by fastavro
    reader: Any  # the topic's current schema where this is an older one, else None
    read: Read | None  # a body straight to its record; None = fastavro reads it, as all older versions
    scan: Callable[[bytes, int], int]
    event_type: bytes  # `ce_type`
    key_of: Callable[[Any], str]
    id_of: Callable[[Any], str]
    typed: Check  # whether every field of an event has its declared type


def fingerprint_of(avro: Any) -> bytes:
    """CRC-64-AVRO of the parsing canonical form, little-endian: what follows the marker."""
    return bytes.fromhex(fingerprint(to_parsing_canonical_form(avro), "CRC-64-AVRO"))


def event_type(topic: str, version: int) -> str:
    """The `ce_type` of a topic's events under one schema version."""
    return f"rollwire.{topic}.v{version}"


def build_schemas(spec: TopicSpec, files: Mapping[int, Any]) -> list[Schema]:
    """All versions of a topic's schema; `files` is version -> the schema as JSON says it. The last one is current."""
    current = parse_schema(files[spec.current.version])
    schemas: list[Schema] = []
    for released in spec.schemas:
        avro = parse_schema(files[released.version])
        schemas.append(
            Schema(
                spec=spec,
                most=spec.max_value_bytes,
                version=released.version,
                fingerprint=fingerprint_of(files[released.version]),
                text=json.dumps(files[released.version]),
                avro=avro,
                reader=None if released is spec.current else current,
                read=compile_read(files[released.version], spec.record_class)
                if released is spec.current
                else None,
                scan=compile_scan(files[released.version]),
                event_type=event_type(spec.name, released.version).encode(),
                key_of=identity.KEYS[spec.key],
                id_of=identity.IDS[spec.record_class],
                typed=compile_check(spec.record_class),
            )
        )
    return schemas


def _load() -> tuple[dict[bytes, Schema], dict[type[Event], Schema]]:
    by_fingerprint: dict[bytes, Schema] = {}
    by_class: dict[type[Event], Schema] = {}
    for spec in TOPICS.values():
        files = {s.version: json.loads((avro_folder() / s.file).read_text("utf-8")) for s in spec.schemas}
        for schema in build_schemas(spec, files):
            by_fingerprint[schema.fingerprint] = schema
            by_class[spec.record_class] = schema  # ascending: the current one stays
    return by_fingerprint, by_class


_BY_FINGERPRINT, _BY_CLASS = _load()
_BY_PREFIX: Final = {MARKER + fingerprint: schema for fingerprint, schema in _BY_FINGERPRINT.items()}
_EPOCH: Final = datetime(1970, 1, 1)  # UTC without saying so: `isoformat` would write +00:00 for Z


class _Ids:
    """A registry's ids, each asked for once."""

    def __init__(self, registry: SchemaRegistry | None) -> None:
        self.registry = registry
        self.known: dict[int, Schema] = {}


_ids = _Ids(None)


def use_registry(registry: SchemaRegistry | None) -> SchemaRegistry | None:
    """From now on this process writes Confluent's wire format and reads it by this registry; None: single-object encoding.

    Set once when a process starts, before it reads or writes; gives what was set before.
    """
    global _ids
    before, _ids = _ids.registry, _Ids(registry)
    return before


def schema_for(event_class: type[Event]) -> Schema:
    """The schema that events of a class are written under. Raises `Refused(wrong_schema)` for a class without a topic."""
    try:
        return _BY_CLASS[event_class]
    except KeyError:
        raise Refused("wrong_schema", f"{event_class.__name__} is no event of a topic") from None


def _plain(event: Event, schema: Schema) -> Any:
    """The event as dicts and lists, its arrays as they are, after proof that every field has its declared type (C58)."""
    if not schema.typed(event):
        field = wrong_field(event)
        raise ValueError(f"{field or 'a field'} is not of its declared type (an int where a float belongs?)")
    return msgspec.to_builtins(event, builtin_types=(bytes,))


def head_of(schema: Schema) -> bytes:
    """What stands before the body of a value; where a registry is set, raises what that raises."""
    registry = _ids.registry
    if registry is None:
        return MARKER + schema.fingerprint
    return registry.head(schema.spec.name, schema.text)


def encode_value(event: Event, schema: Schema) -> bytes:
    """Head and body. Raises `Refused`; where a registry is set, what that raises."""
    head = head_of(schema)
    out = io.BytesIO()
    out.write(head)
    try:
        schemaless_writer(out, schema.avro, _plain(event, schema), strict=True)
    except _BAD_BODY as error:
        raise Refused("malformed", f"{type(event).__name__} does not encode: {error}") from error
    value = out.getvalue()
    if len(value) > schema.spec.max_value_bytes:
        raise Refused(
            "too_large",
            f"{type(event).__name__} is {len(value)} bytes, {schema.spec.name} takes {schema.spec.max_value_bytes}",
        )
    if len(value) - len(head) > SCAN_ABOVE:
        try:
            schema.scan(value, len(head))
        except LimitExceeded as error:
            raise Refused("limit_exceeded", str(error)) from error
    return value


def encode(event: Event, *, source: str, time_us: int) -> Encoded:
    """The record of an event. Topic, key, partition and `ce_id` follow from the event alone.

    `source` says who wrote it (`ce_source`, not empty), `time_us` when (microseconds since the epoch).
    Raises `Refused` for whatever `decode` would refuse, and for a value that is not of its declared type.
    """
    schema = schema_for(type(event))
    value = encode_value(event, schema)
    validate(event)
    return sealed(event, schema, value, source=source, time_us=time_us)


def sealed(event: Event, schema: Schema, value: bytes, *, source: str, time_us: int) -> Encoded:
    """The record of an event whose value was encoded and checked: key, partition and headers. Raises `Refused`."""
    check_time("ce_time", time_us)
    if not source:
        raise Refused("header_mismatch", "ce_source is empty")
    key = schema.key_of(event)
    headers: tuple[tuple[str, bytes | None], ...] = (
        ("ce_specversion", b"1.0"),
        ("ce_type", schema.event_type),
        ("ce_source", source.encode()),
        ("ce_id", schema.id_of(event).encode()),
        ("ce_time", _rfc3339(time_us)),
        ("content-type", CONTENT_TYPE),
    )
    partition = int(key) if schema.spec.key == "rank" else None
    return Encoded(schema.spec.name, key.encode(), value, headers, partition)


@lru_cache(maxsize=64)
def _rfc3339(time_us: int) -> bytes:
    moment = _EPOCH + timedelta(microseconds=time_us)
    return f"{moment.isoformat(timespec='microseconds')}Z".encode()


def decode(topic: str, value: bytes | None, headers: Headers, key: bytes | None = None) -> Event:
    """The event of a record, in the record's current class also where an older schema wrote it.

    Raises `Refused` and nothing else (where a registry is set: also what that raises). `key` is checked where it is given. A null value is refused on every topic:
    on a compacted one it is a delete, which is no event; ask `is_delete` first.
    """
    if value is None:
        raise Refused("tombstone_not_allowed", f"a null value on {topic} is no event")
    schema, start = framed_schema(topic, value)
    return checked(decode_value(value, schema, start), schema, headers, key)


def checked(
    event: Event,
    schema: Schema,
    headers: Headers,
    key: bytes | None = None,
    meaning: Callable[[Any], None] = validate,
) -> Event:
    """The event of a value that was decoded, with its meaning, its headers and (where it is given) its key checked.
    Raises `Refused`."""
    meaning(event)
    _check_headers(event, schema, headers)
    if key is not None:
        wanted = schema.key_of(event).encode()
        if key != wanted:
            raise Refused("key_mismatch", f"the key is {key[:80]!r}, the event's is {wanted[:80]!r}")
    return event


def is_delete(topic: str, value: bytes | None) -> bool:
    """Whether a record deletes its key: a null value on a compacted topic (C44)."""
    return value is None and topic in TOPICS and TOPICS[topic].compacted


def framed_schema(topic: str, value: bytes) -> tuple[Schema, int]:
    """The schema a value says it was written under, and where its body starts.

    Raises `Refused`: too large, not framed, unknown, of another topic.
    """
    known = _BY_PREFIX.get(value[:PREFIX_BYTES])
    if known is not None and known.spec.name == topic and len(value) <= known.most:
        return known, PREFIX_BYTES
    spec = TOPICS.get(topic)
    if spec is None:
        raise Refused("wrong_schema", f"{topic!r} is no topic of the catalogue")
    if len(value) > spec.max_value_bytes:
        raise Refused("too_large", f"the value is {len(value)} bytes, {topic} takes {spec.max_value_bytes}")
    if len(value) >= PREFIX_BYTES and value[:2] == MARKER:
        start = PREFIX_BYTES
        schema = _BY_FINGERPRINT.get(value[2:PREFIX_BYTES])
        if schema is None:
            raise Refused(
                "unknown_schema", f"no released schema has the fingerprint {value[2:PREFIX_BYTES].hex()}"
            )
    elif (schema_id := confluent_id(value)) is not None:
        start = CONFLUENT_BYTES
        schema = _registered(schema_id)
    else:
        raise Refused("not_framed", f"{len(value)} bytes starting with {value[:8].hex(' ')!r}")
    if schema.spec is not spec:
        raise Refused("wrong_schema", f"a {schema.spec.name} event on {topic}")
    return schema, start


def _registered(schema_id: int) -> Schema:
    """The released schema that a registry has under an id; what it has that is none of ours is never decoded with."""
    ids = _ids
    schema = ids.known.get(schema_id)
    if schema is not None:
        return schema
    if ids.registry is None:
        raise Refused("unknown_schema", f"schema id {schema_id}, and no schema registry is set")
    text = ids.registry.schema_of(schema_id)
    if text is None:
        raise Refused("unknown_schema", f"the registry has no Avro schema with id {schema_id}")
    try:
        schema = _BY_FINGERPRINT.get(fingerprint_of(json.loads(text)))
    except (*_BAD_BODY, RecursionError, SchemaParseException) as error:
        raise Refused("unknown_schema", f"schema id {schema_id} is no Avro schema: {error}") from error
    if schema is None:
        raise Refused("unknown_schema", f"schema id {schema_id} of the registry is no released schema")
    ids.known[schema_id] = schema
    return schema


def decode_value(value: bytes, schema: Schema, start: int = PREFIX_BYTES) -> Event:
    """The body, which begins at `start`, as a record; nothing is checked but its form. Raises `Refused`."""
    event: Event
    try:
        if len(value) - start > SCAN_ABOVE:
            schema.scan(value, start)
        if schema.read is not None:
            event, end = schema.read(value, start)
        else:
            body = io.BytesIO(value)
            body.seek(start)
            fields = schemaless_reader(body, schema.avro, schema.reader)
            event, end = msgspec.convert(fields, schema.spec.record_class), body.tell()
    except LimitExceeded as error:
        raise Refused("limit_exceeded", str(error)) from error
    except (Malformed, *_BAD_BODY) as error:
        detail = f"the body is no {schema.spec.name} v{schema.version}: {type(error).__name__}: {error}"
        raise Refused("malformed", detail) from error
    if end != len(value):
        raise Refused("trailing_bytes", f"{len(value) - end} bytes follow the body")
    return event


_SPECVERSION: Final = ("ce_specversion", b"1.0")
_CONTENT_TYPE: Final = ("content-type", CONTENT_TYPE)
_AS_WRITTEN: Final = 6


def _check_headers(event: Event, schema: Schema, headers: Headers) -> None:
    all_ = tuple(headers)
    if len(all_) == _AS_WRITTEN:
        # As `sealed` writes them: compared pair by pair, which costs least.
        specversion, type_, (of_source, source), id_, (of_time, time), content_type = all_
        if (
            specversion == _SPECVERSION
            and type_ == ("ce_type", schema.event_type)
            and of_source == "ce_source"
            and source
            and id_ == ("ce_id", schema.id_of(event).encode())
            and of_time == "ce_time"
            and time is not None
            and _names_time(time)
            and content_type == _CONTENT_TYPE
        ):
            return
    _check_any_headers(event, schema, all_)


@lru_cache(maxsize=1_024)
def _names_time(content: bytes) -> bool:
    """Whether `ce_time` is a time with a zone. Records that were written together have the same."""
    try:
        return datetime.fromisoformat(content.decode()).tzinfo is not None
    except ValueError:
        return False


def _check_any_headers(event: Event, schema: Schema, all_: tuple[tuple[str, bytes | None], ...]) -> None:
    """The same of headers in any order, with others between them; says what is wrong."""
    found = dict(all_)
    if len(found) != len(all_):
        _refuse_repeats(all_)
    for name, wanted in (
        ("ce_specversion", b"1.0"),
        ("ce_type", schema.event_type),
        ("ce_id", schema.id_of(event).encode()),
        ("content-type", CONTENT_TYPE),
    ):
        if found.get(name) != wanted:
            raise Refused(
                "header_mismatch", f"{name} is {_short(found.get(name))}, the value demands {_short(wanted)}"
            )
    if not found.get("ce_source"):
        raise Refused("header_mismatch", "ce_source is missing or empty")
    try:
        moment = datetime.fromisoformat((found.get("ce_time") or b"").decode())
    except ValueError as error:
        raise Refused(
            "header_mismatch", f"ce_time is {_short(found.get('ce_time'))}: no RFC 3339 time"
        ) from error
    if moment.tzinfo is None:
        raise Refused("header_mismatch", f"ce_time is {_short(found.get('ce_time'))}: it names no time zone")


def _refuse_repeats(headers: tuple[tuple[str, bytes | None], ...]) -> None:
    """Only those of the event itself must not: any other header may stand there as often as it likes."""
    seen: set[str] = set()
    for name, _ in headers:
        if name in seen and (name.startswith("ce_") or name == "content-type"):
            raise Refused("header_mismatch", f"{name} stands there twice")
        seen.add(name)


def _short(content: bytes | None) -> str:
    return "missing" if content is None else repr(content[:80])
