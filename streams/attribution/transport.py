"""Faust's consumer with offsets from what was folded, committed only behind what is durable.

Faust's own bookkeeping of acknowledged offsets skips an unfinished one behind a gap, and stops for ever before a gap that a
rebalance left (upstream #606, #596). With one agent that takes each partition in order, the next offset to commit is known exactly.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from faust.types import TP

from rollwire.streams.monitor.transport import CommittedConsumer, CommittedTransport


class FoldedConsumer(CommittedConsumer):
    """Its app has `inputs()`, `next_offset(tp)`, `watermarks()`, `settled`, `flush()` and `on_seek(offsets)`."""

    def ack(self, message: Any) -> bool:
        """Nothing but that the message is no longer in work."""
        if message.acked:
            return False
        message.acked = True
        self._unacked_messages.discard(message)
        self._n_acked += 1
        return True

    async def _add_gap(self, tp: TP, offset_from: int, offset_to: int) -> None:
        """Marks of transactions are no gaps here."""

    def _filter_tps_with_pending_acks(self, topics: Any = None) -> Iterator[TP]:
        app: Any = self.app
        return (tp for tp in app.inputs() if topics is None or tp in topics or tp.topic in topics)

    def _new_offset(self, tp: TP) -> int | None:
        app: Any = self.app
        offset: int | None = app.next_offset(tp)
        return offset

    async def _commit_tps(self, tps: Iterable[TP], start_new_transaction: bool) -> bool:
        app: Any = self.app
        processed = app.watermarks()
        offsets = self._filter_committable_offsets(tps)
        generation = app.consumer_generation_id
        if not await app.flush():
            return False
        before = {tp: self._committed_offset[tp] for tp in offsets}
        done: bool = not offsets or await self._commit_offsets(
            offsets, start_new_transaction=start_new_transaction
        )
        if not done:
            # Faust takes a commit that failed for done, and would not try again before the next event.
            self._committed_offset.update(before)
        if done and app.ready and generation == app.consumer_generation_id:
            app.settled.update(processed)
        return done and bool(offsets)

    async def perform_seek(self) -> None:
        await super().perform_seek()
        app: Any = self.app
        await app.on_seek(dict(self._read_offset))


class FoldedTransport(CommittedTransport):
    Consumer = FoldedConsumer
