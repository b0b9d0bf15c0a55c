"""Quotas in leased blocks, and repeats as a hint (C84)."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from rollwire.producers.gateway.access import Caller, FeedbackKey
from rollwire.producers.gateway.quotas import Account, LeasedQuotas, QuotasConfig
from rollwire.producers.gateway.repeats import CachedRepeats, RepeatsConfig
from rollwire.streams.seams.clock import ManualClock, SystemClock
from rollwire.streams.seams.hints import WIDTH, Hints, Leased
from rollwire.streams.seams.hints_memory import MemoryHints
from rollwire.streams.seams.hints_redis import RedisHints

A, B, C = ("acme", "a"), ("acme", "b"), ("other", "a")
ONE, TWO = b"1" * WIDTH, b"2" * WIDTH


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


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline


def remembering(hints: Hints, config: RepeatsConfig | None = None) -> closing[CachedRepeats]:
    return closing(CachedRepeats(hints, config or RepeatsConfig()))


def caller(rate: float, burst: int) -> Caller:
    return Caller("k", "acme", frozenset(("feedback:write",)), rate, burst)


def test_two_gateways_share_one_quota(hints: Hints) -> None:
    who = caller(1e-3, 100)
    config = QuotasConfig(block_s=10)
    with (
        closing(LeasedQuotas(hints, config, SystemClock())) as one,
        closing(LeasedQuotas(hints, config, SystemClock())) as two,
    ):
        passed = 0

        def spend() -> bool:
            nonlocal passed
            waits = [quotas.take(who, 1, time.monotonic()) for quotas in (one, two)]
            passed += waits.count(None)
            return all(wait is not None and wait > 1 for wait in waits)

        until(spend)
        # Each may run ahead by a burst while its first answer is on the way; no more ever after.
        assert 100 <= passed <= 300
        assert one.shared
        before = passed
        for _ in range(100):
            spend()
        assert passed == before


def test_a_quota_is_exact_over_time(hints: Hints) -> None:
    who = caller(200.0, 20)
    with closing(LeasedQuotas(hints, QuotasConfig(), SystemClock())) as quotas:
        begun, passed = time.monotonic(), 0
        while time.monotonic() - begun < 0.5:
            passed += quotas.take(who, 1, time.monotonic()) is None
        # Its burst, what ran ahead for a round trip (paid back later), and its rate.
        assert 20 <= passed <= (time.monotonic() - begun) * 200 + 40


def test_what_ran_ahead_is_paid_back() -> None:
    account = Account(rate=10, burst=20, block=2)
    assert account.take(1, 0.0) is None
    assert account.take(19, 0.0) is None
    assert account.take(1, 0.0) is not None  # a burst ahead is the most
    lease = account.tell("k")
    assert (lease.spent, lease.want) == (20, 2)
    account.answered(Leased(0, 0.5), 1.0)
    assert account.take(1, 1.2) == pytest.approx(0.3)
    assert account.take(1, 1.5) is None
    assert account.tell("k").spent == 1
    account.answered(Leased(2, 0.0), 1.6)
    assert (account.held, account.wants) == (2, False)
    assert account.take(2, 1.6) is None
    assert (account.held, account.debt, account.wants) == (0, 0, True)


def test_a_batch_larger_than_the_burst_passes_and_is_paid_off() -> None:
    account = Account(rate=10, burst=20, block=2)
    assert account.take(500, 0.0) is None
    assert account.take(1, 0.0) is not None
    assert account.tell("k").spent == 500
    account.answered(Leased(0, 48.1), 0.0)
    assert account.take(1, 0.0) == pytest.approx(48.1)


def test_c84_quotas_without_redis_are_counted_by_each_gateway() -> None:
    hints, who = MemoryHints(), caller(1e-3, 50)
    hints.away = True
    with closing(LeasedQuotas(hints, QuotasConfig(probe_s=0.01), SystemClock())) as quotas:
        quotas.take(who, 1, time.monotonic())
        until(lambda: not quotas.shared)
        now_s = time.monotonic()
        assert sum(quotas.take(who, 1, now_s) is None for _ in range(200)) == 50
        hints.away = False
        until(lambda: quotas.shared)
        assert quotas.take(who, 1, time.monotonic()) is None


def test_a_key_whose_quota_changed_counts_anew() -> None:
    with closing(LeasedQuotas(MemoryHints(), QuotasConfig(), SystemClock())) as quotas:
        until(lambda: quotas.take(caller(1e-3, 5), 1, time.monotonic()) is not None)
        assert quotas.take(caller(1e6, 5_000), 1, time.monotonic()) is None


def test_c84_repeats_are_known_to_every_gateway(hints: Hints) -> None:
    with remembering(hints) as one, remembering(hints) as two:
        assert one.known([A, B, C]) == {}
        one.remember({A: ONE, B: TWO})
        one.remember({})
        assert one.known([A, B, C]) == {A: ONE, B: TWO}  # C: the same id of another tenant
        until(lambda: two.known([A, B, C]) == {A: ONE, B: TWO})
        assert two.known([]) == {}


def test_what_was_remembered_is_told_before_the_end() -> None:
    hints = MemoryHints()
    keys = [("acme", str(number)) for number in range(5_000)]
    with remembering(hints) as one:
        for key in keys:
            one.remember({key: ONE})
    with remembering(hints) as two:
        assert two.known(keys) == dict.fromkeys(keys, ONE)


def test_c84_a_redis_that_is_away_is_never_a_repeat() -> None:
    hints = MemoryHints()
    with remembering(hints) as repeats, remembering(hints) as fresh:
        repeats.remember({A: ONE})
        until(lambda: fresh.known([A]) == {A: ONE})
        hints.away = True
        assert fresh.known([A, B]) == {}
        assert repeats.known([A, B]) == {A: ONE}  # what this process acknowledged itself
        repeats.remember({B: TWO})
        assert repeats.known([A, B]) == {A: ONE, B: TWO}


def test_c84_a_repeat_after_its_time_is_a_first_attempt_again() -> None:
    clock = ManualClock()
    hints = MemoryHints(clock)
    with remembering(hints, RepeatsConfig(size=0, ttl_s=3_600)) as repeats:
        repeats.remember({A: ONE})
        until(lambda: repeats.known([A]) == {A: ONE})
        clock.advance(3_599)
        assert repeats.known([A]) == {A: ONE}
        clock.advance(2)
        assert repeats.known([A]) == {}
        assert (
            repeats.known([A]) == {}
        )  # asked twice, with no acknowledgement in between: nothing was claimed
        repeats.remember({A: TWO})
        until(lambda: repeats.known([A]) == {A: TWO})


def test_a_digest_of_another_width_is_refused() -> None:
    keys: list[FeedbackKey] = [A]
    with remembering(MemoryHints()) as repeats, pytest.raises(ValueError, match="16 bytes"):
        repeats.remember(dict.fromkeys(keys, b"short"))
