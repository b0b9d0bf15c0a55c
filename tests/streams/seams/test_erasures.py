"""Who keeps copies of data keys forgets the destroyed ones when the log says so."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing

import pytest

from rollwire.schemas.errors import Erased, LogUnavailable
from rollwire.schemas.records import Erasure
from rollwire.streams.emit import outgoing
from rollwire.streams.seams.erasures import TOPIC, ErasureFollower
from rollwire.streams.seams.keys_cached import CachedKeys
from rollwire.streams.seams.keys_memory import MemoryKeys
from rollwire.streams.seams.log import Log, Outgoing, Reader
from rollwire.streams.seams.log_kafka import KafkaLog
from rollwire.streams.seams.log_memory import MemoryLog

ADA, BOB = "a" * 32, "b" * 32


@pytest.fixture(params=["memory", pytest.param("kafka", marks=pytest.mark.system)])
def log(request: pytest.FixtureRequest) -> Iterator[Log]:
    if request.param == "memory":
        yield MemoryLog({TOPIC: 1})
        return
    stack, prefix = request.getfixturevalue("stack"), request.getfixturevalue("prefix")
    with closing(KafkaLog(stack.bootstrap, prefix=prefix, client_id="test")) as live:
        yield live


def said(subject: str) -> Outgoing:
    event = Erasure(
        subject=subject, request_id="r1", generations=1, reason="", by="ann", erased_us=1_767_225_600_000_000
    )
    return outgoing(event, source="test", time_us=event.erased_us)


def test_a_cache_forgets_when_the_event_comes_and_not_for_others(log: Log) -> None:
    inner, heard = MemoryKeys(), threading.Semaphore(0)
    keys = CachedKeys(inner, ttl_s=3600)

    def forget(subject: str) -> None:
        keys.forget(subject)
        heard.release()

    writer = log.writer()
    writer.write([said(BOB)])  # before anything is kept: not heard
    follower = ErasureFollower(log, forget)
    ada, bob = keys.data_key(ADA), keys.data_key(BOB)
    inner.destroy(ADA)
    inner.destroy(BOB)
    assert keys.key_of(ADA, 1) == ada.key
    # Something that is no event does not end the following.
    writer.write([Outgoing(TOPIC, ADA.encode(), b"nonsense")])
    writer.write([said(ADA)])
    assert heard.acquire(timeout=60)
    with pytest.raises(Erased):
        keys.key_of(ADA, 1)
    assert keys.key_of(BOB, 1) == bob.key
    follower.close(60)
    writer.close()


def test_a_log_that_was_away_is_read_on_from_where_it_was_left() -> None:
    class Away(MemoryLog):
        times = 2

        def reader(self) -> Reader:
            self.times -= 1
            if self.times >= 0:
                raise LogUnavailable("away")
            return super().reader()

    log, heard = Away({TOPIC: 1}), threading.Semaphore(0)
    follower = ErasureFollower(log, lambda _: heard.release())
    log.writer().write([said(ADA)])
    assert heard.acquire(timeout=60)
    follower.close(60)
