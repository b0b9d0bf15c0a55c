"""One behaviour of the cache seam, for the twin in memory and for Redis."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator

import pytest
import redis

from rollwire.ops.stack import StackInfo
from rollwire.streams.seams.cache import Cache
from rollwire.streams.seams.cache_memory import MemoryCache
from rollwire.streams.seams.cache_redis import RedisCache
from rollwire.streams.seams.clock import ManualClock


@pytest.fixture(params=["memory", pytest.param("redis", marks=pytest.mark.system)])
def cache(request: pytest.FixtureRequest) -> Iterator[Cache]:
    made: Cache = (
        MemoryCache() if request.param == "memory" else RedisCache(request.getfixturevalue("stack").redis_url)
    )
    yield made
    made.close()


@pytest.fixture
def own() -> str:
    """Keys that no other test has; with the characters that a pattern would take for its own."""
    return f"[{uuid.uuid4().hex}]*?\\"


def test_values_come_back(cache: Cache, own: str) -> None:
    assert cache.get(own) is None
    cache.set(own, b"\x00\xff")
    assert cache.get(own) == b"\x00\xff"
    cache.set(own, b"")
    assert cache.get(own) == b""


def test_many_values_by_prefix(cache: Cache, own: str) -> None:
    cache.set_many({})
    cache.set_many({f"{own}{i}": b"%d" % i for i in range(3)})
    cache.set(own[:-3], b"not below the prefix")
    assert cache.get_prefix(own) == {f"{own}{i}": b"%d" % i for i in range(3)}
    assert cache.get_prefix(own + "none") == {}


def test_values_expire(cache: Cache, own: str) -> None:
    cache.set(own, b"v", ttl_s=0.05)
    deadline = time.monotonic() + 5
    while cache.get(own) is not None:
        assert time.monotonic() < deadline
    assert cache.get_prefix(own) == {}


def test_the_twin_expires_by_its_clock() -> None:
    clock = ManualClock()
    cache = MemoryCache(clock)
    cache.set("k", b"v", ttl_s=10)
    clock.advance(9)
    assert cache.get("k") == b"v"
    clock.advance(1)
    assert cache.get("k") is None


def test_a_redis_that_is_away_costs_nothing_but_the_look() -> None:
    cache = RedisCache("redis://127.0.0.1:9/0")
    cache.set("k", b"v")
    cache.set_many({"k": b"v"})
    assert cache.get("k") is None
    assert cache.get_prefix("") == {}
    cache.close()


def test_what_holds_a_text_is_purged_wherever_it_stands(cache: Cache, own: str) -> None:
    person = uuid.uuid4().hex
    cache.set_many(
        {f"{own}1": b"x" * 5_000 + person.encode(), f"{own}{person}": b"", f"{own}2": person[:-1].encode()}
    )
    assert cache.purge(person) == 2
    assert cache.get_prefix(own) == {f"{own}2": person[:-1].encode()}
    assert cache.purge(person) == 0


@pytest.mark.system
def test_redis_purges_values_of_every_type_and_says_when_it_is_away(stack: StackInfo, own: str) -> None:
    person = uuid.uuid4().hex
    client = redis.Redis.from_url(stack.redis_url)
    client.hset(f"{own}h", "field", person)
    client.sadd(f"{own}s", "a", person)
    client.zadd(f"{own}z", {person: 1.0})
    client.rpush(f"{own}l", "a", person)
    client.xadd(f"{own}x", {"field": person})
    client.rpush(f"{own}other", "a")
    cache = RedisCache(stack.redis_url)
    assert cache.purge(person) == 5
    assert client.exists(f"{own}other") == 1
    cache.close()
    client.close()
    assert RedisCache("redis://127.0.0.1:1").purge(person) is None
