"""One behaviour of the hints seam, for the twin in memory and for Redis."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator

import pytest

from rollwire.streams.seams.clock import ManualClock
from rollwire.streams.seams.hints import NOTHING, WIDTH, Hints, Lease, Leased
from rollwire.streams.seams.hints_memory import MemoryHints
from rollwire.streams.seams.hints_redis import CHUNK, RedisHints


@pytest.fixture(params=["memory", pytest.param("redis", marks=pytest.mark.system)])
def hints(request: pytest.FixtureRequest) -> Iterator[Hints]:
    made: Hints
    if request.param == "memory":
        made = MemoryHints()
    else:
        url = request.getfixturevalue("stack").redis_url
        made = RedisHints(url, f"{uuid.uuid4().hex}.", timeout_s=10.0)
    yield made
    made.close()


def names(n: int) -> bytes:
    """n names; bytes that a text would not hold are among them."""
    return b"".join(uuid.uuid4().bytes for _ in range(n))


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline


def test_digests_come_back_in_order(hints: Hints) -> None:
    known, digests, other = names(3), names(3), names(1)
    assert hints.digests(known) == NOTHING * 3
    hints.put_digests(known, digests, 60)
    assert hints.digests(known[:WIDTH] + other + known[WIDTH:]) == digests[:WIDTH] + NOTHING + digests[WIDTH:]
    hints.put_digests(known[:WIDTH], digests[WIDTH : 2 * WIDTH], 60)
    assert hints.digests(known[:WIDTH]) == digests[WIDTH : 2 * WIDTH]
    assert hints.digests(b"") == b""


def test_more_digests_than_one_call_takes(hints: Hints) -> None:
    many, digests = names(CHUNK + 5), names(CHUNK + 5)
    hints.put_digests(many, digests, 60)
    assert hints.digests(many) == digests


def test_digests_are_forgotten(hints: Hints) -> None:
    known = names(1)
    hints.put_digests(known, names(1), 0.05)
    until(lambda: hints.digests(known) == NOTHING)


def test_a_lease_grants_what_is_there_and_no_more(hints: Hints) -> None:
    # So slow that nothing is added while the test runs.
    def ask(spent: float, want: int) -> Leased:
        answers = hints.lease([Lease("k", 1e-6, 10, spent, want)])
        assert answers is not None
        return answers[0]

    assert ask(0, 4) == (4, 0)
    assert ask(2, 3) == (3, 0)
    short = ask(0, 4)
    assert short.granted == 1
    assert short.wait_s == pytest.approx(1e6, rel=0.01)
    debt = ask(5, 4)  # spent without a lease is charged all the same, and paid off first
    assert debt.granted == 0
    assert debt.wait_s == pytest.approx(6e6, rel=0.01)
    both = hints.lease([Lease("k", 1e-6, 10, 0, 1), Lease("other", 1e-6, 3, 0, 9)])
    assert both is not None
    assert [answer.granted for answer in both] == [0, 3]


def test_a_bucket_fills_with_time_up_to_its_burst(hints: Hints) -> None:
    def ask(want: int) -> int:
        answers = hints.lease([Lease("k", 200.0, 10, 0, want)])
        assert answers is not None
        return answers[0].granted

    begun = time.monotonic()
    assert ask(10) == 10
    got = 0

    def asked() -> bool:
        nonlocal got
        got += ask(1)
        return got >= 20

    until(asked)
    assert got <= (time.monotonic() - begun) * 200.0 + 1e-6


def test_the_twin_keeps_time_by_its_clock() -> None:
    clock = ManualClock()
    hints = MemoryHints(clock)
    known = names(1)
    hints.put_digests(known, b"d" * WIDTH, 10)
    clock.advance(9)
    assert hints.digests(known) == b"d" * WIDTH
    clock.advance(1)
    assert hints.digests(known) == NOTHING
    assert hints.lease([Lease("k", 2.0, 10, 10, 1)]) == [(0, 0.5)]
    clock.advance(2)
    assert hints.lease([Lease("k", 2.0, 10, 0, 9)]) == [(4, 0.5)]


def test_c84_silence_is_told_from_absence() -> None:
    away = RedisHints("redis://127.0.0.1:9/0", "p.", timeout_s=0.5)
    assert away.digests(names(1)) is None
    away.put_digests(names(1), names(1), 60)
    assert away.lease([Lease("k", 1.0, 1, 0, 1)]) is None
    begun = time.monotonic()
    for _ in range(1_000):  # while it is away nobody waits for it
        away.digests(names(1))
    assert time.monotonic() - begun < 30
    away.close()
    twin = MemoryHints()
    twin.away = True
    twin.put_digests(names(1), names(1), 60)
    assert twin.digests(names(1)) is None
    assert twin.lease([Lease("k", 1.0, 1, 0, 1)]) is None
