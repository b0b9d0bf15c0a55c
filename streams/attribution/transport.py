"""Faust's consumer, with offsets that are known from what was folded, and committed only behind what is durable.

What Faust does by itself and is not relied on
    acknowledged offsets   one that is unfinished is skipped behind a gap; a gap that a rebalance left stops commits for ever
                           (upstream #606, #596)
    after a rebalance      flow is resumed after seeking, and that drops what was delivered in between, for good
One agent takes each partition in order, so the next offset is known. Each message says what it follows, so that the agent sees
where one is missing, and has the consumer seek back.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

from faust.types import TP

from rollwire.streams.monitor.transport import CommittedConsumer, CommittedTransport


class _NoOffsets(defaultdict[TP, "int | None"]):
    """What Faust delivered last, by partition: it may set it, and never sees it. It would drop what is delivered again."""

    def __getitem__(self, tp: TP) -> int | None:
        return None


class FoldedConsumer(CommittedConsumer):
    """Its app has `inputs()`, `next_offset(tp)`, `watermarks()`, `settled`, `flush()` and `on_seek(offsets)`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._read_offset = _NoOffsets()
        self._fetched: dict[TP, int] = {}

    def _to_message(self, tp: TP, record: Any) -> Any:
        """A message with `follows`: no record stands from there to itself; None = not known."""
        message: Any = super()._to_message(tp, record)
        message.follows = self._fetched.get(tp)
        self._fetched[tp] = record.offset + 1
        return message

    def stop_flow(self) -> None:
        """What was fetched may be left lying."""
        self._fetched.clear()
        super().stop_flow()

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
        self._fetched.clear()
        await super().perform_seek()
        self._fetched.clear()
        app: Any = self.app
        await app.on_seek(dict(self._read_offset.items()))


class FoldedTransport(CommittedTransport):
    Consumer = FoldedConsumer
