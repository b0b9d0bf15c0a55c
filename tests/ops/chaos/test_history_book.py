"""Books of processes: what was written before a kill counts, in the order of time."""

from __future__ import annotations

from pathlib import Path

from rollwire.ops.chaos.history_book import Book, book_file, read_history
from rollwire.ops.chaos.history_check import Assigned, Polled, Sent
from rollwire.streams.seams.log import Record, TopicPartition

A = TopicPartition("a", 0)


def record(value: int, offset: int) -> Record:
    return Record("a", 0, offset, 0, None, b"%d" % value, ())


def test_a_transaction_line_by_line(tmp_path: Path) -> None:
    book = Book(tmp_path, "client.1")
    op = book.begin()
    book.sends(op, 10, A)
    book.sends(op, 11, A, source=7)
    book.commits(op)
    (cut,) = read_history(tmp_path)  # as after a kill -9 right here
    assert (cut.process, cut.kind, cut.outcome, cut.end) == ("client.1", "txn", "info", None)
    assert cut.sends == (Sent(10, "a", 0), Sent(11, "a", 0, 7))
    assert cut.commit is not None
    assert cut.start <= cut.commit
    book.end(op, "ok")
    (done,) = read_history(tmp_path)
    assert done.outcome == "ok"
    assert done.end is not None
    assert done.commit is not None
    assert done.commit <= done.end


def test_books_make_one_history(tmp_path: Path) -> None:
    one, two = Book(tmp_path, "one"), Book(tmp_path, "two")
    first = one.begin()
    two.assigned({A: 3})
    two.polled(one.begin(), [])  # an empty poll is nothing to write down
    two.polled(2**62, [record(10, 4), record(11, 6)])
    one.end(first, "fail")
    history = read_history(tmp_path)
    assert [(op.id, op.process, op.kind) for op in history] == [
        (1, "one", "txn"),
        (2, "two", "assign"),
        (3, "one", "txn"),
        (4, "two", "poll"),
    ]
    assert history[1].assigned == (Assigned("a", 0, 3),)
    assert history[3].polls == (Polled(10, "a", 0, 4), Polled(11, "a", 0, 6))


def test_a_last_line_that_was_cut(tmp_path: Path) -> None:
    book = Book(tmp_path, "client")
    book.begin()
    with book_file(tmp_path, "client").open("ab") as out:
        out.write(b'{"what":"comm')
    (op,) = read_history(tmp_path)
    assert op.commit is None
