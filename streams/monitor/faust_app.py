"""The Faust app: reads the low-volume topics, folds them into one page, shows it.

State is a plain value in memory, no Faust table: a table would keep a changelog topic only to save what the topics
themselves tell in seconds. Each start is a consumer group of its own, which reads from the topics' beginning; nothing
is lost by losing it (law 1). `concurrency=1`: with more, faust may commit past unfinished events. The high-volume topics are
not read: their events per second come from end offsets.
"""

from __future__ import annotations

import asyncio
import uuid
from typing import Any, Final

import faust
import structlog

from rollwire.schemas.catalogue import TOPICS
from rollwire.schemas.errors import LogError
from rollwire.streams.monitor.config import MonitorConfig
from rollwire.streams.monitor.page import Page, to_json
from rollwire.streams.monitor.state import MonitorState
from rollwire.streams.monitor.transport import CommittedTransport
from rollwire.streams.seams.cache import Cache
from rollwire.streams.seams.clock import SystemClock
from rollwire.streams.seams.log import Log, Record, TopicPartition

FOLDED: Final = (
    "train-steps",
    "weight-versions",
    "fleet-status",
    "evaluations",
    "notices",
    "group-fates",
    "dead-letters",
)

_logger = structlog.get_logger("rollwire.monitor")


class MonitorApp(faust.App):
    def _new_transport(self) -> Any:
        return CommittedTransport(self.conf.broker_consumer, self)

    def _create_directories(self) -> None:
        """No table writes to disk: no folders in whatever directory this was started from."""


def make_app(config: MonitorConfig, log: Log, cache: Cache | None) -> MonitorApp:
    """`log` answers for end offsets; `cache` takes the snapshots, and may fail."""
    clock = SystemClock()
    state = MonitorState()
    app = MonitorApp(
        f"{config.prefix}monitor.{uuid.uuid4().hex[:8]}",
        broker=f"kafka://{config.bootstrap}",
        store="memory://",
        autodiscover=False,
        topic_allow_declare=False,
        topic_disable_leader=True,
        producer_partitioner=None,
        web_bind=config.web_host,
        web_host=config.web_host,
        web_port=config.web_port,
        web_cors_options=None,
        worker_redirect_stdouts=False,
        broker_commit_interval=1.0,
        stream_wait_empty=False,
        consumer_auto_offset_reset="earliest",
        loghandlers=[],
    )
    names = {config.prefix + topic: topic for topic in FOLDED}
    source = app.topic(*names, key_type=bytes, value_type=bytes, key_serializer="raw", value_serializer="raw")
    partitions = [TopicPartition(topic, p) for topic, spec in TOPICS.items() for p in range(spec.partitions)]

    @app.agent(source, name="fold", concurrency=1)
    async def fold_events(stream: Any) -> None:
        async for event in stream.events():
            message = event.message
            headers = message.headers or ()
            state.take(
                Record(
                    topic=names[message.topic],
                    partition=message.partition,
                    offset=message.offset,
                    timestamp_ms=int(message.timestamp * 1000),
                    key=message.key,
                    value=message.value,
                    headers=tuple(headers.items() if isinstance(headers, dict) else headers),
                ),
                clock.now_us(),
            )

    async def sample_rates() -> None:
        try:
            ends = await asyncio.to_thread(log.end_offsets, partitions)
        except LogError as error:
            _logger.warning("monitor.no_rates", error=str(error))
            return
        state.sample(ends, clock.now_us())

    shown: list[Page] = [Page()]

    async def snapshot() -> None:
        page = state.page
        if cache is None or page is shown[0]:
            return
        values = {config.page_key: to_json(page), config.url_key: page_url(config).encode()}
        try:
            await asyncio.to_thread(cache.set_many, values)
            shown[0] = page
        except Exception as error:  # noqa: BLE001  the cache may fail in any way and the monitor goes on (law 1)
            _logger.warning("monitor.no_cache", error=str(error))

    app.timer(interval=config.rates_s)(sample_rates)
    app.timer(interval=config.snapshot_s)(snapshot)

    @app.page("/page")
    async def show(view: Any, request: Any) -> Any:
        return view.bytes(to_json(state.page), content_type="application/json")

    return app


def page_url(config: MonitorConfig) -> str:
    return f"http://{config.web_host}:{config.web_port}/page"
