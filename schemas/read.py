"""The body of an event to its record, without a detour: a schema and its class become one straight Python function.

A general reader makes a dict of every record and a call of every field, and a second pass then makes the struct of it.
Here the whole schema is written out as source once, when the process starts: small numbers are looked up, strings and byte
arrays are sliced, records are built where they end. It takes half the time. The source follows from the released
schemas and classes alone; no foreign byte ever gets into it.

What keeps it safe
    sizes are never negative, so the position only grows: a slice that is cut short leaves it behind the end, where the
    next byte is no longer found, and where the last line looks once more
    items of arrays and maps are never empty, so that a count beyond the bytes ends at the last byte (`limits.py`)
    numbers have 10 bytes and 64 bits at most; branches and symbols are looked up by number, never from behind
"""

from __future__ import annotations

import struct
import types
import typing
from collections.abc import Callable
from typing import Any, Final, Literal, get_args, get_origin, get_type_hints

import msgspec

from rollwire.schemas.limits import Malformed

Read = Callable[[bytes, int], tuple[Any, int]]

_NUMBERS: Final = tuple((b >> 1) ^ -(b & 1) if b < 0x80 else None for b in range(256))
"""The number of a single byte; None where more follow."""

_STEPS: Final = tuple(1 + (b >> 1) if b < 0x80 and not b & 1 else 0 for b in range(256))
"""From a size of a single byte to what comes behind the bytes; 0 where it has more bytes, or is negative."""

_DOUBLE: Final = struct.Struct("<d").unpack_from
_FLOAT: Final = struct.Struct("<f").unpack_from


def _long(v: bytes, a: int) -> tuple[int, int]:
    """A zigzag varint of any length and the position behind it. Raises `IndexError` at the end, and `Malformed`."""
    first = v[a]
    if first < 0x80:
        return (first >> 1) ^ -(first & 1), a + 1
    second = v[a + 1]
    if second < 0x80:
        n = first & 0x7F | second << 7
        return (n >> 1) ^ -(n & 1), a + 2
    n = int.from_bytes(v[a : a + 8], "little")
    more = n & 0x8080_8080_8080_8080
    if more == 0x0080_8080_8080_8080 or more == 0x8080_8080_8080_8080:
        # Times have 8 bytes, seeds 9: the 7 bits of each are moved together by pairs, then by fours, then by eights.
        n = (n & 0x007F_007F_007F_007F) | (n & 0x7F00_7F00_7F00_7F00) >> 1
        n = (n & 0x0000_3FFF_0000_3FFF) | (n & 0x3FFF_0000_3FFF_0000) >> 2
        n = (n & 0x0FFF_FFFF) | (n & 0x0FFF_FFFF_0000_0000) >> 4
        a += 8
        if more > 0x0080_8080_8080_8080:
            n |= (v[a] & 0x7F) << 56
            a += 1
            if v[a - 1] >= 0x80:
                if v[a] > 1:
                    raise Malformed("a number has more than 64 bits")
                n |= v[a] << 63
                a += 1
        return (n >> 1) ^ -(n & 1), a
    n = shift = 0
    while True:  # 3 to 7 bytes
        b = v[a]
        a += 1
        n |= (b & 0x7F) << shift
        if b < 0x80:
            return (n >> 1) ^ -(n & 1), a
        shift += 7


def _size(v: bytes, a: int) -> tuple[int, int]:
    first, second = v[a], v[a + 1]
    if second < 0x80 <= first and not first & 1:
        return (first & 0x7F | second << 7) >> 1, a + 2
    n, a = _long(v, a)
    if n < 0:
        raise Malformed(f"a string or byte array claims {n} bytes")
    return n, a


class _Unfit(Exception):
    """The schema and the class do not say the same, or use what is not written here."""


class _Source:
    """The lines of a function, and the objects that they name."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.names: dict[str, Any] = {
            "LONG": _long,
            "SIZE": _size,
            "NUMBERS": _NUMBERS,
            "STEPS": _STEPS,
            "DOUBLE": _DOUBLE,
            "FLOAT": _FLOAT,
            "MALFORMED": Malformed,
        }
        self.named: dict[str, Any] = {}  # schemas by name, as far as they are complete
        self._count = 0

    def new(self, prefix: str) -> str:
        self._count += 1
        return f"{prefix}{self._count}"

    def constant(self, prefix: str, value: Any) -> str:
        name = self.new(prefix)
        self.names[name] = value
        return name

    def add(self, depth: int, *lines: str) -> None:
        self.lines += ["    " * depth + line for line in lines]

    def value(self, schema: Any, hint: Any, depth: int) -> str:
        """Appends what reads one value; returns the variable that then holds it."""
        if isinstance(schema, list):
            return self._union(schema, hint, depth)
        if isinstance(schema, str):
            schema = self.named.get(schema, {"type": schema})
        kind = schema["type"]
        if "logicalType" in schema:
            raise _Unfit(f"logical type of {kind}")
        if kind in _LEAVES:
            wanted, lines = _LEAVES[kind]
            _same(hint is wanted, kind, hint)
            x = self.new("x")
            self.add(depth, *(line.format(x=x) for line in lines))
            return x
        if kind == "enum":
            return self._enum(schema, hint, depth)
        if kind == "record":
            return self._record(schema, hint, depth)
        if kind in ("array", "map"):
            return self._blocks(schema, hint, depth)
        raise _Unfit(f"kind {kind!r}")

    def _number(self, x: str, depth: int) -> None:
        self.add(depth, *(line.format(x=x) for line in _LEAVES["long"][1]))

    def _enum(self, schema: Any, hint: Any, depth: int) -> str:
        symbols = schema["symbols"]
        _same(get_origin(hint) is Literal and set(symbols) <= set(get_args(hint)), "enum", hint)
        _same(len(symbols) <= 64, "enum of many symbols", hint)  # one byte says which
        self.named[schema["name"]] = schema
        table = self.constant("ENUM", {2 * index: symbol for index, symbol in enumerate(symbols)})
        x = self.new("x")
        self.add(
            depth,
            f"{x} = {table}.get(v[a])",
            f"if {x} is None:",
            "    n, a = LONG(v, a)",
            f"    {x} = {table}[2 * n]",
            "else:",
            "    a += 1",
        )
        return x

    def _union(self, branches: list[Any], hint: Any, depth: int) -> str:
        """null and one other: no record of ours has more."""
        _same(get_origin(hint) in (typing.Union, types.UnionType), "union", hint)
        hints = [one for one in get_args(hint) if one is not type(None)]
        _same(len(hints) == 1 and len(get_args(hint)) == 2, "union", hint)
        _same(len(branches) == 2 and branches.count("null") == 1, "union", hint)
        x, null = self.new("u"), branches.index("null")
        self._number(x, depth)
        self.add(depth, f"if {x} == {null}:", f"    {x} = None", f"elif {x} == {1 - null}:")
        inner = self.value(branches[1 - null], hints[0], depth + 1)
        self.add(depth + 1, f"{x} = {inner}")
        self.add(depth, "else:", f"    raise MALFORMED(f'a union claims branch {{{x}}} of 2')")
        return x

    def _blocks(self, schema: Any, hint: Any, depth: int) -> str:
        arguments = get_args(hint)
        x, many = self.new("x"), self.new("c")
        mapping = schema["type"] == "map"
        if mapping:
            _same(get_origin(hint) is dict and arguments[0] is str, "map", hint)
        else:
            _same(get_origin(hint) is tuple and len(arguments) == 2 and arguments[1] is ..., "array", hint)
        self.add(depth, f"{x} = {'{}' if mapping else '[]'}", "while v[a]:")
        self._number(many, depth + 1)
        # A negative count is followed by the block's size in bytes; a zero that has two bytes ends it all as well.
        self.add(
            depth + 1,
            f"if {many} <= 0:",
            f"    if {many} == 0:",
            "        a -= 1",
            "        break",
            f"    {many} = -{many}",
            "    n, a = LONG(v, a)",
            f"for _ in range({many}):",
        )
        if mapping:
            key = self.value("string", str, depth + 2)
            inner = self.value(schema["values"], arguments[1], depth + 2)
            self.add(depth + 2, f"{x}[{key}] = {inner}")
            self.add(depth, "a += 1")
        else:
            inner = self.value(schema["items"], arguments[0], depth + 2)
            self.add(depth + 2, f"{x}.append({inner})")
            self.add(depth, "a += 1", f"{x} = tuple({x})")
        return x

    def _record(self, schema: Any, hint: Any, depth: int) -> str:
        _same(isinstance(hint, type) and issubclass(hint, msgspec.Struct), "record", hint)
        fields = [field["name"] for field in schema["fields"]]
        _same(bool(fields) and tuple(fields) == hint.__struct_fields__, f"record {schema['name']}", hint)
        hints = get_type_hints(hint)
        read = [
            (field["name"], self.value(field["type"], hints[field["name"]], depth))
            for field in schema["fields"]
        ]
        self.named[schema["name"]] = schema  # only now: a record inside itself is not known, and not read
        x = self.new("x")
        made = ", ".join(f"{name}={variable}" for name, variable in read)
        self.add(depth, f"{x} = {self.constant('CLASS', hint)}({made})")
        return x


def _same(holds: bool, kind: str, hint: Any) -> None:
    if not holds:
        raise _Unfit(f"{kind} for {hint}")


# A byte, two, or more: most sizes and counts have one, some two.
_SIZED: Final = (
    "n = STEPS[v[a]]",
    "if n:",
    "    {x} = v[a + 1:(a := a + n)]DECODED",
    "else:",
    "    n, a = SIZE(v, a)",
    "    {x} = v[a:(a := a + n)]DECODED",
)
_WHOLE: Final = ("{x} = NUMBERS[v[a]]", "if {x} is None:", "    {x}, a = LONG(v, a)", "else:", "    a += 1")
_LEAVES: Final[dict[str, tuple[type, tuple[str, ...]]]] = {
    "long": (int, _WHOLE),
    "double": (float, ("{x}, = DOUBLE(v, a)", "a += 8")),
    "float": (float, ("{x}, = FLOAT(v, a)", "a += 4")),
    "string": (str, tuple(line.replace("DECODED", ".decode()") for line in _SIZED)),
    "bytes": (bytes, tuple(line.replace("DECODED", "") for line in _SIZED)),
}


def compile_read(schema: Any, record_class: type[msgspec.Struct]) -> Read | None:
    """A function (bytes, start) -> (record, end) that reads one body of `schema`; None where the schema and the class
    differ in a field or use what it does not know. It raises `Malformed`, `LookupError`, `ValueError`, `OverflowError` or
    `struct.error` over bytes that are no such body. Bodies above `limits.SCAN_ABOVE` are to be scanned first.
    """
    source = _Source()
    try:
        x = source.value(schema, record_class, 1)
    except _Unfit:
        return None
    text = "\n".join(
        (
            "def read(v, a):",
            *source.lines,
            "    if a > len(v):",
            "        raise MALFORMED(f'the body ends {a - len(v)} bytes early')",
            f"    return {x}, a",
        )
    )
    exec(compile(text, f"<read {record_class.__name__}>", "exec"), source.names)  # noqa: S102 - see the module's text
    read: Read = source.names["read"]
    return read
