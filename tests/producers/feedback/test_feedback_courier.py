"""The core that decides: whatever the gateway answers, every event is settled once, by the gateway's own word."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollwire.producers.feedback.answers import (
    Accepted,
    Answer,
    Closed,
    Later,
    Refusal,
    Split,
    Words,
    read_answer,
)
from rollwire.producers.feedback.courier import RETRY_CAP_S, Courier, backoff_s

CLOCK = datetime(2026, 1, 1, tzinfo=UTC)


def _events(count: int) -> list[bytes]:
    return [b'{"feedback_id":"f%d"}' % number for number in range(count)]


def _words(*words: dict[str, object]) -> bytes:
    return json.dumps({"request_id": "r", "items": words}).encode()


TAKEN = {"status": 200, "feedback_id": "f", "repeated": False}
AGAIN = {"status": 200, "feedback_id": "f", "repeated": True}
BAD = {"status": 400, "code": "unknown_signal", "field": "items[1].signal", "detail": "no such signal"}
SHED = {"status": 503, "code": "overloaded", "field": "", "detail": "later"}


def test_a_word_on_every_event() -> None:
    reading = read_answer(Answer(207, _words(TAKEN, BAD, AGAIN, SHED)), 4, CLOCK)
    assert isinstance(reading, Words)
    taken, bad, again, shed = reading.items
    assert taken == Accepted(repeated=False)
    assert bad == Refusal("unknown_signal", "signal", "no such signal")
    assert again == Accepted(repeated=True)
    assert not isinstance(shed, Accepted | Refusal)


@pytest.mark.parametrize(
    ("status", "body", "count", "kind"),
    [
        (200, _words(TAKEN), 2, Later),  # not a word on each: nothing is believed
        (200, b"<html>welcome to the hotel's network</html>", 1, Later),
        (200, b"", 1, Later),
        (200, b"[" * 100_000, 1, Later),
        (204, b"", 3, Later),
        (302, b"", 1, Closed),
        (400, b'{"code":"malformed","detail":"?"}', 2, Split),
        (400, b'{"code":"malformed","detail":"?"}', 1, Words),
        (401, b'{"code":"key_unknown"}', 1, Closed),
        (403, b"", 2, Closed),
        (404, b"", 2, Closed),
        (408, b"", 2, Later),
        (409, b'{"code":"conflicting_repeat","feedback_id":"f"}', 1, Words),
        (413, b"", 2, Split),
        (413, b"", 1, Words),
        (429, b"", 1, Later),
        (500, b"", 2, Later),
        (503, b"", 1, Later),
        (599, b"\xff", 1, Later),
    ],
)
def test_what_an_answer_means(status: int, body: bytes, count: int, kind: type) -> None:
    assert isinstance(read_answer(Answer(status, body), count, CLOCK), kind)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("7", 7.0),
        ("0", 0.0),
        ("Thu, 01 Jan 2026 00:00:09 GMT", 9.0),
        ("Thu, 01 Jan 2026 00:00:09", 9.0),
        ("Wed, 31 Dec 2025 00:00:00 GMT", 0.0),
        ("99999999", 300.0),
        ("soon", None),
        ("-3", None),
        ("nan", None),
        (None, None),
    ],
)
def test_retry_after(text: str | None, seconds: float | None) -> None:
    reading = read_answer(Answer(503, b"", text), 1, CLOCK)
    assert isinstance(reading, Later)
    assert reading.after_s == seconds


@given(st.integers(1, 10_000), st.floats(0, 1, exclude_max=True))
def test_a_retry_waits_a_share_of_a_bound_that_doubles(failures: int, chance: float) -> None:
    wait = backoff_s(failures, chance)
    assert 0 <= wait <= RETRY_CAP_S
    assert wait == pytest.approx(chance * backoff_s(failures, 1.0))
    assert backoff_s(failures + 1, 1.0) in (2 * backoff_s(failures, 1.0), RETRY_CAP_S)


def test_the_gateways_wish_comes_before_anybodys_hurry() -> None:
    courier = Courier(10)
    courier.load(_events(1))
    courier.post()
    courier.answered(Answer(429, b"", "5"), 100.0, CLOCK, 0.5)
    assert 5.0 < courier.wait_s(100.0) <= 5.2
    courier.hurry()
    assert courier.wait_s(100.0) == 5.0
    courier.post()
    courier.failed("nothing", 105.0, 0.999)
    assert courier.wait_s(105.0) > 0
    courier.hurry()
    assert courier.wait_s(105.0) == 0


def test_one_bad_event_is_found_among_many_and_the_others_pass() -> None:
    """A gateway, or something before it, that refuses whole requests without a word on the events."""
    events = _events(500)
    poison = events[321]
    courier = Courier(500)
    courier.load(events)
    settled: dict[bytes, object] = {}
    requests = 0
    while not courier.idle:
        sent = courier.post()
        requests += 1
        body = b"" if poison in sent else _words(*([TAKEN] * len(sent)))
        outcome = courier.answered(Answer(400 if poison in sent else 200, body), 0.0, CLOCK, 0.0)
        settled |= dict(outcome.settled)
    assert set(settled) == set(events)
    assert [line for line, word in settled.items() if isinstance(word, Refusal)] == [poison]
    assert requests < 60


def test_an_event_that_the_gateway_breaks_on_goes_behind_the_others() -> None:
    events = _events(64)
    poison = events[0]
    courier = Courier(64)
    courier.load(events)
    settled: list[bytes] = []
    behind: list[bytes] = []
    now = 0.0
    while not courier.idle:
        now += courier.wait_s(now)
        sent = courier.post()
        answer = Answer(500, b"") if poison in sent else Answer(200, _words(*([TAKEN] * len(sent))))
        outcome = courier.answered(answer, now, CLOCK, 0.5)
        settled += [line for line, _ in outcome.settled]
        behind += outcome.behind
    assert settled == events[1:]
    assert behind == [poison]
    assert now < 60, "the others waited for it, but not for long"


ANSWERS = st.one_of(
    st.sampled_from([200, 207, 400, 401, 404, 408, 409, 413, 429, 500, 502, 503]).flatmap(
        lambda status: st.sampled_from(
            [b"", b"<html>", b"[]", b'{"code":"x"}', b'{"items":[]}', b'{"items":"x"}']
        ).map(lambda body: Answer(status, body, "1"))
    ),
    st.none(),  # no answer
    st.lists(st.sampled_from([TAKEN, AGAIN, BAD, SHED]), min_size=40, max_size=40),  # a word on each
)


@settings(deadline=None)
@given(st.integers(1, 40), st.lists(ANSWERS, max_size=30), st.floats(0, 0.999))
def test_every_event_is_settled_once_by_a_word_on_it(
    count: int, answers: list[Answer | list[dict[str, object]] | None], chance: float
) -> None:
    """Whatever comes first, a gateway that then works gets everything that has no word yet, and nothing twice."""
    events = _events(count)
    courier = Courier(40)
    courier.load(events)
    now = 0.0
    seen: list[bytes] = []
    script = iter(answers)
    for _ in range(1_000):
        if courier.idle:
            break
        now += courier.wait_s(now)
        sent = courier.post()
        assert sent
        assert not set(sent) & set(seen)
        step = next(script, [TAKEN] * 40)
        if step is None:
            courier.failed("no answer", now, chance)
            continue
        answer = Answer(207, _words(*step[: len(sent)])) if isinstance(step, list) else step
        outcome = courier.answered(answer, now, CLOCK, chance)
        for line, _ in outcome.settled:
            assert line in sent
            seen.append(line)
        courier.load(outcome.behind)
        assert courier.wait_s(now) <= 1 + RETRY_CAP_S
    assert sorted(seen) == sorted(events)


def test_trouble_is_said_and_ends() -> None:
    courier = Courier(10)
    courier.load(_events(2))
    courier.post()
    courier.answered(Answer(401, b'{"code":"key_revoked"}'), 0.0, CLOCK, 0.5)
    assert courier.closed
    assert "401 key_revoked" in courier.trouble
    assert "check the key" in courier.trouble
    courier.post()
    courier.answered(Answer(200, _words(TAKEN, TAKEN)), 0.0, CLOCK + timedelta(seconds=9), 0.5)
    assert (courier.closed, courier.trouble, courier.idle) == (False, "", True)
