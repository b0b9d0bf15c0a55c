"""kill -9 of a producer in an open transaction: it holds all readers back until the broker ends it (C41)."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid

import pytest

from rollwire.ops.chaos.history_log import Ends
from rollwire.ops.stack import StackInfo
from rollwire.streams.seams.log import Outgoing, TopicPartition
from rollwire.streams.seams.log_kafka import KafkaLog

pytestmark = pytest.mark.system

TRANSACTION_S = 4.0
A = TopicPartition("history-a", 0)
_OPEN = f"""
import sys, time
from rollwire.streams.seams.log import Outgoing
from rollwire.streams.seams.log_kafka import KafkaLog
log = KafkaLog(sys.argv[1], sys.argv[2], transaction_timeout_s={TRANSACTION_S})
writer = log.transactional_writer("open")
writer.begin()
writer.write([Outgoing("history-a", None, b"open", (), 0)])
time.sleep(60)
"""


def test_c41_readers_go_on_after_the_transaction_time_out(stack: StackInfo) -> None:
    prefix = f"t{uuid.uuid4().hex[:12]}."
    ends = Ends(stack.bootstrap, prefix)
    ends.create()
    log = KafkaLog(stack.bootstrap, prefix)
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", _OPEN, stack.bootstrap, prefix],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        deadline = time.monotonic() + 30
        while ends.written(A) == 0:
            assert time.monotonic() < deadline, "nothing was written"
    finally:
        process.kill()
        process.wait()
    killed = time.monotonic()
    writer = log.writer()
    writer.write([Outgoing("history-a", None, b"behind", (), 0)])  # others go on
    # The end of what is written and the stable end tell that readers are held back, and how far.
    assert ends.written(A) >= 2
    assert log.end_offsets([A]) == {A: 0}
    reader = log.reader()
    reader.assign({A: 0})
    shown: list[bytes | None] = []
    while not shown:
        shown = [record.value for record in reader.poll(10, 0.2)]
        assert time.monotonic() < killed + TRANSACTION_S + 5.0, "readers are still held back"
    assert shown == [b"behind"]
    reader.close()
    writer.close()
    log.close()
