"""Faust's Kafka transport with `read_committed`: faust itself reads uncommitted records unless it runs exactly-once,
and its exactly-once has no fencing of zombies. The seam for that is `ConsumerThread._create_worker_consumer`."""

from __future__ import annotations

from typing import Any

import aiokafka  # type: ignore[import-untyped]
from aiokafka.coordinator.assignors.roundrobin import (  # type: ignore[import-untyped]
    RoundRobinPartitionAssignor,
)
from faust.transport.drivers.aiokafka import AIOKafkaConsumerThread, Consumer, Transport
from faust.types import TP


class CommittedConsumerThread(AIOKafkaConsumerThread):
    def _create_worker_consumer(self, transport: Any) -> Any:
        """A consumer that sees committed records only."""
        conf = self.app.conf
        url = transport.url[0]
        # Where a table has a changelog, its partitions must follow those it is folded from: only Faust's assignor sees to
        # that. Without one, aiokafka's own does.
        self._assignor = (
            self.app.assignor if self.app.tables.changelog_topics else RoundRobinPartitionAssignor
        )
        return aiokafka.AIOKafkaConsumer(
            client_id=conf.broker_client_id,
            group_id=conf.id,
            bootstrap_servers=f"{url.host}:{url.port or transport.default_port}",
            partition_assignment_strategy=[self._assignor],
            enable_auto_commit=False,
            auto_offset_reset="earliest",
            max_poll_records=conf.broker_max_poll_records,
            max_poll_interval_ms=int((conf.broker_max_poll_interval or 300.0) * 1000),
            max_partition_fetch_bytes=conf.consumer_max_fetch_size,
            fetch_max_wait_ms=250,
            request_timeout_ms=int(conf.broker_request_timeout * 1000),
            session_timeout_ms=int(conf.broker_session_timeout * 1000),
            rebalance_timeout_ms=int(conf.broker_rebalance_timeout * 1000),
            heartbeat_interval_ms=int(conf.broker_heartbeat_interval * 1000),
            isolation_level="read_committed",
            metadata_max_age_ms=conf.consumer_metadata_max_age_ms,
            connections_max_idle_ms=conf.consumer_connections_max_idle_ms,
        )


class CommittedConsumer(Consumer):
    def _new_consumer_thread(self) -> AIOKafkaConsumerThread:
        return CommittedConsumerThread(self, loop=self.loop, beacon=self.beacon)

    async def _seek(self, partition: TP, offset: int) -> None:
        """Moves a position on the thread that fetches.

        Faust does it on the caller's. aiokafka is not made for two threads: where the other takes a partition's records at
        that moment, it finds them gone and the worker dies of a `KeyError`.
        """
        seek: Any = self._thread.seek  # returns nothing, which the call takes as it takes an awaitable
        await self._thread.call_thread(seek, partition, offset)


class CommittedTransport(Transport):
    Consumer = CommittedConsumer
