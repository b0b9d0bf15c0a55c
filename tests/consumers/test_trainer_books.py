"""The trainer's books against a log that may or may not hold what was in doubt, over any order of events."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rollwire.consumers.trainer.books import AT_MOST, Books, Entry, landed, start
from rollwire.schemas.errors import OffsetLost, PlanViolation
from rollwire.streams.seams.log import TopicPartition

RANKS = [TopicPartition("packed-batches", rank) for rank in range(2)]


def at(*offsets: int) -> dict[TopicPartition, int]:
    return dict(zip(RANKS, offsets, strict=True))


class Keeping(RuleBasedStateMachine):
    """`log` is what transactions really wrote. Whoever keeps the books sees of it what a trainer sees."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[Entry] = []
        self.books: Books = start()
        self.ends = at(0, 0)
        self.resumed = True  # a life that has failed reads the log before it goes on

    @initialize(first=st.tuples(st.integers(0, 5), st.integers(0, 5)))
    def begin(self, first: tuple[int, int]) -> None:
        self.ends = at(*first)
        self._take(Entry(0, {}, self.ends))

    def _take(self, entry: Entry) -> None:
        self.books = self.books.take(entry)
        self.ends = dict(entry.after)

    @precondition(lambda self: self.books.below(AT_MOST) and not self.books.failed)
    @rule(steps=st.tuples(st.integers(1, 3), st.integers(1, 3)))
    def take(self, steps: tuple[int, int]) -> None:
        if self.books.last < 0:  # the first version was lost with its life: it is made again
            self._take(Entry(0, {}, self.ends))
            return
        after = {p: offset + step for (p, offset), step in zip(self.ends.items(), steps, strict=True)}
        self._take(Entry(self.books.last + 1, self.ends, after))

    @precondition(lambda self: self.books.due is not None)
    @rule(outcome=st.sampled_from(["committed", "lost answer", "not written"]))
    def transact(self, outcome: str) -> None:
        entry = self.books.due
        assert entry is not None
        if outcome != "not written":
            self.log.append(entry)
        self.books = self.books.commit(entry.version) if outcome == "committed" else self.books.doubt()

    @precondition(lambda self: self.books.in_doubt)
    @rule()
    def ask_the_log(self) -> None:
        entry = self.books.open[0]
        if entry.version == 0:  # before it there was no position to compare with
            self.books = self.books.settle(landed=bool(self.log))
        else:
            self.books = self.books.settle(landed=landed(entry, self.log[-1].after, group="g"))

    @precondition(lambda self: not self.books.failed)
    @rule()
    def fail(self) -> None:
        self.books = self.books.fail()

    @precondition(lambda self: self.books.failed)
    @rule()
    def start_again(self) -> None:
        if self.log:
            self.ends = dict(self.log[-1].after)
            self.books = self.books.resume(self.log[-1].version, self.ends)
        else:
            self.books = start()

    @precondition(lambda self: self.books.open)
    @rule()
    def nothing_is_out_of_order(self) -> None:
        books = self.books
        later = books.open[-1].version
        with pytest.raises(PlanViolation):
            books.take(Entry(later + 2, self.ends, self.ends))
        if len(books.open) == AT_MOST:
            with pytest.raises(PlanViolation, match="at most 2"):
                books.take(Entry(later + 1, self.ends, self.ends))
            with pytest.raises(PlanViolation, match="not the one whose commit is due"):
                books.commit(later)
        if books.in_doubt:
            with pytest.raises(PlanViolation, match="not the one whose commit is due"):
                books.commit(books.open[0].version)
        with pytest.raises(PlanViolation, match="are open"):
            books.resume(later, self.ends)

    @invariant()
    def every_version_is_committed_once_in_order_from_where_the_last_one_ended(self) -> None:
        assert [entry.version for entry in self.log] == list(range(len(self.log)))
        for one, two in pairwise(self.log):
            assert two.before == one.after

    @invariant()
    def what_is_called_committed_is_in_the_log_and_at_most_one_more_is(self) -> None:
        unknown = len(self.log) - 1 - self.books.committed
        assert unknown in ((0, 1) if self.books.in_doubt or self.books.failed else (0,))

    @invariant()
    def at_most_two_are_open_and_they_join(self) -> None:
        assert len(self.books.open) <= AT_MOST
        numbers = [entry.version for entry in self.books.open]
        assert numbers == list(range(self.books.committed + 1, self.books.committed + 1 + len(numbers)))
        for one, two in pairwise(self.books.open):
            assert two.before == one.after


TestKeeping = Keeping.TestCase
TestKeeping.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_a_group_that_somebody_else_moved_halts() -> None:
    entry = Entry(3, at(4, 4), at(5, 6))
    assert landed(entry, at(5, 6), group="g")
    assert not landed(entry, at(4, 4), group="g")
    with pytest.raises(OffsetLost, match="while version 3"):
        landed(entry, at(5, 4), group="g")


def test_a_step_that_passes_records_over_is_not_taken() -> None:
    books = start().resume(2, at(4, 4))
    with pytest.raises(OffsetLost, match="begins at"):
        books.take(Entry(3, at(5, 4), at(6, 5)))
    assert books.take(Entry(3, at(4, 4), at(6, 5))).due == Entry(3, at(4, 4), at(6, 5))


def test_after_a_failure_nothing_is_taken_until_resumed() -> None:
    books = start().take(Entry(0, {}, at(0, 0))).fail()
    assert books.due is None
    with pytest.raises(PlanViolation, match="resume first"):
        books.take(Entry(0, {}, at(0, 0)))
    with pytest.raises(PlanViolation, match="no transaction"):
        books.doubt()
    with pytest.raises(PlanViolation, match="nothing is in doubt"):
        books.settle(landed=True)
    assert books.resume(0, at(0, 0)).take(Entry(1, at(0, 0), at(1, 1))).last == 1
