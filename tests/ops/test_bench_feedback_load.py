"""The load generator: it is honest about a server that stands still, and asks again with the same ids."""

from __future__ import annotations

import pytest

from rollwire.ops.bench.feedback.bodies import SIGNALS, Bodies
from rollwire.ops.bench.feedback.generator import Plan, Rate
from rollwire.ops.bench.feedback.http import parse_answer, request
from rollwire.ops.bench.feedback.latency import merged, percentile_ms
from rollwire.ops.bench.feedback.senders import Senders, send
from rollwire.ops.bench.feedback.stub_server import StubServer, self_test
from rollwire.schemas.errors import LogError
from rollwire.schemas.ids import opened_us, parse_rollout_id
from rollwire.schemas.partitioner import partition_for

AT_US = 1_790_000_000_000_000


def test_an_answer_is_taken_when_it_is_whole_and_the_next_one_stays() -> None:
    whole = b"HTTP/1.1 429 Too Many\r\nRetry-After: 2\r\nContent-Length: 4\r\n\r\nbody"
    for cut in range(len(whole)):
        assert parse_answer(whole[:cut]) is None
    found = parse_answer(whole + b"HTTP/1.1 2")
    assert found is not None
    answer, end = found
    assert (answer.status, answer.body, answer.retry_after_s, answer.closes) == (429, b"body", 2.0, False)
    assert end == len(whole)
    empty = parse_answer(b"HTTP/1.1 204 No Content\r\nconnection: close\r\n\r\n")
    assert empty is not None
    assert empty[0] == (204, b"", None, True)


@pytest.mark.parametrize("bad", [b"HTTP/1.1 200 OK\r\n\r\n", b"HTTP/2 200\r\n\r\n", b"nonsense\r\n\r\n"])
def test_what_states_no_length_ends_the_run(bad: bytes) -> None:
    with pytest.raises(LogError):
        parse_answer(bad)


def test_a_request_states_the_length_of_its_body() -> None:
    made = request("POST", "/v1/feedback", "h:1", b"abc", (("authorization", "Bearer x"),))
    assert made == (
        b"POST /v1/feedback HTTP/1.1\r\nhost: h:1\r\nauthorization: Bearer x\r\ncontent-length: 3\r\n\r\nabc"
    )


def test_events_have_ids_of_their_own_and_rollouts_in_all_partitions() -> None:
    one, other = Bodies("a", AT_US), Bodies("b", AT_US)
    lines = one.lines(6, 4).split(b"\n")
    assert len(lines) == 4
    assert one.lines(8, 1) == lines[2]
    assert f'"feedback_id":"{one.ids(8, 1)[0]}"'.encode() in lines[2]
    assert one.rollout(8 // SIGNALS).encode() in lines[2]
    groups = [one.group(number) for number in range(200)] + [other.group(number) for number in range(200)]
    assert len(set(groups)) == 400
    assert parse_rollout_id(one.rollout(3)) == (groups[3], 0)
    assert opened_us(groups[0]) == AT_US
    assert {partition_for(group.encode(), 4) for group in groups} == {0, 1, 2, 3}


def test_a_server_that_stands_still_shows_in_every_ask_of_that_time() -> None:
    seen = self_test(rate=500.0, seconds=2.0, stopped_s=1.0, connections=16)
    assert seen.honest
    # A closed loop over 16 connections would have seen 16 slow asks.
    assert seen.slow > 300
    assert seen.outcome.late > 300
    assert len(seen.outcome.accepted) == seen.outcome.asked == 1_000
    assert seen.outcome.tries == 1_000


def test_what_was_not_answered_is_asked_again_under_the_same_ids_until_it_is_given_up() -> None:
    with StubServer() as server:
        plan = Plan(
            "127.0.0.1", server.port, "/", (), 4, (Rate(50.0, 1.0),), Bodies("a", AT_US),
            answer_s=0.3, patience_s=30.0,
        )  # fmt: skip
        with Senders([plan]) as senders:
            server.stop()
            try:
                senders.go()
                assert not senders.wait(1.0)
            finally:
                server.go_on()
            (outcome,) = senders.outcomes()
    assert outcome.unknown > 0
    assert outcome.asked == 50
    assert outcome.tries > 50
    assert sorted(outcome.accepted) == list(range(50))
    assert outcome.given_up == outcome.refused == 0
    assert percentile_ms(merged([outcome.histogram]), 99) > 300


def test_a_closed_loop_finds_more_than_one_connection_can() -> None:
    with StubServer() as server:
        plans = [
            Plan("127.0.0.1", server.port, "/", (), count, (Rate(0, 0.5),), Bodies("a", AT_US), batch=5)
            for count in (1, 8)
        ]
        one, eight = (send([plan])[0] for plan in plans)
    assert one.per_s > 0
    assert eight.per_s > 0
    assert sorted(eight.accepted) == list(range(0, 5 * eight.asked, 5))
    histogram = merged([one.histogram, eight.histogram])
    assert histogram.get_total_count() == one.asked + eight.asked
