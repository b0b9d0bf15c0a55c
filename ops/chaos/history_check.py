"""A checker of histories: what clients did with a log, and what readers were shown of it.

A history is a list of `Op`s from many processes on one clock. Values are unique: one operation wrote each of them. Readers
are `read_committed`. The checker is told nothing of the log itself; it compares what clients were promised with what
anybody was shown. The names come from `jepsen.tests.kafka`; the definitions are ours:

lost-write          an operation that ended well wrote a value that nobody was ever shown, although readers went past its
                    place: the partition was read out, or shows a value of an operation that began after this one ended.
                    Also a value shown in a topic of `answered` that no shown value answers
unseen              the same, but no reader came to that place: nothing proves that the value is there, nor that it is lost
duplicate           one value at two places of the log, or two values shown that answer the same source. The same place
                    twice is a reader that went back, and no error
aborted-read        a value was shown of an operation that failed (aborted, refused, or dead before it asked for its
                    commit), or that no operation wrote
precommitted-read   a poll had returned a value before the writer asked for the commit of its transaction, or a transaction
                    was shown a value of its own
torn                of one transaction some values were shown, others never, although readers went past their places
poll-skip           a reader's consecutive polls of a partition passed over an offset where some reader was shown a value.
                    Control records and aborted records leave holes that nobody is shown (C40): these count for nothing
nonmonotonic-poll   a reader's consecutive polls of a partition went back, or stood still, without a new assignment
inconsistent-offset one place of the log with two values

What an outcome means: `ok` it happened, `fail` it did not and never will, `info` either may be true, now or later (a
time-out, a kill -9): such an operation owes nobody its values, but all or nothing of it may be shown. An operation that
never asked for its commit counts as failed, however it ended.

An `assign` (by hand, or from a rebalance) resets what a reader's next poll is compared with: it starts at the position that
the assignment names, or anywhere where it names none. Partitions that it leaves out are no longer read.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Final, Literal, NamedTuple

import msgspec

Name = Literal[
    "lost-write",
    "unseen",
    "duplicate",
    "aborted-read",
    "precommitted-read",
    "torn",
    "poll-skip",
    "nonmonotonic-poll",
    "inconsistent-offset",
]
NAMES: Final[tuple[Name, ...]] = Name.__args__  # type: ignore[attr-defined]
Partition = tuple[str, int]


class Sent(NamedTuple):
    """A value that an operation wrote; its offset is known from readers only."""

    value: int
    topic: str
    partition: int
    source: int | None = None  # the value that this one answers: what was shown of it may be answered once


class Polled(NamedTuple):
    """A value as a reader was shown it."""

    value: int
    topic: str
    partition: int
    offset: int


class Assigned(NamedTuple):
    """A partition given to a reader, from `position` on (None: from wherever its first poll shows)."""

    topic: str
    partition: int
    position: int | None


class Op(msgspec.Struct, frozen=True, kw_only=True):
    """One operation of one process, which does one at a time. Times are nanoseconds of one clock for all processes."""

    id: int
    process: str
    kind: Literal["send", "txn", "poll", "assign"]
    start: int
    commit: int | None = (
        None  # when the commit was asked for; of a `send`, which is visible at once, its start
    )
    end: int | None = None  # None: it never came back
    outcome: Literal["ok", "fail", "info"]
    sends: tuple[Sent, ...] = ()
    polls: tuple[Polled, ...] = ()  # in the order in which they were shown
    assigned: tuple[Assigned, ...] = ()


class Finding(NamedTuple):
    """One broken promise: its name, the operations that show it, and what happened in words."""

    name: Name
    ops: tuple[int, ...]
    text: str


def check(
    ops: Sequence[Op], read_out: Collection[Partition] = (), answered: Collection[str] = ()
) -> list[Finding]:
    """Everything that is wrong with a history, by name, then by operation.

    `read_out`: the partitions that somebody read from their beginning to their stable end after the last writer had
    ended. `answered`: topics of which every value was to be answered by then.
    Raises `ValueError` where two operations wrote one value: such a history says nothing.
    """
    view = _View(ops)
    found = [
        *_writes(ops, view, frozenset(read_out)),
        *_places(view),
        *_answers(ops, view, frozenset(answered)),
        *_early_reads(ops, view),
        *_reader_order(ops, view),
    ]
    return sorted(found, key=lambda f: (NAMES.index(f.name), f.ops))


def count(findings: Iterable[Finding]) -> dict[Name, int]:
    """Findings of each name; every name is there."""
    counted: dict[Name, int] = dict.fromkeys(NAMES, 0)
    for finding in findings:
        counted[finding.name] += 1
    return counted


def failed(op: Op) -> bool:
    """Whether nothing of this operation may ever be shown."""
    return op.outcome == "fail" or (op.kind == "txn" and op.commit is None)


class _View:
    """What was written by whom, and what readers were shown."""

    def __init__(self, ops: Sequence[Op]) -> None:
        self.writer: dict[int, Op] = {}
        self.places: dict[int, dict[tuple[str, int, int], int]] = defaultdict(dict)  # value -> place -> op
        self.values: dict[tuple[str, int, int], dict[int, int]] = defaultdict(dict)  # place -> value -> op
        for op in ops:
            for sent in op.sends:
                if sent.value in self.writer:
                    raise ValueError(f"value {sent.value} was written by two operations")
                self.writer[sent.value] = op
        for op in ops:
            for polled in op.polls:
                place = (polled.topic, polled.partition, polled.offset)
                self.places[polled.value].setdefault(place, op.id)
                self.values[place].setdefault(polled.value, op.id)
        offsets: dict[Partition, list[int]] = defaultdict(list)
        for topic, partition, offset in self.values:
            offsets[topic, partition].append(offset)
        self.offsets = {partition: sorted(found) for partition, found in offsets.items()}
        # Of each partition: when the latest operation began of which something was shown there.
        self.latest: dict[Partition, int] = {}
        for (topic, partition, _), values in self.values.items():
            for value in values:
                writer = self.writer.get(value)
                if writer is not None:
                    known = self.latest.get((topic, partition), writer.start)
                    self.latest[topic, partition] = max(known, writer.start)


def _writes(ops: Sequence[Op], view: _View, read_out: frozenset[Partition]) -> Iterator[Finding]:
    for op in ops:
        shown = [s for s in op.sends if s.value in view.places]
        missing = [s for s in op.sends if s.value not in view.places]
        passed = [
            s
            for s in missing
            if (s.topic, s.partition) in read_out
            or (
                op.outcome == "ok"
                and op.end is not None
                and view.latest.get((s.topic, s.partition), -1) >= op.end
            )
        ]
        if op.outcome == "ok" and not failed(op):
            for sent in missing:
                lost = sent in passed
                yield Finding(
                    "lost-write" if lost else "unseen",
                    (op.id,),
                    f"{_value(sent)} was acknowledged to {op.process}, and "
                    + ("readers went past it" if lost else "no reader came to its place"),
                )
        if shown and passed:
            yield Finding(
                "torn",
                (op.id,),
                f"of the transaction of {op.process}, {len(shown)} of {len(op.sends)} values were shown; "
                f"{', '.join(_value(s) for s in passed)} never",
            )


def _places(view: _View) -> Iterator[Finding]:
    for value, places in view.places.items():
        if len(places) > 1:
            where = ", ".join(f"{t}[{p}]@{o}" for t, p, o in sorted(places))
            yield Finding("duplicate", tuple(places.values()), f"value {value} is in the log twice: {where}")
    for (topic, partition, offset), values in view.values.items():
        if len(values) > 1:
            yield Finding(
                "inconsistent-offset",
                tuple(values.values()),
                f"{topic}[{partition}]@{offset} was shown with values {sorted(values)}",
            )


def _answers(ops: Sequence[Op], view: _View, answered: frozenset[str]) -> Iterator[Finding]:
    answers: dict[int, list[tuple[int, int]]] = defaultdict(list)  # source -> (answer, op) that were shown
    for op in ops:
        for sent in op.sends:
            if sent.source is not None and sent.value in view.places:
                answers[sent.source].append((sent.value, op.id))
    for source, shown in answers.items():
        if len(shown) > 1:
            values = ", ".join(str(value) for value, _ in shown)
            yield Finding("duplicate", tuple(op for _, op in shown), f"{source} was answered twice: {values}")
    for value, places in view.places.items():
        topics = {topic for topic, _, _ in places}
        if topics & answered and value not in answers:
            writer = view.writer.get(value)
            yield Finding(
                "lost-write", () if writer is None else (writer.id,), f"value {value} was never answered"
            )


def _early_reads(ops: Sequence[Op], view: _View) -> Iterator[Finding]:
    for op in ops:
        for polled in op.polls:
            writer = view.writer.get(polled.value)
            if writer is None:
                yield Finding("aborted-read", (op.id,), f"{_shown(polled, op)}, which no operation wrote")
                continue
            if failed(writer):
                yield Finding(
                    "aborted-read",
                    (writer.id, op.id),
                    f"{_shown(polled, op)}; the transaction of {writer.process} that wrote it was never committed",
                )
            if writer.kind != "txn":
                continue
            early = writer.commit is None or (op.end is not None and op.end < writer.commit)
            if op.id == writer.id or (early and op.outcome == "ok"):
                yield Finding(
                    "precommitted-read",
                    (writer.id, op.id),
                    f"{_shown(polled, op)} before {writer.process} asked for the commit of it",
                )


def _reader_order(ops: Sequence[Op], view: _View) -> Iterator[Finding]:
    last: dict[str, dict[Partition, int | None]] = defaultdict(dict)
    for op in sorted(ops, key=lambda o: (o.start, o.id)):
        at = last[op.process]
        if op.kind == "assign":
            at.clear()
            for given in op.assigned:
                at[given.topic, given.partition] = None if given.position is None else given.position - 1
        for polled in op.polls:
            partition = (polled.topic, polled.partition)
            before = at.get(partition)
            if before is not None and polled.offset <= before:
                yield Finding(
                    "nonmonotonic-poll", (op.id,), f"{_shown(polled, op)}, having been behind {before} before"
                )
            elif before is not None:
                known = view.offsets[partition]
                skipped = known[bisect_right(known, before) : bisect_left(known, polled.offset)]
                if skipped:
                    yield Finding(
                        "poll-skip",
                        (op.id,),
                        f"{_shown(polled, op)} after {before}; others were shown a value at {skipped[0]}",
                    )
            at[partition] = polled.offset


def _value(sent: Sent) -> str:
    return f"value {sent.value} in {sent.topic}[{sent.partition}]"


def _shown(polled: Polled, op: Op) -> str:
    return (
        f"{op.process} was shown value {polled.value} at {polled.topic}[{polled.partition}]@{polled.offset}"
    )
