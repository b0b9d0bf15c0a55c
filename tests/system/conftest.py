"""What system tests open on the stack, each under the test's own prefix."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager

import pytest

from rollwire.ops.stack import StackInfo
from rollwire.schemas.records import DeadLetter
from rollwire.streams.assemble_config import AssembleConfig
from rollwire.streams.emit import take
from rollwire.streams.run_assemble import run_assemble
from rollwire.streams.seams.log_kafka import KafkaLog
from rollwire.streams.seams.scan import scan
from rollwire.streams.seams.store_s3 import S3Store


@pytest.fixture
def log(stack: StackInfo, prefix: str) -> Iterator[KafkaLog]:
    with closing(KafkaLog(stack.bootstrap, prefix=prefix, client_id="test")) as log:
        yield log


@pytest.fixture
def store(stack: StackInfo) -> S3Store:
    """The stack's own bucket."""
    store = S3Store(stack.s3_endpoint, stack.bucket, stack.access_key, stack.secret_key)
    store.ensure_bucket()
    return store


@pytest.fixture
def wait_for() -> Callable[[Callable[[], bool], float], None]:
    """Waits until a condition holds, for at most so many seconds."""

    def wait(true: Callable[[], bool], seconds: float) -> None:
        deadline, pause = time.monotonic() + seconds, threading.Event()
        while not true():
            assert time.monotonic() < deadline, "not within the deadline"
            pause.wait(0.05)

    return wait


@pytest.fixture
def letters(log: KafkaLog) -> Callable[[], list[DeadLetter]]:
    """What was refused so far; foreign records on `dead-letters` are passed over."""

    def read() -> list[DeadLetter]:
        found = (take(record).event for record in scan(log, ["dead-letters"]))
        return [letter for letter in found if isinstance(letter, DeadLetter)]

    return read


@pytest.fixture
def assembling(log: KafkaLog, prefix: str) -> Callable[[AssembleConfig], AbstractContextManager[None]]:
    """Runs the assembler in a thread, within a `with`."""

    @contextmanager
    def running(config: AssembleConfig) -> Iterator[None]:
        stop = threading.Event()
        thread = threading.Thread(
            target=run_assemble,
            args=(log, config),
            kwargs={"prefix": prefix, "stop": stop, "partitions": range(4)},
            daemon=True,
        )
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join(15)
            assert not thread.is_alive()

    return running
