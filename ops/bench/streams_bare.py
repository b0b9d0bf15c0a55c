"""The baseline: bare consume-produce-commit loops of confluent-kafka, which look at nothing they read.

The first loop stands for assemble: for each partition a thread with a transactional producer reads `rollouts` and `rewards`
and, for each group's worth of rollouts, writes one record of a group's size and one of a closing's. The second stands for pack:
it reads all partitions of `groups` and, for each plan's worth, writes a record for every rank and one fate a group. What
they write are records that assemble and pack wrote in this run: as many, as large, with the same headers. Client settings, records a
transaction and partitions are those of the processors; offsets go into the transaction.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from typing import Any, Final, NamedTuple

from confluent_kafka import Consumer, Message, Producer
from confluent_kafka import TopicPartition as WirePartition

from rollwire.ops.bench.streams_load import MEMBERS
from rollwire.schemas.errors import LogUnavailable
from rollwire.streams.seams.log import Outgoing
from rollwire.streams.seams.log_kafka import KafkaLog

_TIMEOUT_S: Final = 30.0
_WAIT_S: Final = 0.05


class Bare(NamedTuple):
    """What both loops write, and how much goes into one transaction."""

    samples: dict[str, list[Outgoing]]  # topic -> records as they were written, used in turn
    records: int  # read in one transaction of the first loop, at most
    groups: int  # in a plan
    plans: int  # in one transaction of the second loop, at most
    ranks: int


class BareLog(KafkaLog):
    """Opens the adapter's clients, to be used without it."""

    def consumer(self, group: str) -> Consumer:
        return Consumer(self._consumer_config(group) | {"enable.partition.eof": False})

    def open_producer(self) -> Producer:
        return Producer(self._producer_config())

    def transactional(self, transactional_id: str) -> Producer:
        config = self._producer_config() | {"transactional.id": transactional_id}
        config.pop("message.timeout.ms")
        return Producer(config)


class _Loop:
    """One consumer, one producer, one transaction after the other."""

    def __init__(self, log: BareLog, prefix: str, name: str, sources: Sequence[WirePartition]) -> None:
        self._prefix = prefix
        self.consumer = log.consumer(f"{prefix}{name}")
        self.producer = log.transactional(f"{prefix}{name}.{sources[0].partition}")
        self.producer.init_transactions(_TIMEOUT_S)
        self._sources = sources
        self._ends: dict[tuple[str, int], int] = {}

    def start(self, ready: Callable[[], None]) -> None:
        """As the processors' readers: assigned, held, let go."""
        sources = list(self._sources)
        self.consumer.assign(sources)
        self.consumer.pause(sources)
        ready()
        self.consumer.resume(sources)

    def read(self, most: int) -> list[Message]:
        """Messages that are there within the wait, and the positions behind them."""
        messages = self.consumer.consume(most, _WAIT_S)
        for message in messages:
            if message.error() is not None:
                raise LogUnavailable(f"the bare loop read: {message.error()}")
            topic, partition, offset = message.topic(), message.partition(), message.offset()
            if topic is not None and partition is not None and offset is not None:
                self._ends[topic, partition] = offset + 1
        return messages

    def write(self, record: Outgoing, partition: int) -> None:
        while True:
            try:
                self.producer.produce(
                    self._prefix + record.topic,
                    record.value,
                    record.key,
                    partition,
                    headers=list(record.headers),
                )
                return
            except BufferError:
                self.producer.poll(0.1)

    def commit(self) -> None:
        self.producer.send_offsets_to_transaction(
            [WirePartition(topic, partition, at) for (topic, partition), at in self._ends.items()],
            self.consumer.consumer_group_metadata(),
            _TIMEOUT_S,
        )
        self.producer.commit_transaction(_TIMEOUT_S)

    def close(self) -> None:
        self.consumer.close()


def bare_assemble(
    log: BareLog,
    bare: Bare,
    prefix: str,
    partitions: Sequence[int],
    stop: threading.Event,
    ready: Callable[[], None],
) -> None:
    """One loop for each partition, each in a thread."""

    def run(partition: int) -> None:
        rollouts = f"{prefix}rollouts"
        sources = [WirePartition(rollouts, partition, 0), WirePartition(f"{prefix}rewards", partition, 0)]
        loop = _Loop(log, prefix, "bare-assemble", sources)
        written = [cycle(bare.samples[topic]) for topic in ("groups", "groups-closed")]
        loop.start(ready)
        seen = 0
        while not stop.is_set():
            messages = loop.read(bare.records)
            if not messages:
                continue
            before = seen // MEMBERS
            seen += sum(
                message.topic() == rollouts and len(message.value() or b"") > 0 for message in messages
            )
            loop.producer.begin_transaction()
            for _ in range(before, seen // MEMBERS):
                for records in written:
                    loop.write(next(records), partition)
            loop.commit()
        loop.close()

    with ThreadPoolExecutor(max_workers=len(partitions)) as pool:
        for future in [pool.submit(run, partition) for partition in partitions]:
            future.result()


def bare_pack(
    log: BareLog,
    bare: Bare,
    prefix: str,
    partitions: Sequence[int],
    stop: threading.Event,
    ready: Callable[[], None],
) -> None:
    """One loop over all partitions of `groups`."""
    sources = [WirePartition(f"{prefix}groups", partition, 0) for partition in partitions]
    loop = _Loop(log, prefix, "bare-pack", sources)
    batches, fates = cycle(bare.samples["packed-batches"]), cycle(bare.samples["group-fates"])
    loop.start(ready)
    waiting = 0
    number = 0
    while not stop.is_set():
        until = time.monotonic() + _WAIT_S
        while waiting < bare.groups * bare.plans and time.monotonic() < until:
            messages: list[Any] = loop.read(bare.groups * bare.plans - waiting)
            waiting += sum(len(message.value() or b"") > 0 for message in messages)
        if waiting < bare.groups:
            continue
        loop.producer.begin_transaction()
        while waiting >= bare.groups:
            waiting -= bare.groups
            for rank in range(bare.ranks):
                loop.write(next(batches), rank)
            for _ in range(bare.groups):
                number += 1
                loop.write(next(fates), number % len(partitions))
        loop.commit()
    loop.close()
