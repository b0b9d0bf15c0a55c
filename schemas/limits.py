"""Limits that are checked before anything is built from foreign bytes.

A few bytes can claim millions of items (fastavro builds 20 million nulls from five bytes), and a self-referencing
schema can overflow the stack. Ours are not recursive and no item of theirs is empty, so a body of n bytes holds at
most n items: short bodies need no counting, long ones are walked by `scan` first, which builds nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

MAX_ITEMS: Final = 65_536
"""Items of one array or map. The longest real ones (sequences of a microbatch, groups of a plan) are below 10,000."""

MAX_ITEMS_IN_ALL: Final = 262_144
"""Items of all arrays and maps of one event together."""

MAX_DEPTH: Final = 8
"""Records and arrays inside one another; a test holds the schemas to it."""

SCAN_ABOVE: Final = 65_535
"""Bodies above this many bytes are scanned. Below, the bytes themselves keep every count under `MAX_ITEMS`."""


class LimitExceeded(Exception):
    """A count beyond the limits. Internal to the codec, which turns it into `Refused(limit_exceeded)`."""


class Malformed(Exception):
    """The bytes are no body of the schema. Internal to the codec, which turns it into `Refused(malformed)`."""


_Skip = Callable[[bytes, int, list[int]], int]


def _long(data: bytes, at: int) -> tuple[int, int]:
    """A zigzag varint and the position behind it."""
    shift = value = 0
    while True:
        if at >= len(data):
            raise Malformed("the body ends inside a number")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return (value >> 1) ^ -(value & 1), at
        shift += 7
        if shift > 63:
            raise Malformed("a number has more than 10 bytes")


def _skip_long(data: bytes, at: int, seen: list[int]) -> int:
    return _long(data, at)[1]


def _skip_sized(data: bytes, at: int, seen: list[int]) -> int:
    size, at = _long(data, at)
    if size < 0 or size > len(data) - at:
        raise Malformed(f"a string or byte array claims {size} bytes where {len(data) - at} are left")
    return at + size


_NUMBER: Final = 1
_SIZED: Final = 2
_KINDS: Final[dict[_Skip, tuple[int, _Skip]]] = {
    _skip_long: (_NUMBER, _skip_long),
    _skip_sized: (_SIZED, _skip_sized),
}


def _skip_null(data: bytes, at: int, seen: list[int]) -> int:
    return at


def _skip_fixed(size: int) -> _Skip:
    def skip(data: bytes, at: int, seen: list[int]) -> int:
        if size > len(data) - at:
            raise Malformed("the body ends inside a value")
        return at + size

    return skip


def _skip_fields(fields: tuple[_Skip, ...]) -> _Skip:
    """One after the other. Numbers, strings and byte arrays, the most of a record by far, are walked here: a call of
    a function for each costs three times as much."""
    kinds = tuple(_KINDS.get(field, (0, field)) for field in fields)

    def skip(data: bytes, at: int, seen: list[int]) -> int:
        left = len(data)
        for kind, field in kinds:
            if kind == _NUMBER:
                if at >= left or data[at] >= 0x80:
                    at = _long(data, at)[1]
                else:
                    at += 1
            elif kind == _SIZED:
                if at < left and data[at] < 0x80 and not data[at] & 1:
                    size = data[at] >> 1
                    at += 1
                else:
                    size, at = _long(data, at)
                if size < 0 or size > left - at:
                    raise Malformed(f"a string or byte array claims {size} bytes where {left - at} are left")
                at += size
            else:
                at = field(data, at, seen)
        return at

    return skip


def _skip_union(branches: tuple[_Skip, ...]) -> _Skip:
    null_first = branches[:1] == (_skip_null,)

    def skip(data: bytes, at: int, seen: list[int]) -> int:
        if null_first and at < len(data) and data[at] == 0:
            return at + 1
        index, at = _long(data, at)
        if not 0 <= index < len(branches):
            raise Malformed(f"a union claims branch {index} of {len(branches)}")
        return branches[index](data, at, seen)

    return skip


def _skip_many(item: _Skip) -> Callable[[bytes, int, list[int], int], int]:
    """`count` items of an array; strings are walked here, as they are in `_skip_fields`."""

    def many(data: bytes, at: int, seen: list[int], count: int) -> int:
        for _ in range(count):
            at = item(data, at, seen)
        return at

    def many_sized(data: bytes, at: int, seen: list[int], count: int) -> int:
        left = len(data)
        for _ in range(count):
            size = data[at] if at < left else 0x80
            if size >= 0x80 or size & 1 or at + 1 + (size >> 1) > left:
                at = _skip_sized(data, at, seen)
            else:
                at += 1 + (size >> 1)
        return at

    return many_sized if item is _skip_sized else many


def _skip_blocks(item: _Skip) -> _Skip:
    many = _skip_many(item)

    def skip(data: bytes, at: int, seen: list[int]) -> int:
        here = 0
        while True:
            count, at = _long(data, at)
            if count < 0:  # then the block's size in bytes follows
                count = -count
                at = _long(data, at)[1]
            if count == 0:
                return at
            here += count
            seen[0] += count
            if here > MAX_ITEMS or seen[0] > MAX_ITEMS_IN_ALL:
                raise LimitExceeded(f"an array or map claims {here} items, the event {seen[0]}")
            at = many(data, at, seen, count)

    return skip


def _compile(schema: Any, named: dict[str, _Skip], depth: int) -> _Skip:
    if depth > MAX_DEPTH:
        raise ValueError(f"the schema is deeper than {MAX_DEPTH}")
    if isinstance(schema, list):
        return _skip_union(tuple(_compile(branch, named, depth) for branch in schema))
    if isinstance(schema, str):
        schema = {"type": schema}
    kind = schema["type"]
    if kind == "record":
        fields = tuple(_compile(field["type"], named, depth + 1) for field in schema["fields"])
        return named.setdefault(schema["name"], _skip_fields(fields))
    if kind == "enum":
        return named.setdefault(schema["name"], _skip_long)
    if kind == "array":
        return _skip_blocks(_compile(schema["items"], named, depth + 1))
    if kind == "map":
        return _skip_blocks(_skip_fields((_skip_sized, _compile(schema["values"], named, depth + 1))))
    simple: dict[str, _Skip] = {
        "null": _skip_null,
        "boolean": _skip_fixed(1),
        "int": _skip_long,
        "long": _skip_long,
        "float": _skip_fixed(4),
        "double": _skip_fixed(8),
        "string": _skip_sized,
        "bytes": _skip_sized,
    }
    if kind in simple:
        return simple[kind]
    if kind in named:  # a record is known only once it is complete: a recursive schema ends here
        return named[kind]
    raise ValueError(f"the schema uses {kind!r}, which is not known or is recursive")


def compile_scan(schema: Any) -> Callable[[bytes, int], int]:
    """A function (bytes, start) -> end that walks one body of `schema` and builds nothing.

    It raises `LimitExceeded` or `Malformed`. Raises `ValueError` here where the schema is recursive or too deep.
    """
    skip = _compile(schema, {}, 0)

    def scan(data: bytes, start: int) -> int:
        return skip(data, start, [0])

    return scan
