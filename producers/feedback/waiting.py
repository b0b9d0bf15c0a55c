"""What waits to be sent, in order: the seam between `send` and the sender, and its twin in memory.

`Spool` (`spool.py`) is the one on disk. Any thread appends; one sender takes, gets its answer, and settles.
"""

from __future__ import annotations

import threading
from collections import deque
from itertools import islice
from typing import NamedTuple, Protocol

from rollwire.schemas.errors import SpoolFull


class Taken(NamedTuple):
    """The oldest events, not yet settled: taking again gives the same ones."""

    lines: tuple[bytes, ...]
    damaged: int  # lines of the spool that cannot be read; settled along with these
    end: int  # where the next ones begin


class Counted(NamedTuple):
    """Events since the queue was opened. Waiting = added - settled."""

    added: int  # appended, or found in what a process that ended left
    settled: int


class Waiting(Protocol):
    def append(self, line: bytes) -> None:
        """Raises `SpoolFull`; then nothing was taken."""
        ...

    def take(self, max_events: int) -> Taken | None:
        """None = nothing waits."""
        ...

    def settle(self, taken: Taken) -> None:
        """What `take` gave was answered for good."""
        ...

    def count(self) -> Counted: ...

    def sync(self) -> None:
        """Forces what was appended to disk."""
        ...

    def adopt(self) -> int:
        """Takes over what ended processes left; the number of events found."""
        ...

    def close(self) -> None: ...


class MemoryWaiting:
    """As much as `max_bytes` of events; gone with the process."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._lines: deque[bytes] = deque()
        self._bytes = 0
        self._added = 0
        self._settled = 0

    def append(self, line: bytes) -> None:
        with self._lock:
            if self._bytes + len(line) > self._max_bytes:
                raise SpoolFull(
                    f"{len(self._lines)} events ({self._bytes} bytes) wait for the gateway, at most {self._max_bytes} "
                    "bytes may: this one was not taken. Is the gateway up? A `spool` folder holds more"
                )
            self._lines.append(line)
            self._bytes += len(line)
            self._added += 1

    def take(self, max_events: int) -> Taken | None:
        with self._lock:
            if not self._lines:
                return None
            lines = tuple(islice(self._lines, max_events))
        return Taken(lines, 0, len(lines))

    def settle(self, taken: Taken) -> None:
        with self._lock:
            for line in taken.lines:
                self._lines.popleft()
                self._bytes -= len(line)
            self._settled += len(taken.lines)

    def count(self) -> Counted:
        with self._lock:
            return Counted(self._added, self._settled)

    def sync(self) -> None:
        """There is no disk."""

    def adopt(self) -> int:
        return 0

    def close(self) -> None:
        """What waits is gone: the client says so before."""
