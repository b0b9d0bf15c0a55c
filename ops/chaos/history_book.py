"""A history on disk: each process writes its own book, line by line, so that a kill -9 loses nothing that happened."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, Literal

import msgspec

from rollwire.ops.chaos.history_check import Assigned, Op, Polled, Sent
from rollwire.streams.seams.log import Record, TopicPartition

_SUFFIX: Final = ".book"


def book_file(folder: Path, process: str) -> Path:
    return folder / f"{process}{_SUFFIX}"


class Line(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One thing that happened to operation `op` of this book, at `at` (monotonic, nanoseconds; one clock a machine)."""

    what: Literal["begin", "send", "commit", "end", "poll", "assign"]
    op: int
    at: int
    until: int = 0  # of a poll: when it returned
    outcome: Literal["ok", "fail", "info"] = "info"
    sent: Sent | None = None
    polls: tuple[Polled, ...] = ()
    assigned: tuple[Assigned, ...] = ()


class Book:
    """Writes what one process does. Not thread-safe: a thread that does operations has a book of its own."""

    def __init__(self, folder: Path, process: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = os.open(book_file(folder, process), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._encoder = msgspec.json.Encoder()
        self._ops = 0

    def begin(self) -> int:
        """A transaction begins; its number in this book."""
        self._ops += 1
        self._write(Line(what="begin", op=self._ops, at=time.monotonic_ns()))
        return self._ops

    def sends(self, op: int, value: int, partition: TopicPartition, source: int | None = None) -> None:
        """To be called *before* the record is handed to the client."""
        self._write(Line(what="send", op=op, at=time.monotonic_ns(), sent=Sent(value, *partition, source)))

    def commits(self, op: int) -> None:
        """To be called before the commit is asked for: a transaction without this line was never committed."""
        self._write(Line(what="commit", op=op, at=time.monotonic_ns()))

    def end(self, op: int, outcome: Literal["ok", "fail", "info"]) -> None:
        self._write(Line(what="end", op=op, at=time.monotonic_ns(), outcome=outcome))

    def polled(self, start: int, records: Sequence[Record]) -> None:
        """Records that a poll returned, which began at `start`; an empty poll is nothing to write down."""
        if records:
            polls = tuple(Polled(int(r.value or b"0"), r.topic, r.partition, r.offset) for r in records)
            self._ops += 1
            self._write(Line(what="poll", op=self._ops, at=start, until=time.monotonic_ns(), polls=polls))

    def assigned(self, positions: Mapping[TopicPartition, int]) -> None:
        given = tuple(Assigned(p.topic, p.partition, at) for p, at in positions.items())
        self._ops += 1
        self._write(Line(what="assign", op=self._ops, at=time.monotonic_ns(), assigned=given))

    def close(self) -> None:
        os.close(self._file)

    def _write(self, line: Line) -> None:
        os.write(self._file, self._encoder.encode(line) + b"\n")  # one call: whole, or not there


def read_history(folder: Path) -> list[Op]:
    """All books of a folder as one history, in the order of time."""
    ops = [op for path in sorted(folder.glob("*" + _SUFFIX)) for op in _read(path)]
    ops.sort(key=lambda op: op.start)
    return [msgspec.structs.replace(op, id=number) for number, op in enumerate(ops, 1)]


def _read(path: Path) -> Iterator[Op]:
    process = path.name.removesuffix(_SUFFIX)
    decoder = msgspec.json.Decoder(Line)
    open_: dict[int, Op] = {}
    for raw in path.read_bytes().splitlines():
        try:
            line = decoder.decode(raw)
        except msgspec.DecodeError:
            continue  # the machine went down in the middle of the last line
        if line.what == "begin":
            open_[line.op] = Op(id=line.op, process=process, kind="txn", start=line.at, outcome="info")
        elif line.what == "poll":
            yield Op(
                id=line.op, process=process, kind="poll", start=line.at, end=line.until, outcome="ok", polls=line.polls
            )  # fmt: skip
        elif line.what == "assign":
            yield Op(
                id=line.op, process=process, kind="assign", start=line.at, end=line.at, outcome="ok", assigned=line.assigned
            )  # fmt: skip
        else:
            open_[line.op] = _changed(open_[line.op], line)
    yield from open_.values()


def _changed(op: Op, line: Line) -> Op:
    if line.sent is not None:
        return msgspec.structs.replace(op, sends=(*op.sends, line.sent))
    if line.what == "commit":
        return msgspec.structs.replace(op, commit=line.at)
    return msgspec.structs.replace(op, end=line.at, outcome=line.outcome)
