"""The Faust app of attribution: one agent over both topics, one table, a timer that closes windows, tables over HTTP.

At least once, with effects that do not depend on how often: `fold` decides from the log alone, entries of the table are
written under keys of their own, outputs have ids and bytes that follow from the log. `concurrency=1`: with more, faust may
commit past unfinished events, and a partition's records would be judged out of order.
"""

from __future__ import annotations

import asyncio
import faulthandler
import sys
import time
from collections.abc import Mapping
from typing import Any, Final

import faust
import structlog
from faust.types import TP

from rollwire.schemas.errors import LogError, Refused, RollwireError
from rollwire.schemas.records import Feedback, ProductionRollout
from rollwire.streams.attribution.book import Book
from rollwire.streams.attribution.config import GROUP, AttributionConfig
from rollwire.streams.attribution.fold import Refusal
from rollwire.streams.attribution.intake import opened
from rollwire.streams.attribution.letters import FEEDBACK, letters_of, refused_letter
from rollwire.streams.attribution.look import Look
from rollwire.streams.attribution.outbox import Outbox
from rollwire.streams.attribution.progress import Input, Progress
from rollwire.streams.attribution.rulebook import Rulebook
from rollwire.streams.attribution.table import WindowTable, window_table
from rollwire.streams.attribution.transport import FoldedTransport
from rollwire.streams.monitor.bounded import STOP_S
from rollwire.streams.seams.clock import Clock
from rollwire.streams.seams.log import Log, Record

ROLLOUTS: Final = "production-rollouts"
TOPICS: Final = (FEEDBACK, ROLLOUTS)

_AT_ONCE: Final = 2_000  # windows closed between two looks at the event loop
_REREAD_S: Final = 3.0  # how long what was fetched before going back may still come
_PATIENCE_S: Final = 60.0  # for the rules, once a table is restored
_AGAIN_S: Final = 0.5
_logger = structlog.get_logger("rollwire.attribution")


class AttributionApp(faust.App):
    """Set up by `make_app`."""

    book: Book
    progress: Progress
    outbox: Outbox
    look: Look
    table: WindowTable
    prefix: str
    flushing: asyncio.Lock
    missed: dict[
        Input, float
    ]  # the consumer went back for what is missing; until when what comes may be older
    settled: dict[int, int]  # by partition: everything before this time is processed, durable and committed
    rollouts_skipped = 0  # rollouts that did not decode: `assemble` refuses them
    revoked = 0  # how often partitions were taken away
    loaded = False  # the table was restored for what is assigned
    ready = False  # and reading goes on from what was committed

    def _new_transport(self) -> Any:
        return FoldedTransport(self.conf.broker_consumer, self)

    def _create_directories(self) -> None:
        """The table is in memory: no folders in whatever directory this was started from."""

    async def crash(self, reason: BaseException) -> None:
        """Ends the process: Faust stands still after a crash, and would be there for ever."""
        faulthandler.dump_traceback_later(STOP_S, exit=True, file=sys.stderr)
        await super().crash(reason)

    def inputs(self) -> list[TP]:
        return [TP(self.prefix + topic, partition) for topic, partition in self.progress.inputs()]

    def next_offset(self, tp: TP) -> int | None:
        return self.progress.next_offset(Input(tp.topic.removeprefix(self.prefix), tp.partition))

    async def flush(self) -> bool:
        """Makes all output durable; False where that failed: it is tried again with the next."""
        async with self.flushing:
            batch = self.outbox.take()
            if not batch:
                return True
            try:
                await asyncio.to_thread(self.outbox.deliver, batch)
            except LogError as error:
                self.outbox.give_back(batch)
                _logger.warning("attribution.not_written", error=str(error))
                return False
            except BaseException:
                self.outbox.give_back(batch)
                raise
            return True

    async def on_seek(self, offsets: Mapping[TP, int | None]) -> None:
        """Reading goes on from these offsets; None = nothing was ever committed."""
        given = {
            Input(tp.topic.removeprefix(self.prefix), tp.partition): offset
            for tp, offset in offsets.items()
            if tp.topic.removeprefix(self.prefix) in TOPICS
        }
        missing = [input_ for input_, offset in given.items() if offset is None]
        begins = await asyncio.to_thread(self.look.beginnings, missing) if missing else {}
        self.progress.start(
            (input_, begins.get(input_, 0) if offset is None else offset) for input_, offset in given.items()
        )
        for (topic, partition), offset in given.items():
            if topic == FEEDBACK:
                self.book.start(partition, offset or 0)
        self.settled.clear()
        self.missed.clear()
        self.ready = self.loaded

    def watermarks(self) -> dict[int, int]:
        """By partition: everything before this time is processed."""
        return {p: self.progress.watermark_us(p, TOPICS) for p in self.progress.partitions()}

    async def on_restored(self) -> None:
        """Faust restored the table: the book is made anew from it."""
        try:
            # Restoring may have taken long, and nobody looked for rules meanwhile: old ones would judge new rollouts.
            revoked = self.revoked
            self.book.rulebook = await self._rules_now()
            if revoked != self.revoked:
                return  # the table is another's now; it is restored again for what is assigned next
            held = {tp.partition for tp in self.consumer.assignment() if tp.topic == self.prefix + FEEDBACK}
            effects = self.book.load(held, self.table.entries())
            self.table.put(effects.after)
            self.outbox.effects(effects)
            self.loaded = True
            _logger.info("attribution.restored", partitions=sorted(held), rollouts=self.book.rollouts)
        except Exception as error:  # noqa: BLE001  faust would drop it
            await self.crash(error)

    async def _rules_now(self) -> Rulebook:
        """Raises `LogError` where the log is away for long."""
        deadline_s = time.monotonic() + _PATIENCE_S
        while True:
            try:
                return await asyncio.to_thread(self.look.rules_now)
            except LogError as error:
                if time.monotonic() > deadline_s:
                    raise
                _logger.warning("attribution.no_rules", error=str(error))
                await asyncio.sleep(_AGAIN_S)

    async def tick(self) -> None:
        """Closes the windows that are over, writes what came of it."""
        if not self.ready:
            return
        generation = self.consumer_generation_id
        due = {p: at for p in self.progress.partitions() if (at := self.book.next_due_us(p)) is not None}
        try:
            found = await asyncio.to_thread(self.look.around, self.progress, due, TOPICS)
        except RollwireError as error:
            _logger.warning("attribution.no_look", error=str(error))
            return
        if not self.ready or generation != self.consumer_generation_id:
            return
        self.book.rulebook = found.rulebook
        for input_, seen, position, end in found.ends:
            self.progress.skip(input_, seen, position)
            self.progress.caught_up(input_, position, end, found.asked_us)
        for partition in due:
            while await self._advance(
                partition, min(self.progress.watermark_us(partition, TOPICS), found.most_us)
            ):
                if not self.ready or generation != self.consumer_generation_id:
                    return

    async def _advance(self, partition: int, watermark_us: int) -> bool:
        """Whether there is more."""
        at = self.book.next_due_us(partition)
        if at is None or at > watermark_us:
            return False
        effects = self.book.advance(partition, watermark_us, self.settled.get(partition, 0), _AT_ONCE)
        self.table.put(effects.writes)
        self.table.put(effects.after)
        self.outbox.effects(effects)
        return await self.flush() and bool(effects.after)

    async def in_order(self, message: Any) -> bool:
        """Whether this is the next record to fold. Where one before it is missing, the consumer goes back to that."""
        input_ = Input(message.topic.removeprefix(self.prefix), message.partition)
        place = self.progress.place(input_, message.offset, message.follows)
        if place == "next":
            if self.missed:
                self.missed.pop(input_, None)
            return True
        wanted = self.progress.next_offset(input_)
        if place == "again" or wanted is None or self.missed.get(input_, 0.0) > time.monotonic():
            return False  # folded before; or fetched before the consumer went back
        generation = self.consumer_generation_id
        try:
            fits = await asyncio.to_thread(self.look.nothing_between, input_, wanted, message.offset)
        except RollwireError as error:
            _logger.warning("attribution.no_look", error=str(error))
            fits = False
        if not self.ready or generation != self.consumer_generation_id:
            return False
        if not fits:
            _logger.info("attribution.reread", topic=input_.topic, partition=input_.partition, offset=wanted)
            self.missed[input_] = time.monotonic() + _REREAD_S
            await self.consumer.seek(TP(message.topic, message.partition), wanted)
        return fits

    def take(self, message: Any) -> None:
        """Folds one record."""
        topic = message.topic.removeprefix(self.prefix)
        partition, offset = message.partition, message.offset
        at_us = round(message.timestamp * 1_000) * 1_000
        try:
            event = opened(topic, message.value, _headers(message), message.key)
            if isinstance(event, Feedback):
                writes = self.book.take_feedback(partition, event, offset, at_us)
                if isinstance(writes, Refusal):
                    self._refuse(message, writes.reason, writes.detail, writes.at_us)
                else:
                    self.table.put(writes)
                    self.outbox.entries(writes)
            elif isinstance(event, ProductionRollout):
                effects = self.book.take_rollout(partition, event, offset, at_us)
                self.table.put(effects.writes)
                self.table.put(effects.after)
                self.outbox.effects(effects)
        except Refused as refused:
            if topic == FEEDBACK:
                self.book.start(partition, offset + 1)
                self._refuse(message, refused.reason, refused.detail, at_us)
            else:
                self.rollouts_skipped += 1
        self.progress.taken(Input(topic, partition), offset, at_us)

    def _refuse(self, message: Any, reason: str, detail: str, at_us: int) -> None:
        record = Record(
            FEEDBACK,
            message.partition,
            message.offset,
            round(message.timestamp * 1_000),
            message.key,
            message.value,
            _headers(message),
        )
        self.outbox.letter(refused_letter(record, reason, detail, at_us))


def _headers(message: Any) -> tuple[tuple[str, bytes | None], ...]:
    headers = message.headers or ()
    return tuple(headers.items() if isinstance(headers, dict) else headers)


def make_app(config: AttributionConfig, log: Log, look: Look, clock: Clock) -> AttributionApp:
    """`look` has read the rules already. Raises `TopicMismatch` where the topics are missing or differ in partitions."""
    partitions = look.partitions(TOPICS)
    app = AttributionApp(
        f"{config.prefix}{GROUP}",
        broker=f"kafka://{config.bootstrap}",
        store="memory://",
        autodiscover=False,
        topic_partitions=partitions,
        topic_replication_factor=config.replication,
        topic_disable_leader=True,
        table_standby_replicas=0,
        web_bind=config.web_host,
        web_host=config.web_host,
        web_port=config.web_port,
        web_cors_options=None,
        worker_redirect_stdouts=False,
        broker_commit_interval=config.commit_s,
        broker_session_timeout=config.session_timeout_s,
        broker_heartbeat_interval=min(3.0, config.session_timeout_s / 3),
        stream_wait_empty=False,
        consumer_auto_offset_reset="earliest",
        loghandlers=[],
    )
    app.prefix = config.prefix
    app.flushing, app.settled, app.missed = asyncio.Lock(), {}, {}
    app.book = Book(look.rulebook)
    app.progress = Progress()
    app.look = look
    app.outbox = Outbox(log.writer(), lambda refusals: letters_of(log, refusals))
    app.table = window_table(app, partitions)
    app.table.on_recover(app.on_restored)
    source = app.topic(
        *(config.prefix + topic for topic in TOPICS),
        key_type=bytes,
        value_type=bytes,
        key_serializer="raw",
        value_serializer="raw",
    )

    @app.agent(source, name="fold", concurrency=1)
    async def fold_events(stream: Any) -> None:
        async for event in stream.events():
            # Before the table is restored nothing is taken: it is missed afterwards, and read again.
            if not app.ready:
                continue
            try:
                if await app.in_order(event.message):
                    app.take(event.message)
            except Exception as error:
                # Faust would start the agent anew, behind this record: better to stop than to lose it.
                await app.crash(error)
                raise

    @app.on_partitions_revoked.connect
    async def stand_still(*_: Any, **__: Any) -> None:
        app.loaded = app.ready = False
        app.revoked += 1

    app.timer(interval=config.tick_s)(app.tick)

    @app.page("/counts")
    async def counts(view: Any, request: Any) -> Any:
        return view.json({"counts": app.book.tally.counts(), **_state(app)})

    @app.page("/coverage")
    async def coverage(view: Any, request: Any) -> Any:
        return view.json({"coverage": app.book.tally.coverage(), **_state(app)})

    @app.page("/status")
    async def status(view: Any, request: Any) -> Any:
        return view.json(_state(app))

    return app


def _state(app: AttributionApp) -> dict[str, Any]:
    """What a worker holds: of the partitions that are its own."""
    rules = app.book.rulebook.newest
    return {
        "ready": app.ready,
        "partitions": sorted(app.progress.partitions()),
        "watermark_us": {str(p): at for p, at in sorted(app.watermarks().items())},
        "rollouts": app.book.rollouts,
        "rollouts_skipped": app.rollouts_skipped,
        "rules": None if rules is None else {"name": rules.name, "version": rules.verifier_version},
    }
