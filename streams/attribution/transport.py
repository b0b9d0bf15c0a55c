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
    """Its app has `inputs()`, `next_offset(tp)`, `flush()` and `on_seek(offsets)`."""

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
        offsets = self._filter_committable_offsets(tps)
        if not await app.flush() or not offsets:
            return False
        done: bool = await self._commit_offsets(offsets, start_new_transaction=start_new_transaction)
        return done

    async def perform_seek(self) -> None:
        await super().perform_seek()
        app: Any = self.app
        await app.on_seek(dict(self._read_offset))


class FoldedTransport(CommittedTransport):
    Consumer = FoldedConsumer
