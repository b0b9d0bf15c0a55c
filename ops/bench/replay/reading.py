"""Reading a topic once, four ways: bare, bare in batches, as records, as events. Each gives the seconds that it took.

`bare` is the loop of confluent-kafka's own examples: `poll()`, then key, headers, value and timestamp of the message.
`bare_batches` does the same with `consume()`, in batches of the size that `scan` takes. Both have the settings of our readers: with
librdkafka's defaults a reader whose queue was full waits a second before it fetches on. A clock starts when partitions are
assigned, or asked for their ends, and stops behind the last record. Whoever did not see every record and every byte
raises `LogError`.
"""

from __future__ import annotations

import time
from typing import Final

from confluent_kafka import Consumer
from confluent_kafka import TopicPartition as WirePartition

from rollwire.ops.bench.replay.load import TOPIC, Source
from rollwire.ops.bench.streams_bare import BareLog
from rollwire.schemas.errors import DeadlineExceeded, LogError
from rollwire.schemas.records import Rollout
from rollwire.streams.bulk import BulkDecoder
from rollwire.streams.seams.scan import BATCH, scan, scan_batches

_SILENT: Final = 600  # calls: half a minute of `consume`


def bare(source: Source) -> float:
    """One message after the other."""
    consumer = _consumer(source)
    wanted, seen, size, silent = source.records, 0, 0, 0
    began = time.perf_counter()
    try:
        consumer.assign(_starts(source))
        while seen < wanted:
            message = consumer.poll(0.05)
            if message is None:
                silent = _still(silent)
                continue
            if message.error() is not None:
                raise LogError(f"the bare consumer read: {message.error()}")
            message.key()
            message.headers()
            message.timestamp()
            size += len(message.value() or b"")
            seen += 1
            silent = 0
        took = time.perf_counter() - began
    finally:
        consumer.close()
    _complete("the bare consumer", source, seen, size)
    return took


def bare_batches(source: Source) -> float:
    """The same by `consume()`, as many at a time as `scan` takes."""
    consumer = _consumer(source)
    wanted, seen, size, silent = source.records, 0, 0, 0
    began = time.perf_counter()
    try:
        consumer.assign(_starts(source))
        while seen < wanted:
            messages = consumer.consume(min(BATCH, wanted - seen), 0.05)
            silent = 0 if messages else _still(silent)
            for message in messages:
                if message.error() is not None:
                    raise LogError(f"the bare consumer read: {message.error()}")
                message.key()
                message.headers()
                message.timestamp()
                size += len(message.value() or b"")
            seen += len(messages)
        took = time.perf_counter() - began
    finally:
        consumer.close()
    _complete("the bare consumer", source, seen, size)
    return took


def _consumer(source: Source) -> Consumer:
    return BareLog(source.bootstrap, source.prefix).consumer("bare")


def _starts(source: Source) -> list[WirePartition]:
    return [WirePartition(source.prefix + at.topic, at.partition, 0) for at in source.ends]


def _still(silent: int) -> int:
    """Of calls without a message, one more. Raises `DeadlineExceeded`."""
    if silent > _SILENT:
        raise DeadlineExceeded("the bare consumer gets nothing any more: is the broker up?")
    return silent + 1


def records(source: Source) -> float:
    """Through `scan`, as every audit reads; nothing is decoded."""
    began = time.perf_counter()
    sizes = [len(record.value or b"") for record in scan(source.log(), (TOPIC,))]
    took = time.perf_counter() - began
    _complete("scan", source, len(sizes), sum(sizes))
    return took


def events(source: Source) -> float:
    """Through `scan_batches` and the codec with all its checks."""
    decoder = BulkDecoder()
    began, seen = time.perf_counter(), 0
    for batch in scan_batches(source.log(), (TOPIC,)):
        seen += sum(isinstance(event, Rollout) for event in decoder.decode(batch))
    took = time.perf_counter() - began
    _complete("decoding", source, seen, source.value_bytes)
    return took


def _complete(who: str, source: Source, seen: int, size: int) -> None:
    if (seen, size) != (source.records, source.value_bytes):
        raise LogError(
            f"{who} saw {seen:,} records of {size:,} bytes, written were {source.records:,} of {source.value_bytes:,}"
        )
