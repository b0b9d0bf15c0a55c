"""Avro bodies to MessagePack, many in one call of compiled code: what lies between the log and a fast general decoder.

A schema becomes a program for a small machine (`program_of`), and `repack` runs it over bodies that lie end to end. A record becomes a
map of its fields' names, an array an array, an enum its symbol's name, `bytes` binary: what msgspec builds records from.

Nothing is decided here. A body that is odd in any way (a number of more than 64 bits, a block with a negative count, a byte too
many or too few) is left out and marked: whoever calls has a reader that says what is wrong with it. UTF-8 is not looked at:
MessagePack's decoder does.

Sources: Apache Avro specification, "Binary encoding"; MessagePack specification.

Legend: K bodies, O operations of the program, S symbols of its enums.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from rollwire.kernels.digest import jit, lanes

_RAW, _LONG, _STRING, _BYTES, _DOUBLE, _FLOAT, _ENUM, _OPTION, _LOOP, _NEXT, _END = range(11)
_SIMPLE: Final = {"long": _LONG, "string": _STRING, "bytes": _BYTES, "double": _DOUBLE, "float": _FLOAT}

MAX_DEPTH: Final = 8
"""Arrays and maps inside one another."""

_FULL: Final = -1


class Program(NamedTuple):
    """How a body of one schema is read. `code_O4`: operation and three arguments; `constants`: bytes to copy."""

    code_O4: NDArray[np.int64]
    constants: NDArray[np.uint8]
    symbol_S2: NDArray[np.int64]  # offset and length in `constants`


class _Compiler:
    def __init__(self) -> None:
        self.code: list[list[int]] = []
        self.constants = bytearray()
        self.symbols: list[tuple[int, int]] = []
        self.named: dict[str, Any] = {}

    def add(self, operation: int, a: int = 0, b: int = 0, c: int = 0) -> int:
        self.code.append([operation, a, b, c])
        return len(self.code) - 1

    def raw(self, data: bytes) -> None:
        self.add(_RAW, len(self.constants), len(data))
        self.constants += data

    def value(self, schema: Any) -> None:
        if isinstance(schema, list):
            self._option(schema)
            return
        if isinstance(schema, str):
            schema = self.named.get(schema, {"type": schema})
        kind = schema["type"]
        if kind in _SIMPLE and "logicalType" not in schema:
            self.add(_SIMPLE[kind])
        elif kind == "enum":
            self.named[schema["name"]] = schema
            first = len(self.symbols)
            for symbol in schema["symbols"]:
                packed = msgspec.msgpack.encode(symbol)
                self.symbols.append((len(self.constants), len(packed)))
                self.constants += packed
            self.add(_ENUM, first, len(schema["symbols"]))
        elif kind == "record":
            self.raw(b"\xde" + len(schema["fields"]).to_bytes(2, "big"))
            for field in schema["fields"]:
                self.raw(msgspec.msgpack.encode(field["name"]))
                self.value(field["type"])
            self.named[schema["name"]] = schema
        elif kind in ("array", "map"):
            loop = self.add(_LOOP, 0, 0xDD if kind == "array" else 0xDF)
            if kind == "map":
                self.add(_STRING)
            self.value(schema["items" if kind == "array" else "values"])
            end = self.add(_NEXT)
            self.code[loop][1] = end
        else:
            raise ValueError(f"kind {kind!r}")

    def _option(self, branches: list[Any]) -> None:
        if len(branches) != 2 or branches.count("null") != 1:
            raise ValueError(f"a union of {len(branches)} branches")
        null = branches.index("null")
        option = self.add(_OPTION, null)
        self.value(branches[1 - null])
        self.code[option][2] = len(self.code)


def program_of(schema: Any) -> Program | None:
    """The program of a schema as JSON says it; None where it has a kind that is not known here."""
    compiler = _Compiler()
    try:
        compiler.value(schema)
    except ValueError:
        return None
    compiler.add(_END)
    return Program(
        np.array(_merged(compiler.code, compiler.constants), np.int64),
        np.frombuffer(bytes(compiler.constants), np.uint8),
        np.array(compiler.symbols or [(0, 0)], np.int64),
    )


def _merged(code: list[list[int]], constants: bytearray) -> list[list[int]]:
    """Neighbouring constants, which are copied most, become one where nothing jumps between them."""
    targets = (
        {row[2] for row in code if row[0] == _OPTION}
        | {row[1] for row in code if row[0] == _LOOP}
        | {at + 1 for at, row in enumerate(code) if row[0] in (_LOOP, _NEXT)}
    )
    kept: list[list[int]] = []
    place: list[int] = []
    for at, row in enumerate(code):
        last = kept[-1] if kept else [_END, 0, 0, 0]
        if row[0] == _RAW == last[0] and at not in targets and last[1] + last[2] == row[1]:
            last[2] += row[2]
            place.append(len(kept) - 1)
        else:
            kept.append(list(row))
            place.append(len(kept) - 1)
    for row in kept:
        if row[0] == _OPTION:
            row[2] = place[row[2]]
        elif row[0] == _LOOP:
            row[1] = place[row[1]]
    return kept


def repack(
    program: Program,
    prefix: NDArray[np.uint8],
    data: NDArray[np.uint8],
    at_K1: NDArray[np.int64],
    out: NDArray[np.uint8],
    good_K: NDArray[np.uint8],
) -> int:
    """Repacks the values data[at_K1[k] : at_K1[k + 1]], each `prefix` and a body, into `out`; how many bytes that gives.

    What is good stands in `out` one after the other, and has 1 in `good_K`, all others 0. -1: `out` is too small.
    """
    return int(
        _kernel()(program.code_O4, program.constants, program.symbol_S2, prefix, data, at_K1, out, good_K)
    )


@jit()
def _number(data: Any, at: int, end: int) -> tuple[np.int64, int]:
    """A zigzag varint and the position behind it; position -1: it is none."""
    if at < end and data[at] < 0x80:
        short = np.int64(data[at])
        return (short >> 1) ^ -(short & 1), at + 1
    n = np.uint64(0)
    shift = np.uint64(0)
    for i in range(10):
        if at + i >= end:
            return np.int64(0), -1
        byte = data[at + i]
        if i == 9 and byte > 1:
            return np.int64(0), -1
        n |= np.uint64(byte & np.uint8(0x7F)) << shift
        if byte < 0x80:
            half = np.int64(n >> np.uint64(1))
            return (~half if n & np.uint64(1) else half), at + i + 1
        shift += np.uint64(7)
    return np.int64(0), -1


@jit()
def _big(out: Any, pos: int, n: np.uint64, size: int) -> None:
    """`n` in `size` bytes, the highest first."""
    for i in range(size):
        out[pos + i] = np.uint8((n >> np.uint64(8 * (size - 1 - i))) & np.uint64(0xFF))


@jit()
def _one(
    code: Any, constants: Any, symbols: Any, data: Any, at: int, end: int, out: Any, pos: int, stack: Any
) -> tuple[int, int]:
    """One body: (where it ends in `out`, 0), or (anything, 1: it is odd, 2: `out` is full)."""
    room = out.size - 16
    depth = 0
    pc = 0
    while True:
        op, x, y = code[pc, 0], code[pc, 1], code[pc, 2]
        if pos > room:
            return pos, 2
        if op == _RAW:
            if pos + y > room:
                return pos, 2
            for i in range(y):
                out[pos + i] = constants[x + i]
            pos += y
            pc += 1
        elif op in (_STRING, _BYTES):
            n, at = _number(data, at, end)
            if at < 0 or n < 0 or n > end - at:
                return pos, 1
            if pos + n > room:
                return pos, 2
            if op == _STRING and n < 32:
                out[pos] = np.uint8(0xA0 | n)
                pos += 1
            elif n < 256:
                out[pos] = np.uint8(0xD9 if op == _STRING else 0xC4)
                out[pos + 1] = np.uint8(n)
                pos += 2
            elif n < 65_536:
                out[pos] = np.uint8(0xDA if op == _STRING else 0xC5)
                _big(out, pos + 1, np.uint64(n), 2)
                pos += 3
            else:
                out[pos] = np.uint8(0xDB if op == _STRING else 0xC6)
                _big(out, pos + 1, np.uint64(n), 4)
                pos += 5
            for i in range(n):
                out[pos + i] = data[at + i]
            pos += n
            at += n
            pc += 1
        elif op == _LONG:
            n, at = _number(data, at, end)
            if at < 0:
                return pos, 1
            if 0 <= n < 128:
                out[pos] = np.uint8(n)
                pos += 1
            else:
                out[pos] = np.uint8(0xD3)
                _big(out, pos + 1, np.uint64(n), 8)
                pos += 9
            pc += 1
        elif op in (_DOUBLE, _FLOAT):
            size = 8 if op == _DOUBLE else 4
            if size > end - at:
                return pos, 1
            out[pos] = np.uint8(0xCB if op == _DOUBLE else 0xCA)
            for i in range(size):
                out[pos + 1 + i] = data[at + size - 1 - i]
            pos += 1 + size
            at += size
            pc += 1
        elif op == _ENUM:
            n, at = _number(data, at, end)
            if at < 0 or n < 0 or n >= y:
                return pos, 1
            start, size = symbols[x + n, 0], symbols[x + n, 1]
            if pos + size > room:
                return pos, 2
            for i in range(size):
                out[pos + i] = constants[start + i]
            pos += size
            pc += 1
        elif op == _OPTION:
            n, at = _number(data, at, end)
            if at < 0 or n < 0 or n > 1:
                return pos, 1
            if n == x:
                out[pos] = np.uint8(0xC0)
                pos += 1
                pc = y
            else:
                pc += 1
        elif op == _LOOP:
            if depth == stack.shape[0]:
                return pos, 1
            out[pos] = np.uint8(y)
            stack[depth, 0], stack[depth, 1], stack[depth, 2], stack[depth, 3] = pos + 1, 0, 0, pc + 1
            depth += 1
            pos += 5
            pc = x
        elif op == _NEXT:
            top = depth - 1
            if stack[top, 2] > 0:
                stack[top, 2] -= 1
                pc = stack[top, 3]
            elif at >= end:
                return pos, 1
            elif data[at] == 0:
                at += 1
                _big(out, stack[top, 0], np.uint64(stack[top, 1]), 4)
                depth -= 1
                pc += 1
            else:
                n, at = _number(data, at, end)
                if at < 0 or n <= 0 or n > end - at:
                    return pos, 1
                stack[top, 1] += n
                stack[top, 2] = n - 1
                pc = stack[top, 3]
        else:
            return pos, 0 if at == end else 1


def _all(
    code: NDArray[np.int64],
    constants: NDArray[np.uint8],
    symbols: NDArray[np.int64],
    prefix: NDArray[np.uint8],
    data: NDArray[np.uint8],
    at_K1: NDArray[np.int64],
    out: NDArray[np.uint8],
    good_K: NDArray[np.uint8],
) -> int:
    stack = np.zeros((MAX_DEPTH, 4), np.int64)
    pos: Any = 0
    for k in range(at_K1.size - 1):
        at, end = at_K1[k], at_K1[k + 1]
        good_K[k] = 0
        if end - at < prefix.size:
            continue
        same = True
        for i in range(prefix.size):
            same = same and data[at + i] == prefix[i]
        if not same:
            continue
        after, odd = _one(code, constants, symbols, data, at + prefix.size, end, out, pos, stack)
        if odd == 2:
            return _FULL
        if odd == 0:
            good_K[k] = 1
            pos = after
    return int(pos)


@cache
def _kernel() -> Any:
    table = "Array(int64, 2, 'C', True)"
    bytes_ = lanes(1)
    return jit(
        f"int64({table}, {bytes_}, {table}, {bytes_}, {bytes_}, Array(int64, 1, 'C', True), {lanes(1, readonly=False)}, "
        f"{lanes(1, readonly=False)})"
    )(_all)
