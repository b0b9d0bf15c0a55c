"""Faust's consumer, as the workers use it: what touches aiokafka runs on the thread that fetches."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from faust.types import TP
from mode.threads import QueueServiceThread

from rollwire.streams.monitor.transport import CommittedConsumer


class Fetching(QueueServiceThread):
    """A consumer's thread that keeps where it was moved to, and on which thread."""

    def on_init(self) -> None:
        self.seen: list[tuple[TP, int, int]] = []

    def seek(self, partition: TP, offset: int) -> None:
        """As `AIOKafkaConsumerThread.seek`: at once, on the thread that calls."""
        self.seen.append((partition, offset, threading.get_ident()))


async def moved() -> tuple[list[tuple[TP, int, int]], int]:
    thread = Fetching()
    await thread.start()
    try:
        consumer: Any = CommittedConsumer.__new__(CommittedConsumer)
        consumer._thread = thread
        await consumer._seek(TP("user-feedback", 1), 7)
        assert thread._thread is not None
        return thread.seen, thread._thread.ident or 0
    finally:
        await thread.stop()


def test_c51_a_position_is_moved_on_the_thread_that_fetches() -> None:
    seen, fetching = asyncio.run(asyncio.wait_for(moved(), 30.0))
    assert seen == [(TP("user-feedback", 1), 7, fetching)]
    assert fetching != threading.get_ident()
