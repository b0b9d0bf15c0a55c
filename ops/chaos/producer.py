"""Writes the known load by its timetable, as a process that may be killed at any moment.

Open loop: a record is written when its time has come, however long the ones before it took. After a kill it goes on
behind the last batch that it noted as acknowledged; what was acknowledged and not noted is written twice, which is part
of the test.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import msgspec
import structlog

from rollwire.ops.chaos.workload import Workload, kinds, record_of, timetable
from rollwire.ops.logs import configure_logging
from rollwire.ops.parent import stop_with_parent
from rollwire.ops.stopping import stop_on_signals
from rollwire.schemas.errors import LogUnavailable
from rollwire.streams.seams.clock import SystemClock
from rollwire.streams.seams.log_kafka import KafkaLog

_logger = structlog.get_logger("rollwire.chaos")
_BATCH = 200  # records at most
_TICK_S = 0.05
_WRITE_S = 5.0  # then the batch is written again; well below the 10 s that a stop may take


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """What a producer is started with, as a file in the run's folder."""

    bootstrap: str
    prefix: str
    load: Workload


def write_load(task: Task, folder: Path, stop: threading.Event) -> int:
    """Writes what is not written yet until all is or `stop` is set; how far it came in the timetable."""
    planned, chosen, clock = timetable(task.load), kinds(task.load), SystemClock()
    log = KafkaLog(task.bootstrap, task.prefix, "chaos-producer")
    writer = log.writer()
    at = done(folder)
    _logger.info("producer.start", at=at, of=len(planned))
    try:
        while at < len(planned) and not stop.is_set():
            now_us = clock.now_us()
            end = at
            while end < len(planned) and end - at < _BATCH and planned[end].at_us <= now_us:
                end += 1
            if end == at:
                stop.wait(min(_TICK_S, max(0.001, (planned[at].at_us - now_us) / 1e6)))
                continue
            try:
                writer.write([record_of(task.load, chosen, one) for one in planned[at:end]], _WRITE_S)
            except LogUnavailable as error:
                _logger.warning("producer.again", at=at, error=str(error))
                stop.wait(_TICK_S)
                continue
            at = end
            _note(folder, at)
    finally:
        log.close()
    if at == len(planned):
        stop.wait()  # a process that ends is started again
    return at


def done(folder: Path) -> int:
    """How many records of the timetable are known to be acknowledged."""
    try:
        return int((folder / "produced").read_text())
    except FileNotFoundError:
        return 0


def producer_command(task: Task, folder: Path) -> tuple[str, ...]:
    """How to start a producer; its task is written to `folder`."""
    (folder / "task.json").write_bytes(msgspec.json.encode(task))
    program = "from rollwire.ops.chaos.producer import main; main()"
    return (sys.executable, "-P", "-c", program, str(folder))


def _note(folder: Path, at: int) -> None:
    """Whole or not at all: the process may be killed here too."""
    partial = folder / "produced.partial"
    partial.write_text(str(at))
    partial.replace(folder / "produced")


def main() -> None:
    """`<folder>`: where the task and the note of what is done are."""
    configure_logging()
    stop = threading.Event()
    stop_on_signals(stop)
    stop_with_parent(stop)
    folder = Path(sys.argv[1])
    write_load(msgspec.json.decode((folder / "task.json").read_bytes(), type=Task), folder, stop)
