"""One key, one partition, whoever writes: ours, Java's golden values, librdkafka's and the one that Faust uses."""

from __future__ import annotations

import time
from typing import Any

import pytest
from aiokafka.partitioner import murmur2 as aiokafka_murmur2  # type: ignore[import-untyped]
from confluent_kafka import Message, Producer
from hypothesis import given
from hypothesis import strategies as st

from rollwire.schemas.golden import load_examples
from rollwire.schemas.ids import new_group_id
from rollwire.schemas.partitioner import murmur2, partition_for

# org.apache.kafka.common.utils.UtilsTest.testMurmur2, signed 32-bit numbers.
JAVA = {
    b"21": -973932308,
    b"foobar": -790332482,
    b"a-little-bit-long-string": -985981536,
    b"a-little-bit-longer-string": -1486304829,
    b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
    b"abc": 479470107,
}
GOLDEN_EXAMPLE = [0, 1, 0, 1, 5, 13]  # among 1, 2, 3, 4, 8 and 64 partitions
GOLDEN_KEYS = [1, 2, 1, 3, 0, 2, 0, 1, 2, 3, 3, 1, 3, 3, 0, 1]  # among 4
KEYS = [new_group_id(1_767_225_600_000_000 + i * 1_000, i * 0x9E3779B97F4A7C15) for i in range(64)]


@pytest.mark.parametrize(("key", "signed"), JAVA.items())
def test_the_hash_is_javas(key: bytes, signed: int) -> None:
    assert murmur2(key) == signed & 0xFFFFFFFF


def test_golden_partitions_of_golden_keys() -> None:
    """Frozen: a change would move every group to another partition, away from what was written before."""
    key = load_examples("rollouts")[0].key
    assert [partition_for(key, n) for n in (1, 2, 3, 4, 8, 64)] == GOLDEN_EXAMPLE
    assert [partition_for(k.encode(), 4) for k in KEYS[:16]] == GOLDEN_KEYS


@given(key=st.binary(max_size=64))
def test_faust_hashes_alike(key: bytes) -> None:
    assert murmur2(key) == aiokafka_murmur2(key) & 0xFFFFFFFF


def test_librdkafka_sends_keys_to_the_same_partitions() -> None:
    config: dict[str, Any] = {
        "bootstrap.servers": "mock",
        "test.mock.num.brokers": 1,
        "partitioner": "murmur2_random",
        "log_level": 0,
    }
    producer = Producer(config)
    sent: dict[bytes, int] = {}

    def delivered(error: Any, message: Message) -> None:
        assert error is None
        key, partition = message.key(), message.partition()
        assert isinstance(key, bytes)
        assert partition is not None
        sent[key] = partition

    keys = [k.encode() for k in KEYS] + [b"a", b"ab", b"abc", b"abcd", b"\xff\x00\x80" * 7]
    for key in keys:
        producer.produce("keys", value=b"", key=key, on_delivery=delivered)
    deadline = time.monotonic() + 20.0
    while len(sent) < len(set(keys)) and time.monotonic() < deadline:
        producer.poll(0.05)
    count = len(producer.list_topics("keys", timeout=10.0).topics["keys"].partitions)
    assert sent == {key: partition_for(key, count) for key in keys}
    assert len(set(sent.values())) > 1
