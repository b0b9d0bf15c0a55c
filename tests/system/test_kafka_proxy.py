"""The proxy between a real client and the real broker: clients stay behind it; it delays, holds answers and cuts."""

from __future__ import annotations

import threading
import time

import pytest

from rollwire.ops.chaos.proxy import END_TXN, KafkaProxy, Side, error_code
from rollwire.ops.stack import StackInfo
from rollwire.schemas.errors import DeadlineExceeded, LogUnavailable, StackError
from rollwire.streams.seams.log import Outgoing
from rollwire.streams.seams.log_kafka import KafkaLog
from rollwire.streams.seams.scan import scan

pytestmark = pytest.mark.system


def proxy_of(stack: StackInfo) -> KafkaProxy:
    assert stack.proxy_port is not None
    assert stack.proxied_port is not None
    return KafkaProxy(stack.proxy_port, stack.proxied_port)


def values(log: KafkaLog) -> list[bytes | None]:
    return [record.value for record in scan(log, ["notices"])]


def note(text: bytes) -> Outgoing:
    return Outgoing("notices", b"key", text)


def test_a_client_stays_behind_the_proxy(stack: StackInfo, prefix: str) -> None:
    with proxy_of(stack) as proxy:
        log = KafkaLog(proxy.bootstrap, prefix, patience_s=1.0)
        writer = log.writer()
        writer.write([note(b"one")])
        assert proxy.cut_all() >= 1
        writer.write([note(b"two")])  # over a new connection
        assert values(log) == [b"one", b"two"]
        proxy.delay_s = 0.3
        began = time.monotonic()
        writer.write([note(b"three")])
        assert time.monotonic() - began >= 0.3
        writer.close()
    with pytest.raises(LogUnavailable):
        log.transactional_writer("proxy.gone", 1.0)  # no proxy, no way around it
    direct = KafkaLog(stack.bootstrap, prefix)
    assert values(direct) == [b"one", b"two", b"three"]
    direct.close()


def test_a_held_answer(stack: StackInfo, prefix: str) -> None:
    """The broker has done what it was asked; the client learns of it when the answer is let go."""
    with proxy_of(stack) as proxy:
        log = KafkaLog(proxy.bootstrap, prefix)
        writer = log.transactional_writer("proxy.answer")
        hold = proxy.hold_end_txn("proxy.answer", Side.RESPONSE)
        writer.begin()
        writer.write([note(b"one")])
        done = threading.Event()

        def commit() -> None:
            writer.commit("", {}, 20.0)
            done.set()

        thread = threading.Thread(target=commit)
        thread.start()
        request = hold.wait(10.0)
        assert request.api_key == END_TXN
        assert values(KafkaLog(stack.bootstrap, prefix)) == [b"one"]
        assert not done.is_set()
        assert error_code(hold.release(), request.api_version) == 0
        assert done.wait(10.0)
        thread.join()
        writer.close()


def test_a_rule_that_catches_nothing(stack: StackInfo) -> None:
    with proxy_of(stack) as proxy:
        hold = proxy.hold_end_txn("nobody")
        with pytest.raises(DeadlineExceeded):
            hold.wait(0.01)
        with pytest.raises(DeadlineExceeded):
            hold.release()
        hold.cancel()
        with pytest.raises(StackError, match="cannot listen"), proxy_of(stack):
            pass
