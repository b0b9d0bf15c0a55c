"""A group's value out of the values of its rollouts: what was decoded and checked once is not built again from its fields.

Avro writes a record as its fields one after the other, without names or lengths; so the body of a rollout's own value is, byte
for byte, what stands for that rollout inside a group, as long as both schemas say the same of a rollout. That is asked of
the schemas themselves; where it does not hold, everything is encoded from the fields.
"""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Sequence
from typing import Any, Final

import msgspec
from fastavro import parse_schema, schemaless_writer
from fastavro.schema import to_parsing_canonical_form

from rollwire.schemas.catalogue import TOPICS, avro_folder
from rollwire.schemas.codec import Encoded, Schema, encode, encode_value, framed_schema, schema_for, sealed
from rollwire.schemas.errors import Refused
from rollwire.schemas.field_types import compile_check
from rollwire.schemas.limits import SCAN_ABOVE, LimitExceeded, Malformed
from rollwire.schemas.records import Group, Member, Position, Rollout
from rollwire.schemas.validate import validate_group

ROLLOUTS: Final = "rollouts"
PRODUCTION: Final = "production-rollouts"
_HEAD: Final = ("group_id", "model", "lineage", "environment", "task_id", "group_size", "baseline")
_FLOATS: Final = (float, type(None))
_is_position: Final = compile_check(Position)


def _json(topic: str, version: int) -> Any:
    file = next(schema.file for schema in TOPICS[topic].schemas if schema.version == version)
    return json.loads((avro_folder() / file).read_text("utf-8"))


def _canonical(schema: Any) -> str:
    return to_parsing_canonical_form(schema)


class _Layout:
    """What the current schema of `groups` says about where a rollout stands in it."""

    def __init__(self) -> None:
        schema = _json("groups", TOPICS["groups"].current.version)
        fields = schema["fields"]
        member = fields[len(_HEAD)]["type"].get("items", {})
        self.fits = (
            [field["name"] for field in fields] == [*_HEAD, "members", "cut"]
            and [field["name"] for field in member["fields"]]
            == ["rollout", "reward", "advantage", "trace", "signals"]
            and [_canonical(field["type"]) for field in member["fields"][1:3]] == ['["null","double"]'] * 2
        )
        self.head = parse_schema(schema | {"fields": fields[: len(_HEAD)]})
        self.fits &= _canonical(member["fields"][4]["type"]) == '"long"'
        inside = _canonical(member["fields"][0]["type"] | {"namespace": schema.get("namespace", "")})
        # The versions of both topics of rollouts whose body is a group's rollout. A record's name is not in its body.
        self.versions = {
            topic: frozenset(
                released.version
                for released in TOPICS[topic].schemas
                if self.fits and _canonical(_json(topic, released.version) | {"name": "Rollout"}) == inside
            )
            for topic in (ROLLOUTS, PRODUCTION)
        }


_LAYOUT: Final = _Layout()


def encode_group(group: Group, values: Sequence[bytes | None], *, source: str, time_us: int) -> Encoded:
    """As `codec.encode`; `values[i]` is the value that `codec.decode` made `members[i].rollout` of: one of `rollouts`, or in
    a group whose baseline is the cohort one of `production-rollouts`.

    None = there is none. Where each value has the layout of the group's schema, its bytes go into the group as they are and its
    rollout, which `decode` has checked, is not checked again; all else of the group is checked as ever. The result
    decodes to `group`. Raises `Refused` for whatever `encode` refuses.
    """
    schema = schema_for(Group)
    topic = PRODUCTION if group.baseline == "cohort" else ROLLOUTS
    bodies = [_body(topic, member, value) for member, value in zip(group.members, values, strict=True)]
    if None in bodies:
        return encode(group, source=source, time_us=time_us)
    value = _spliced(group, [body for body in bodies if body is not None], schema)
    if value is None:
        return encode(group, source=source, time_us=time_us)
    validate_group(group, rollouts=False)
    return sealed(group, schema, value, source=source, time_us=time_us)


def _body(topic: str, member: Member, value: bytes | None) -> memoryview | None:
    """The body of a rollout's value, if it may stand in a group as it is."""
    if value is None or type(member) is not Member or type(member.rollout) is not Rollout:
        return None
    written, start = framed_schema(topic, value)
    if written.version not in _LAYOUT.versions[topic]:
        return None
    # It begins with the rollout's id: a value of another rollout is a fault of the caller's.
    name = _text(member.rollout.rollout_id)
    if not value.startswith(name, start):
        raise Refused("malformed", f"a value of another rollout than {member.rollout.rollout_id[:80]}")
    return memoryview(value)[start:]


def _spliced(group: Group, bodies: Sequence[memoryview], schema: Schema) -> bytes | None:
    """The value; None where a limit or the form of a body asks for an encoding from the fields."""
    # Head, an empty array of members, cut; with all checks of types and the frame of the value.
    bare = encode_value(msgspec.structs.replace(group, members=()), schema)
    head = io.BytesIO()
    schemaless_writer(head, _LAYOUT.head, {name: getattr(group, name) for name in _HEAD})
    start = framed_schema(schema.spec.name, bare)[1]
    prefix = start + len(head.getvalue())
    parts: list[bytes | memoryview] = [bare[:prefix]]
    if bodies:
        parts.append(_long(len(bodies)))
    for member, body in zip(group.members, bodies, strict=True):
        parts += (body, _rest(member))
    parts.append(bare[prefix:])
    value = b"".join(parts)
    if len(value) > schema.spec.max_value_bytes:
        return None  # refused there, with the words of the codec
    if len(value) > SCAN_ABOVE:
        try:
            schema.scan(value, start)
        except (LimitExceeded, Malformed):
            return None
    return value


def _rest(member: Member) -> bytes:
    """What follows the rollout of a member. Raises `Refused` where a field is not of its declared type."""
    if type(member.reward) not in _FLOATS or type(member.advantage) not in _FLOATS:
        raise Refused("malformed", "a reward or an advantage is not of its declared type")
    if type(member.signals) is not int:
        raise Refused("malformed", "a count of signals is not of its declared type")
    trace, signals = member.trace, _long(member.signals)
    if trace is None:
        return _double(member.reward) + _double(member.advantage) + b"\x00" + signals
    if not _is_position(trace):
        raise Refused("malformed", "a trace is not of its declared type")
    place = _text(trace.topic) + _long(trace.partition) + _long(trace.offset)
    return _double(member.reward) + _double(member.advantage) + b"\x02" + place + signals


def _double(value: float | None) -> bytes:
    return b"\x00" if value is None else b"\x02" + struct.pack("<d", value)


def _text(value: str) -> bytes:
    encoded = value.encode()
    return _long(len(encoded)) + encoded


def _long(value: int) -> bytes:
    """A zigzag varint of 64 bits."""
    left = (value << 1) ^ (value >> 63)
    out = bytearray()
    while left > 0x7F:
        out.append(left & 0x7F | 0x80)
        left >>= 7
    out.append(left)
    return bytes(out)
