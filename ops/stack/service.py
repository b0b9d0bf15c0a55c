"""What the three services have in common: a command to start, and a real request that tells when one is ready."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from rollwire.ops.stack.info import ServiceName
from rollwire.ops.stack.processes import Spawned, is_alive
from rollwire.schemas.errors import StackError

_POLL_S = 0.05


class Cancelled(StackError):
    """The start was given up since another service failed."""


class Service(NamedTuple):
    """One service, ready to be started."""

    name: ServiceName
    address: str
    command: Sequence[str]
    # Makes files and folders that the process needs; runs before each start.
    prepare: Callable[[], None]
    # One real request: True = answered, False = not yet. Raises if the answer shows that it can never be right.
    ask: Callable[[], bool]


def wait_ready(
    service: Service, process: Spawned, log: Path, deadline_s: float, cancelled: threading.Event
) -> None:
    """Returns when the service has answered; raises `StackError` where it ended first or the deadline passed."""
    deadline = time.monotonic() + deadline_s
    while not service.ask():
        if not is_alive(*process):
            raise StackError(f"{service.name} ended while it started: {last_words(log)} (log: {log})")
        if time.monotonic() > deadline:
            raise StackError(
                f"{service.name} did not answer within {deadline_s:.0f} s: {last_words(log)} (log: {log})"
            )
        if cancelled.wait(_POLL_S):
            raise Cancelled(f"the start of {service.name} was given up")


def last_words(log: Path, lines: int = 3) -> str:
    """The last lines of a log that are not a stack trace, in one line; they usually hold the reason."""
    try:
        text = log.read_bytes()[-16_384:].decode(errors="replace")
    except FileNotFoundError:
        return "it said nothing"
    said = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith(("\t", "   "))]
    return " | ".join(line[:200] for line in said[-lines:]) or "it said nothing"
