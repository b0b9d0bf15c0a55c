"""What tells a transactional writer that a connection failed: librdkafka's own line, whatever else it logs."""

from __future__ import annotations

import logging
import time

import pytest
from confluent_kafka import Producer

from rollwire.streams.seams.rdkafka_logs import ConnectionWatch


def test_a_connection_that_fails() -> None:
    watch = ConnectionWatch()
    producer = Producer(
        {
            "bootstrap.servers": "127.0.0.1:1",
            "debug": "broker",
            "logger": watch,
            "log.connection.close": False,
        }
    )
    deadline = time.monotonic() + 10.0
    while watch.failed is None:
        assert time.monotonic() < deadline, "the failed connection was not told of"
        producer.poll(0.05)
    assert "FAIL" in watch.failed
    assert "127.0.0.1:1" in watch.failed


@pytest.mark.parametrize(
    ("line", "failed"),
    [
        (("%s [%s] %s", "FAIL", "rdkafka#producer-1", "gone"), "FAIL [rdkafka#producer-1] gone"),
        (("FAIL [rdkafka#producer-1] gone: 100%",), "FAIL [rdkafka#producer-1] gone: 100%"),
        (("%s [%s] %s", "WAKEUP", "rdkafka#producer-1", "FAIL"), None),
        (("STATE",), None),
    ],
)
def test_lines(line: tuple[str, ...], failed: str | None) -> None:
    watch = ConnectionWatch()
    watch.log(logging.DEBUG, *line)
    assert watch.failed == failed
