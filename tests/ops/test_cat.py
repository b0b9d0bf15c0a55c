"""`rollwire cat` over a log: where it begins, what it lets through, when it ends."""

from __future__ import annotations

import threading

import pytest

from rollwire.ops.cat import Query, cat, parse_where
from rollwire.schemas.catalogue import TOPICS
from rollwire.schemas.errors import ConfigError
from rollwire.schemas.golden import load_examples
from rollwire.streams.seams.log import Outgoing
from rollwire.streams.seams.log_memory import MemoryLog


@pytest.fixture
def log() -> MemoryLog:
    """Four rewards of one key, two of them scored, with a poison record in their middle."""
    memory = MemoryLog({name: spec.partitions for name, spec in TOPICS.items()})
    rewards = [Outgoing("rewards", e.key, e.value, e.headers) for e in load_examples("rewards")]
    poison = Outgoing("rewards", rewards[0].key, b"hello")
    memory.writer().write([*rewards, poison, *rewards])
    return memory


def offsets(log: MemoryLog, query: Query) -> list[int]:
    return [shown["offset"] for shown in cat(log, query, threading.Event())]


PARTITION = 1  # of the examples' key


def test_everything_is_shown_the_poison_too(log: MemoryLog) -> None:
    shown = list(cat(log, Query("rewards"), threading.Event()))
    assert [s["partition"] for s in shown] == [PARTITION] * 5
    assert [s.get("refused", {}).get("reason") for s in shown] == [None, None, "not_framed", None, None]


def test_begin_and_end(log: MemoryLog) -> None:
    assert offsets(log, Query("rewards", start="3")) == [3, 4]
    assert offsets(log, Query("rewards", start="-2")) == [3, 4]
    assert offsets(log, Query("rewards", start="-99")) == [0, 1, 2, 3, 4]
    assert offsets(log, Query("rewards", start="99")) == []
    assert offsets(log, Query("rewards", start="end")) == []
    assert offsets(log, Query("rewards", limit=2)) == [0, 1]
    assert offsets(log, Query("rewards", partition=PARTITION)) == [0, 1, 2, 3, 4]
    assert offsets(log, Query("rewards", partition=0)) == []


def test_filters_by_field_position_and_key(log: MemoryLog) -> None:
    assert offsets(log, Query("rewards", where=parse_where(("outcome=right",)))) == [1, 4]
    assert offsets(log, Query("rewards", where=parse_where(("reward=null",)))) == [0, 3]
    assert offsets(log, Query("rewards", where=parse_where(("reward=null", "offset=3")))) == [3]
    assert offsets(log, Query("rewards", where=parse_where(("refused.reason=not_framed",)))) == [2]
    key = load_examples("rewards")[0].key.decode()
    assert offsets(log, Query("rewards", key=key)) == [0, 1, 2, 3, 4]
    assert offsets(log, Query("rewards", key="other")) == []


def test_following_gives_what_is_written_later_and_ends_when_told(log: MemoryLog) -> None:
    stop = threading.Event()
    found = cat(log, Query("rewards", start="end", follow=True), stop)
    first: list[int] = []

    def read() -> None:
        first.extend(shown["offset"] for shown in found)

    reader = threading.Thread(target=read)
    reader.start()
    deadline = threading.Event()
    example = load_examples("rewards")[0]
    while not first and not deadline.wait(
        0.05
    ):  # the reader may not be at the end yet: write until it sees one
        log.writer().write([Outgoing("rewards", example.key, example.value, example.headers)])
        assert len(first) < 1_000
    stop.set()
    reader.join(timeout=10.0)
    assert not reader.is_alive()
    assert first[0] >= 5
    assert first == list(range(first[0], first[0] + len(first)))


@pytest.mark.parametrize(
    ("query", "message"),
    [
        (Query("reward"), "did you mean 'rewards'"),
        (Query("xyz"), "there are dead-letters"),
        (Query("rewards", partition=4), "partitions 0 to 3"),
        (Query("rewards", start="yesterday"), "neither beginning, end"),
    ],
)
def test_what_cannot_be_is_said(log: MemoryLog, query: Query, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        list(cat(log, query, threading.Event()))


@pytest.mark.parametrize("term", ["outcome", "=right", ""])
def test_a_filter_has_a_field_and_a_value(term: str) -> None:
    with pytest.raises(ConfigError, match="field=value"):
        parse_where((term,))
    assert parse_where(("a=b=c",)) == (("a", "b=c"),)
