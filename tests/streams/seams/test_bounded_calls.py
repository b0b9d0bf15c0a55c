"""Calls of the client that may never come back."""

from __future__ import annotations

import threading
import time
from functools import partial

import pytest

from rollwire.schemas.errors import DeadlineExceeded, Fenced, LogUnavailable
from rollwire.streams.seams.log_kafka import KafkaLog
from rollwire.streams.seams.log_kafka_write import bounded


def test_a_call_that_never_returns_is_given_up() -> None:
    never = threading.Event()
    began = time.monotonic()
    with pytest.raises(DeadlineExceeded, match="did not come back"):
        bounded(partial(_wait, never), 0.1)
    assert time.monotonic() - began < 5
    never.set()


def _wait(event: threading.Event) -> None:
    event.wait(60)


def test_what_a_call_raises_is_raised() -> None:
    def call() -> None:
        raise Fenced("taken over")

    with pytest.raises(Fenced, match="taken over"):
        bounded(call, 1)


def test_a_call_that_returns_returns() -> None:
    done: list[int] = []
    bounded(partial(done.append, 1), 1)
    assert done == [1]


def test_no_broker_is_told_at_the_deadline() -> None:
    began = time.monotonic()
    with pytest.raises(LogUnavailable, match="is the broker up"):
        KafkaLog("127.0.0.1:9").transactional_writer("id", 0.5)
    assert time.monotonic() - began < 5
