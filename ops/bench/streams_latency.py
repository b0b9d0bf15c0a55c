"""Latency of assemble and pack under an open loop: events leave by a timetable, whatever becomes of those before.

A group's rollouts and rewards are all planned for one moment, one group every 1/rate seconds. Its latency runs from that moment, not
from when it was really sent, to when a read_committed reader has the plan's microbatches of every rank in its hands; so
it includes the wait until enough groups have come for the plan. Sends that are `LATE_S` or more behind the timetable are
counted. The groups of the first `WARM_S` seconds are not measured.
"""

from __future__ import annotations

import io
import json
import math
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, Final, NamedTuple

from confluent_kafka import Producer
from fastavro import parse_schema, schemaless_reader

from rollwire.ops.bench.streams_bare import BareLog
from rollwire.ops.bench.streams_load import Generator, Load
from rollwire.ops.bench.streams_worker import CONTEXT, Crew
from rollwire.schemas.catalogue import avro_folder
from rollwire.schemas.errors import DeadlineExceeded
from rollwire.schemas.framing import PREFIX_BYTES
from rollwire.streams.seams.log import TopicPartition
from rollwire.streams.seams.log_kafka import KafkaLog

WARM_S: Final = 2.0
LATE_S: Final = 0.01
_GRACE_S: Final = 30.0
_HEAD: Final = ("step", "group_ids")


class Sent(NamedTuple):
    """What the sender did. Times are monotonic seconds."""

    planned: dict[str, float]  # group -> when its events were to leave
    late: int  # groups that left `LATE_S` or more after that
    latest_s: float


class Latency(NamedTuple):
    p50_ms: float
    p99_ms: float
    max_ms: float
    groups: int
    late: int
    latest_ms: float


def _send(bootstrap: str, prefix: str, load: Load, rate: float, seed: int, pipe: Connection) -> None:
    """A process of its own: makes all groups, waits for a word, sends them by the timetable, tells what it did."""
    generator = Generator(load, at_us=time.time_ns() // 1_000, seed=seed)
    groups = [generator.group() for _ in range(load.groups)]
    producer = BareLog(bootstrap, prefix, client_id="bench").open_producer()
    producer.list_topics(f"{prefix}rollouts", timeout=30.0)
    pipe.send("ready")
    pipe.recv()
    planned: dict[str, float] = {}
    late, latest_s = 0, 0.0
    began = time.monotonic() + 0.1
    for number, (group, records) in enumerate(groups):
        at = planned[group] = began + number / rate
        while (left := at - time.monotonic()) > 0:
            producer.poll(min(left, 0.005))
        behind = time.monotonic() - at
        late += behind >= LATE_S
        latest_s = max(latest_s, behind)
        for record in records:
            _produce(producer, prefix + record.topic, record.value, record.key, list(record.headers))
    producer.flush(30.0)
    pipe.send(Sent(planned, late, latest_s))


def _produce(producer: Producer, topic: str, value: bytes | None, key: bytes | None, headers: Any) -> None:
    while True:
        try:
            producer.produce(topic, value, key, headers=headers)
            return
        except BufferError:
            producer.poll(0.01)


def head_schema() -> Any:
    """The schema of `packed-batches` up to the group ids: a reader of it stops before the arrays."""
    schema = json.loads((avro_folder() / "packed-batches.v1.avsc").read_text("utf-8"))
    names = [field["name"] for field in schema["fields"]]
    return parse_schema(schema | {"fields": schema["fields"][: names.index(_HEAD[-1]) + 1]})


def measure(
    log: KafkaLog, bootstrap: str, prefix: str, crew: Crew, load: Load, *, rate: float, ranks: int, seed: int
) -> Latency:
    """Sends `load` at `rate` groups a second through a crew that works on the topics, and waits for all plans.

    Raises `DeadlineExceeded` where a plan does not come.
    """
    schema = head_schema()
    reader = log.reader()
    reader.assign({TopicPartition("packed-batches", rank): 0 for rank in range(ranks)})
    ours, theirs = CONTEXT.Pipe()
    sender = CONTEXT.Process(target=_send, args=(bootstrap, prefix, load, rate, seed, theirs), daemon=True)
    sender.start()
    try:
        if not ours.poll(120.0):
            raise DeadlineExceeded("the sender did not get ready")
        ours.recv()
        crew.go()
        ours.send("go")
        readable: dict[str, float] = {}
        ranks_of: dict[int, int] = {}
        deadline = time.monotonic() + load.groups / rate + _GRACE_S
        while len(readable) < load.groups:
            records = reader.poll(1_000, 0.05)
            now = time.monotonic()
            for record in records:
                body = io.BytesIO(record.value or b"")
                body.seek(PREFIX_BYTES)
                head: Any = schemaless_reader(body, schema, None)
                step = head["step"]
                ranks_of[step] = ranks_of.get(step, 0) + 1
                if ranks_of[step] == ranks:
                    readable |= dict.fromkeys(head["group_ids"], now)
            crew.check()
            if now > deadline:
                raise DeadlineExceeded(
                    f"{len(readable)} of {load.groups} groups were planned {_GRACE_S:g} s after"
                )
        if not ours.poll(_GRACE_S):
            raise DeadlineExceeded("the sender did not end")
        sent: Sent = ours.recv()
    finally:
        reader.close()
        sender.kill()
        sender.join()
    first = min(sent.planned.values()) + WARM_S
    took = sorted(readable[group] - at for group, at in sent.planned.items() if at >= first)
    return Latency(
        p50_ms=share(took, 0.5) * 1e3,
        p99_ms=share(took, 0.99) * 1e3,
        max_ms=took[-1] * 1e3,
        groups=len(took),
        late=sent.late,
        latest_ms=sent.latest_s * 1e3,
    )


def share(ordered: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of them does not exceed."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
