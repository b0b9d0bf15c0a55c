"""The history checker: a golden history for each name, legal histories that stay clean, mutations that do not."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rollwire.ops.chaos.history_check import (
    NAMES,
    Assigned,
    Name,
    Op,
    Partition,
    Polled,
    Sent,
    check,
    count,
    failed,
)

A: Final = ("a", 0)
B: Final = ("b", 0)


def txn(
    id: int,
    *values: tuple[int, Partition],
    at: int,
    outcome: str = "ok",
    asked: bool = True,
    process: str = "w",
) -> Op:
    """A transaction from `at` to `at + 9`, its commit asked for at `at + 5`."""
    return Op(
        id=id,
        process=process,
        kind="txn",
        start=at,
        commit=at + 5 if asked else None,
        end=None if outcome == "info" else at + 9,
        outcome=outcome,  # type: ignore[arg-type]
        sends=tuple(Sent(value, *partition) for value, partition in values),
    )


def poll(id: int, *shown: tuple[int, Partition, int], at: int, process: str = "r") -> Op:
    polls = tuple(Polled(value, *partition, offset) for value, partition, offset in shown)
    return Op(id=id, process=process, kind="poll", start=at, end=at + 1, outcome="ok", polls=polls)


def assign(id: int, at: int, *given: tuple[Partition, int | None], process: str = "r") -> Op:
    assigned = tuple(Assigned(*partition, position) for partition, position in given)
    return Op(id=id, process=process, kind="assign", start=at, end=at, outcome="ok", assigned=assigned)


def names(ops: Sequence[Op], read_out: Sequence[Partition] = ()) -> set[Name]:
    return {finding.name for finding in check(ops, read_out)}


def answer(id: int, value: int, *, to: int, at: int, outcome: str = "ok") -> Op:
    one = txn(id, (value, B), at=at, outcome=outcome)
    return msgspec.structs.replace(one, sends=(Sent(value, *B, to),))


class Golden(NamedTuple):
    names: set[Name]
    ops: list[Op]
    read_out: tuple[Partition, ...] = ()
    answered: tuple[str, ...] = ()


GOLDEN: dict[str, Golden] = {
    "lost: the partition was read out": Golden(
        {"lost-write"},
        [txn(1, (10, A), at=0), txn(2, (20, A), at=10), poll(3, (20, A, 2), at=30)],
        (A,),
    ),
    "lost: a later operation's value was shown": Golden(
        {"lost-write"}, [txn(1, (10, A), at=0), txn(2, (20, A), at=10), poll(3, (20, A, 2), at=30)]
    ),
    "lost: a plain send": Golden(
        {"lost-write"},
        [
            Op(id=1, process="w", kind="send", start=0, commit=0, end=1, outcome="ok", sends=(Sent(10, *A),)),
            poll(2, at=5),
        ],
        (A,),
    ),
    "unseen: nobody came there": Golden({"unseen"}, [txn(1, (10, A), at=0), poll(2, at=30)]),
    "unseen: only a concurrent operation's value was shown": Golden(
        {"unseen"}, [txn(1, (10, A), at=0), txn(2, (20, A), at=3, process="v"), poll(3, (20, A, 0), at=30)]
    ),
    "duplicate": Golden({"duplicate"}, [txn(1, (10, A), at=0), poll(2, (10, A, 0), (10, A, 5), at=30)]),
    "aborted read": Golden(
        {"aborted-read"}, [txn(1, (10, A), at=0, outcome="fail"), poll(2, (10, A, 0), at=30)]
    ),
    "aborted read: killed before it asked for its commit": Golden(
        {"aborted-read", "precommitted-read"},
        [txn(1, (10, A), at=0, outcome="info", asked=False), poll(2, (10, A, 0), at=30)],
    ),
    "aborted read: a value that nobody wrote": Golden({"aborted-read"}, [poll(1, (10, A, 0), at=30)]),
    "pre-committed read": Golden(
        {"precommitted-read"}, [txn(1, (10, A), at=0), poll(2, (10, A, 0), at=2), assign(3, 9, (A, 0))]
    ),
    "pre-committed read of its own": Golden(
        {"precommitted-read"},
        [msgspec.structs.replace(txn(1, (10, A), at=0), polls=(Polled(10, *A, 0),))],
    ),
    "torn, of unknown outcome": Golden(
        {"torn"},
        [txn(1, (10, A), (11, B), at=0, outcome="info"), poll(2, (10, A, 0), at=30)],
        (A, B),
    ),
    "torn and acknowledged": Golden(
        {"torn", "lost-write"}, [txn(1, (10, A), (11, B), at=0), poll(2, (10, A, 0), at=30)], (A, B)
    ),
    "skip inside a poll": Golden(
        {"poll-skip"},
        [
            txn(1, (10, A), (11, A), (12, A), at=0),
            poll(2, (10, A, 0), (12, A, 2), at=30),
            poll(3, (11, A, 1), at=30, process="s"),
        ],
    ),
    "skip from the assigned position": Golden(
        {"poll-skip"},
        [
            txn(1, (10, A), (11, A), at=0),
            assign(2, 20, (A, 0)),
            poll(3, (11, A, 1), at=30),
            poll(4, (10, A, 0), (11, A, 1), at=30, process="s"),
        ],
    ),
    "back": Golden(
        {"nonmonotonic-poll"},
        [
            txn(1, (10, A), (11, A), at=0),
            poll(2, (11, A, 1), at=30),
            poll(3, (10, A, 0), at=40),
        ],
    ),
    "standing still": Golden(
        {"nonmonotonic-poll"},
        [txn(1, (10, A), at=0), poll(2, (10, A, 0), at=30), poll(3, (10, A, 0), at=40)],
    ),
    "two values at one place": Golden(
        {"inconsistent-offset"},
        [txn(1, (10, A), (11, A), at=0), poll(2, (10, A, 0), at=30), poll(3, (11, A, 0), at=30, process="s")],
    ),
    "answered twice": Golden(
        {"duplicate"},
        [
            txn(1, (10, A), at=0),
            answer(2, 20, to=10, at=20),
            answer(3, 30, to=10, at=40),
            poll(4, (10, A, 0), (20, B, 0), (30, B, 2), at=60),
        ],
    ),
    "never answered": Golden(
        {"lost-write"}, [txn(1, (10, A), at=0), poll(2, (10, A, 0), at=20)], answered=("a",)
    ),
    "green: answered once, though tried twice": Golden(
        set(),
        [
            txn(1, (10, A), at=0),
            answer(2, 20, to=10, at=20, outcome="fail"),
            answer(3, 30, to=10, at=40),
            poll(4, (10, A, 0), (30, B, 2), at=60),
        ],
        (A, B),
        ("a",),
    ),
    "green: nothing": Golden(set(), []),
    "green: holes of control records and aborted records": Golden(
        set(),
        [
            txn(1, (10, A), at=0),
            txn(2, (20, A), at=10, outcome="fail"),
            txn(3, (30, A), at=20),
            assign(4, 5, (A, 0)),
            poll(5, (10, A, 0), (30, A, 4), at=40),
        ],
        (A,),
    ),
    "green: an unknown outcome that happened": Golden(
        set(),
        [txn(1, (10, A), (11, B), at=0, outcome="info"), poll(2, (10, A, 0), (11, B, 0), at=30)],
        (A, B),
    ),
    "green: an unknown outcome that did not happen": Golden(
        set(), [txn(1, (10, A), (11, B), at=0, outcome="info"), poll(2, at=30)], (A, B)
    ),
    "green: back after an assignment": Golden(
        set(),
        [
            txn(1, (10, A), (11, A), at=0),
            poll(2, (10, A, 0), (11, A, 1), at=30),
            assign(3, 35, (A, 0)),
            poll(4, (10, A, 0), at=40),
        ],
    ),
    "green: forward after a rebalance without a position": Golden(
        set(),
        [
            txn(1, (10, A), (11, A), (12, A), at=0),
            poll(2, (10, A, 0), at=30),
            assign(3, 35, (A, None)),
            poll(4, (12, A, 2), at=40),
            poll(5, (10, A, 0), (11, A, 1), (12, A, 2), at=50, process="s"),
        ],
    ),
    "green: shown between the question for the commit and its answer": Golden(
        set(), [txn(1, (10, A), at=0), poll(2, (10, A, 0), at=5)]
    ),
}


@pytest.mark.parametrize("title", GOLDEN)
def test_golden(title: str) -> None:
    golden = GOLDEN[title]
    found = check(golden.ops, golden.read_out, golden.answered)
    assert {finding.name for finding in found} == golden.names, found
    assert sum(count(found).values()) == len(found)


def test_every_name_has_a_golden_history() -> None:
    assert set().union(*(g.names for g in GOLDEN.values())) == set(NAMES)


def test_a_value_of_two_operations_is_no_history() -> None:
    with pytest.raises(ValueError, match="value 10"):
        check([txn(1, (10, A), at=0), txn(2, (10, A), at=10)])


# A log in miniature that makes legal histories.

PARTITIONS: Final = (("a", 0), ("a", 1), ("b", 0))


class _Open:
    """A transaction as the broker sees it."""

    def __init__(self, op: Op) -> None:
        self.op = op
        self.decided: bool | None = None


class Legal:
    """Runs clients against partitions with offsets, control records, a last stable offset, and deaths."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0
        self.ops: list[Op] = []
        self.log: dict[Partition, list[tuple[int, _Open] | None]] = {p: [] for p in PARTITIONS}
        self.open: dict[str, _Open] = {}
        self.orphans: list[_Open] = []
        self.positions: dict[str, dict[Partition, int]] = {}
        self.value = 0
        for reader in ("r0", "r1"):
            self.assign(reader, dict.fromkeys(PARTITIONS, 0))
        for _ in range(self.random.randint(20, 120)):
            self.random.choice((self.send, self.send, self.end, self.die, self.poll, self.poll, self.again))()
        for writer in list(self.open):
            self.end(writer)
        for orphan in self.orphans:
            self.decide(orphan, orphan.op.commit is not None and self.random.random() < 0.5)
        self.assign("final", dict.fromkeys(PARTITIONS, 0))
        while any(self.positions["final"][p] < len(self.log[p]) for p in PARTITIONS):
            self.poll("final")

    def tick(self) -> int:
        self.now += self.random.randint(1, 3)
        return self.now

    def send(self) -> None:
        writer = self.random.choice(("w0", "w1", "w2"))
        one = self.open.get(writer)
        if one is None:
            blank = Op(id=len(self.ops), process=writer, kind="txn", start=self.tick(), outcome="info")
            self.ops.append(blank)
            one = self.open[writer] = _Open(blank)
        partition = self.random.choice(PARTITIONS)
        self.value += 1
        self.write(one, msgspec.structs.replace(one.op, sends=(*one.op.sends, Sent(self.value, *partition))))
        self.log[partition].append((self.value, one))

    def write(self, one: _Open, op: Op) -> None:
        one.op = self.ops[op.id] = op

    def end(self, writer: str | None = None) -> None:
        if not self.open:
            return
        one = self.open.pop(writer or self.random.choice(sorted(self.open)))
        commits = self.random.random() < 0.8
        if commits:
            self.write(one, msgspec.structs.replace(one.op, commit=self.tick()))
        if commits and self.random.random() < 0.3:
            self.orphans.append(one)  # the answer never comes
            return
        self.decide(one, commits)
        self.write(one, msgspec.structs.replace(one.op, end=self.tick(), outcome="ok" if commits else "fail"))

    def die(self) -> None:
        if self.open and self.random.random() < 0.3:
            self.orphans.append(self.open.pop(self.random.choice(sorted(self.open))))
        elif self.orphans:
            one = self.orphans.pop(self.random.randrange(len(self.orphans)))
            self.decide(one, one.op.commit is not None and self.random.random() < 0.5)

    def decide(self, one: _Open, committed: bool) -> None:
        one.decided = committed
        for partition in sorted({(s.topic, s.partition) for s in one.op.sends}):
            self.log[partition].append(None)

    def poll(self, reader: str | None = None) -> None:
        reader = reader or self.random.choice(("r0", "r1"))
        start, shown = self.tick(), []
        for partition in PARTITIONS:
            for _ in range(self.random.randint(0, 4)):
                at = self.positions[reader][partition]
                if at >= len(self.log[partition]):
                    break
                entry = self.log[partition][at]
                if entry is not None and entry[1].decided is None:
                    break
                self.positions[reader][partition] = at + 1
                if entry is not None and entry[1].decided:
                    shown.append(Polled(entry[0], *partition, at))
        self.add(Op(id=len(self.ops), process=reader, kind="poll", start=start, end=self.tick(), outcome="ok", polls=tuple(shown)))  # fmt: skip

    def again(self) -> None:
        reader = self.random.choice(("r0", "r1"))
        chosen = self.random.sample(PARTITIONS, 2)
        self.assign(reader, {p: self.random.randint(0, self.positions[reader][p]) for p in chosen})

    def assign(self, reader: str, positions: dict[Partition, int]) -> None:
        self.positions[reader] = {**dict.fromkeys(PARTITIONS, 1_000_000), **positions}
        assigned = tuple(Assigned(*p, at) for p, at in positions.items())
        now = self.tick()
        self.add(Op(id=len(self.ops), process=reader, kind="assign", start=now, end=now, outcome="ok", assigned=assigned))  # fmt: skip

    def add(self, op: Op) -> None:
        self.ops.append(op)


seeds = st.integers(0, 2**32 - 1)


@given(seeds)
def test_legal_histories_are_clean(seed: int) -> None:
    assert check(Legal(seed).ops, PARTITIONS) == []


def _polls(ops: list[Op], change: Callable[[Op], tuple[Polled, ...]]) -> list[Op]:
    return [msgspec.structs.replace(op, polls=change(op)) if op.polls else op for op in ops]


def _shown(ops: list[Op], process: str | None = None) -> list[Polled]:
    return [polled for op in ops if process in (None, op.process) for polled in op.polls]


def drop(ops: list[Op], rng: random.Random) -> list[Op] | None:
    """Nobody is shown a value that was acknowledged."""
    values = {s.value for op in ops if op.outcome == "ok" for s in op.sends}
    if not values:
        return None
    gone = rng.choice(sorted(values))
    return _polls(ops, lambda op: tuple(p for p in op.polls if p.value != gone))


def repeat(ops: list[Op], rng: random.Random) -> list[Op] | None:
    """A value comes again, further on in the log."""
    shown = _shown(ops, "final")
    if not shown:
        return None
    one = rng.choice(shown)
    last = ops[-1]
    again = one._replace(offset=1_000_000)
    return [*ops[:-1], msgspec.structs.replace(last, polls=(*last.polls, again))]


def swap(ops: list[Op], rng: random.Random) -> list[Op] | None:
    """A reader is shown two values in the wrong order."""
    pairs = [
        (op.id, i)
        for op in ops
        for i, (one, two) in enumerate(zip(op.polls, op.polls[1:], strict=False))
        if one[1:3] == two[1:3]
    ]
    if not pairs:
        return None
    id, i = rng.choice(pairs)

    def change(op: Op) -> tuple[Polled, ...]:
        p = op.polls
        return (*p[:i], p[i + 1], p[i], *p[i + 2 :]) if op.id == id else p

    return _polls(ops, change)


def show_aborted(ops: list[Op], rng: random.Random) -> list[Op] | None:
    """A reader is shown a value of a transaction that was aborted."""
    values = [s for op in ops if failed(op) for s in op.sends]
    if not values:
        return None
    one = rng.choice(values)
    last = ops[-1]
    shown = Polled(one.value, one.topic, one.partition, 1_000_000)
    return [*ops[:-1], msgspec.structs.replace(last, polls=(*last.polls, shown))]


def skip(ops: list[Op], rng: random.Random) -> list[Op] | None:
    """One reader is not shown what another one was, and goes on behind it."""
    shown = _shown(ops, "final")
    others = {(p.value, p.offset) for p in _shown(ops) if p not in shown} | {
        (p.value, p.offset) for r in ("r0", "r1") for p in _shown(ops, r)
    }
    middle = [
        one
        for one in shown
        if (one.value, one.offset) in others
        and any(two[1:3] == one[1:3] and two.offset > one.offset for two in shown)
    ]
    if not middle:
        return None
    gone = rng.choice(middle)
    return _polls(ops, lambda op: tuple(p for p in op.polls if p != gone or op.process != "final"))


def tear(ops: list[Op], rng: random.Random) -> list[Op] | None:
    """One value of a transaction that happened is never shown."""
    values = {p.value for p in _shown(ops)}
    halves = [s for op in ops if len(op.sends) > 1 for s in op.sends if s.value in values]
    if not halves:
        return None
    gone = rng.choice(halves).value
    return _polls(ops, lambda op: tuple(p for p in op.polls if p.value != gone))


def early(ops: list[Op], rng: random.Random) -> list[Op] | None:
    """The commit was asked for after a reader had already been shown the value."""
    shown = sorted({p.value for p in _shown(ops)})
    if not shown:
        return None
    value = rng.choice(shown)
    writer = next(op for op in ops if any(s.value == value for s in op.sends))
    late = max(op.end or 0 for op in ops) + 1
    moved = msgspec.structs.replace(writer, commit=late, end=late + 1)
    return [moved if op.id == writer.id else op for op in ops]


MUTATIONS: dict[Name, Callable[[list[Op], random.Random], list[Op] | None]] = {
    "lost-write": drop,
    "duplicate": repeat,
    "nonmonotonic-poll": swap,
    "aborted-read": show_aborted,
    "poll-skip": skip,
    "torn": tear,
    "precommitted-read": early,
}


@pytest.mark.parametrize("name", MUTATIONS)
@given(seed=seeds)
def test_each_mutation_is_named(name: Name, seed: int) -> None:
    legal = Legal(seed)
    mutated = MUTATIONS[name](legal.ops, legal.random)
    assume(mutated is not None)
    assert mutated is not None
    assert name in names(mutated, PARTITIONS)


@given(seeds)
def test_a_tail_that_nobody_read_is_unseen(seed: int) -> None:
    legal = Legal(seed)
    acknowledged = [op for op in legal.ops if op.outcome == "ok" and op.sends]
    assume(bool(acknowledged))
    last = max(acknowledged, key=lambda op: op.end or 0)
    values = {s.value for s in last.sends}
    behind = {s.value for op in legal.ops if op.start >= (last.end or 0) for s in op.sends}
    ops = _polls(legal.ops, lambda op: tuple(p for p in op.polls if p.value not in values | behind))
    assert {f.name for f in check(ops) if last.id in f.ops} == {"unseen"}
