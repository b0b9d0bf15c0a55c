"""One real stack for all system tests of a session, and a topic prefix of its own for each test."""

from __future__ import annotations

import signal
import sys
import uuid
from collections.abc import Iterator

import pytest
import structlog

from rollwire.ops.stack import StackConfig, StackInfo, running_stack
from rollwire.ops.topics import apply_topics

# A shell that starts a job in the background has it ignore SIGINT, and whatever that job starts; here processes are
# started to be interrupted.
signal.signal(signal.SIGINT, signal.default_int_handler)

# As in a process of ours: standard output is what a command answers, and a thread may log in the middle of it.
structlog.configure(logger_factory=lambda *_: structlog.PrintLogger(sys.stderr))


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StackInfo]:
    """A stack in a temporary folder. A test that kills one of its processes brings it back before it ends."""
    with running_stack(tmp_path_factory.mktemp("stack"), StackConfig(kafka_proxied=True)) as info:
        yield info


@pytest.fixture
def prefix(stack: StackInfo) -> str:
    """A topic prefix that no other test uses, with every topic of the catalogue provisioned under it."""
    unique = f"t{uuid.uuid4().hex[:12]}."
    apply_topics(stack.bootstrap, unique)
    return unique
