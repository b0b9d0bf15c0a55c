"""Cases of the broker and its client that need the real ones: holes (C40), sizes (C42), foreign messages (C44), tails (C48),
exactly once (C53)."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager

import msgspec
import pytest

from rollwire.consumers.ledger import count_ledger
from rollwire.ops.cli import run
from rollwire.ops.stack import StackInfo, read_stack
from rollwire.ops.topics import apply_topics
from rollwire.schemas import records as r
from rollwire.schemas.catalogue import TOPICS
from rollwire.schemas.errors import Refused
from rollwire.schemas.golden import load_examples
from rollwire.streams import synthetic
from rollwire.streams.assemble_config import SAMPLED, AssembleConfig
from rollwire.streams.emit import outgoing
from rollwire.streams.seams.limits import OVERHEAD_BYTES, record_bytes
from rollwire.streams.seams.log import Outgoing, Record, TopicPartition
from rollwire.streams.seams.log_kafka import KafkaLog
from rollwire.streams.seams.scan import scan

pytestmark = pytest.mark.system


def now_us() -> int:
    return time.time_ns() // 1_000


def until(holds: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    pause = threading.Event()
    while not holds():
        assert time.monotonic() < deadline, "the condition did not come true"
        pause.wait(0.02)


def test_c40_the_ledger_ends_behind_control_records(stack: StackInfo, prefix: str) -> None:
    """One transaction of one event, then an aborted one of two: one event, no loss, within 5 s."""
    log = KafkaLog(stack.bootstrap, prefix)
    one = load_examples("notices")[0]
    record = Outgoing("notices", one.key, one.value, one.headers)
    writer = log.transactional_writer(f"{prefix}c40")
    writer.begin()
    writer.write([record])
    writer.commit("", {})
    writer.begin()
    writer.write([record, record])
    writer.abort()
    began = time.monotonic()
    ledger = count_ledger(log, prefix)
    assert time.monotonic() - began < 5
    assert (ledger["notices"].received, ledger.gap) == (1, 0)
    writer.close()
    log.close()


def test_c42_every_size_around_the_limit_is_taken_or_refused_at_once(stack: StackInfo) -> None:
    """What the overhead leaves of a topic's limit is always taken; what the broker refuses comes back as a size, at once."""
    limit = 192 * 1024
    prefix = f"t{uuid.uuid4().hex[:12]}."
    apply_topics(
        stack.bootstrap,
        prefix,
        topics={"notices": msgspec.structs.replace(TOPICS["notices"], max_message_bytes=limit)},
    )
    log = KafkaLog(stack.bootstrap, prefix)
    writer = log.writer()
    body = os.urandom(2 * limit)
    headers = (("ce_id", b"x" * 36), ("none", None))
    empty = record_bytes(Outgoing("notices", b"k", b"", headers))

    def of(size: int) -> Outgoing:
        return Outgoing("notices", b"k", body[: size - empty], headers)

    taken = [of(size) for size in range(limit - OVERHEAD_BYTES - 200, limit - OVERHEAD_BYTES + 1)]
    for record in taken:
        began = time.monotonic()
        writer.write([record])
        assert time.monotonic() - began < 5
    refused = 0
    for size in range(limit - 200, limit + 201, 8):
        began = time.monotonic()
        try:
            writer.write([of(size)])
            taken.append(of(size))
        except Refused:
            refused += 1
        assert time.monotonic() - began < 5
    assert refused >= 25  # all above the limit
    writer.write([of(1_000)])  # and the writer is as good as new
    taken.append(of(1_000))
    assert sorted(len(record.value or b"") for record in scan(log, ["notices"])) == sorted(
        len(record.value or b"") for record in taken
    )
    writer.close()
    log.close()


def test_c44_foreign_messages_on_every_topic(
    stack: StackInfo,
    prefix: str,
    log: KafkaLog,
    letters: Callable[[], list[r.DeadLetter]],
    assembling: Callable[[AssembleConfig], AbstractContextManager[None]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    writer = log.writer()
    junk = os.urandom(1_000_000)
    for topic in TOPICS:
        other = load_examples("rewards" if topic != "rewards" else "rollouts")[0]
        poison = [Outgoing(topic, b"k", value) for value in (None, b"", b"hello", junk)]
        poison.append(Outgoing(topic, other.key, other.value, other.headers))
        good = load_examples(topic)[0]
        last = () if topic == "dead-letters" else (Outgoing(topic, good.key, good.value, good.headers),)
        writer.write([record._replace(partition=0) for record in (*poison, *last)])
    for topic, spec in TOPICS.items():
        capsys.readouterr()
        assert run(["cat", topic, "--bootstrap", stack.bootstrap, "--prefix", prefix]) == 0
        shown = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        first = "deleted" if spec.compacted else "refused"
        kinds = [next(k for k in ("event", "refused", "deleted") if k in one) for one in shown]
        assert kinds == [first, *["refused"] * 4, *["event"][: topic != "dead-letters"]], topic
    with assembling(AssembleConfig(group_deadline_s=600, require_traces=True)):
        # 5 of each joined topic are refused, whole, with their positions; the examples are long past their deadline.
        def refused() -> list[r.DeadLetter]:
            return [letter for letter in letters() if letter.reason != "late"]

        until(lambda: len(refused()) == 15)
        assert sorted((one.source.topic, one.source.offset) for one in refused()) == sorted(
            (topic, offset) for topic in SAMPLED.joined for offset in range(5)
        )
        assert {one.value for one in refused()} >= {None, b"", b"hello", junk}
        waits = [_wait_of_a_good_group(log, number) for number in range(5)]
    # The broker's own times: from the last event of a group to the group. The least busy moment of a shared machine counts.
    assert min(waits) < 1.0
    writer.close()


def _wait_of_a_good_group(log: KafkaLog, number: int) -> float:
    group = synthetic.group_id(now_us(), number)
    events: list[r.Event] = [synthetic.rollout(group, i, 2, at_us=now_us(), top_k=0) for i in range(2)]
    events += [synthetic.reward(group, i, float(i), at_us=now_us()) for i in range(2)]
    log.writer().write([outgoing(event, source="test", time_us=now_us()) for event in events])
    made: list[Record] = []

    def there() -> bool:
        made.extend(one for one in scan(log, ["groups"]) if one.key == group.encode())
        return bool(made)

    until(there)
    given = max(one.timestamp_ms for one in scan(log, ["rewards"]) if one.key == group.encode())
    return (made[0].timestamp_ms - given) / 1e3


# Writes batches that are larger than its local queue until SIGTERM, and says after each how many records were accepted.
WRITER = """
import signal, sys, threading
from rollwire.ops.logs import configure_logging
from rollwire.streams.seams.log import Outgoing
from rollwire.streams.seams.log_kafka import KafkaLog
from rollwire.streams.seams.log_kafka_write import KafkaWriter
configure_logging()  # standard output is for the counts
log = KafkaLog(sys.argv[1], sys.argv[2])
writer = KafkaWriter(log._producer_config() | {"queue.buffering.max.messages": 1000}, sys.argv[2])
stop = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: stop.set())
accepted = 0
while not stop.is_set():
    writer.write([Outgoing("notices", b"k", b"%d" % (accepted + i)) for i in range(2500)], 60.0)
    accepted += 2500
    print(accepted, flush=True)
writer.close()
"""


def test_c48_what_was_accepted_is_delivered_whatever_the_queue_and_the_broker_do(
    stack: StackInfo, prefix: str
) -> None:
    """A queue of 1,000, a broker that stands still in the middle, SIGTERM at the end."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", WRITER, stack.bootstrap, prefix], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    lines = selectors.DefaultSelector()
    lines.register(process.stdout, selectors.EVENT_READ)
    broker = read_stack(stack.dir).pids["kafka"]  # other tests start it again
    try:
        accepted = [int(process.stdout.readline()) for _ in range(4)]
        os.kill(broker, signal.SIGSTOP)
        try:
            while lines.select(timeout=2.0):  # until nothing is accepted any more
                accepted.append(int(process.stdout.readline()))
        finally:
            os.kill(broker, signal.SIGCONT)
        while len(accepted) < 40:
            accepted.append(int(process.stdout.readline()))
        process.send_signal(signal.SIGTERM)
        rest = process.stdout.read().split()
        assert process.wait(15) == 0
    finally:
        process.kill()
        process.wait(10)
        lines.close()
        process.stdout.close()
    log = KafkaLog(stack.bootstrap, prefix)
    total = int(rest[-1]) if rest else accepted[-1]
    assert total >= 100_000
    assert [int(record.value or b"") for record in scan(log, ["notices"])] == list(range(total))
    log.close()


# One record in, one out: the smallest step there is, on the runtime that the processors run on.
COPY = """
import signal, sys, threading
from rollwire.streams.runtime import Drive, RuntimeConfig, run_step
from rollwire.streams.seams.clock import SystemClock
from rollwire.streams.seams.log import Outgoing, TopicPartition
from rollwire.streams.seams.log_kafka import KafkaLog

class Copy:
    def __init__(self):
        self.inputs = tuple(TopicPartition("rewards", p) for p in range(4))
        self.memories = ()
        self.next = {}

    def restore(self, taken): ...

    def start(self, committed, read):
        self.next = dict(committed)

    def feed(self, taken, clock_us):
        for record, _ in taken:
            self.next[TopicPartition(record.topic, record.partition)] = record.offset + 1
        return [Outgoing("groups", one.record.key, one.record.value, (), one.record.partition) for one in taken]

    def tick(self, clock_us, at_end):
        return []

    def due_us(self):
        return None

    def paused(self):
        return ()

    def read(self):
        return dict(self.next)

    def committable(self):
        return dict(self.next)

stop = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: stop.set())
bootstrap, prefix = sys.argv[1:]
drive = Drive(f"{prefix}copy", f"{prefix}copy", Copy)
run_step(KafkaLog(bootstrap, prefix), drive, RuntimeConfig(max_records=250), stop=stop, clock=SystemClock())
"""


def test_c53_one_in_one_out_over_three_kills(stack: StackInfo, prefix: str) -> None:
    log = KafkaLog(stack.bootstrap, prefix)
    count = 10_000
    log.writer().write([Outgoing("rewards", b"%d" % n, b"%d" % n) for n in range(count)])

    def copied() -> list[bytes]:
        return [record.value or b"" for record in scan(log, ["groups"])]

    def ends() -> int:
        """Records and markers: enough to tell how far it is, without reading all of it."""
        return sum(log.end_offsets([TopicPartition("groups", p) for p in range(4)]).values())

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-P", "-c", COPY, stack.bootstrap, prefix])

    process = start()
    try:
        for threshold in (1_000, 3_000, 5_000):
            until(lambda at=threshold: ends() >= at)  # type: ignore[misc]
            process.kill()
            process.wait(10)
            process = start()
        until(lambda: ends() >= count and len(copied()) >= count)
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.wait(10)
    assert sorted(copied()) == sorted(b"%d" % n for n in range(count))
    log.close()
