"""The spool: feedback that waits, in files that outlive the process.

What is promised
    `append` returned          the event survives the end of the process, kill -9 included: it is with the kernel
    `fsync_s` later            it survives the end of the machine too; `fsync_s=0`: when `append` returns, `None`: some time
    a full spool, a full disk  `append` raises `SpoolFull`, and nothing that waits is given up for it
    several processes          each has files of its own in the folder; whoever comes next sends what an ended one left
    a damaged line             is counted and its file kept as `*.damaged`; its neighbours are sent
`max_bytes` bounds the folder; what other processes have there is looked at once a second.

Files are readable by their owner alone: a comment and a person's id stand in them as they were given, until they are sent.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from pathlib import Path
from typing import Final

from rollwire.producers.feedback import spool_format as form
from rollwire.producers.feedback.segment import SUFFIX, Segment
from rollwire.producers.feedback.waiting import Counted, Taken
from rollwire.schemas.errors import ConfigError, SpoolFull

_READ_BYTES: Final = (
    512 * 1024
)  # at most this much of a segment becomes one batch; far above the longest line
_DRAINED_BYTES: Final = 64 * 1024  # a file that is settled so far is begun anew
_LOOK_S: Final = 1.0

_open_spools: weakref.WeakSet[Spool] = weakref.WeakSet()


class Spool:
    """Implements `Waiting`. Thread-safe; after a fork the child goes on with files of its own, and has nothing that waits."""

    def __init__(self, folder: Path, max_bytes: int, *, fsync_each: bool = False) -> None:
        """Raises `ConfigError` where the folder cannot be made or written."""
        self._folder = folder
        self._max_bytes = max_bytes
        self._segment_bytes = min(1 << 20, max(1 << 16, max_bytes // 16))
        self._fsync_each = fsync_each
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            writable = os.access(folder, os.W_OK | os.X_OK)
        except OSError as error:
            raise ConfigError(f"the spool {folder} cannot be made: {error}") from error
        if not writable:
            raise ConfigError(f"the spool {folder} cannot be written by this user")
        self._begin()
        _open_spools.add(self)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._segments: deque[Segment] = deque()  # in the order they are sent
        self._active: Segment | None = None  # the last of them, while it is appended to
        self._bytes = 0  # that wait in them
        self._added = 0
        self._settled = 0
        self._dirty: set[Segment] = set()
        self._new_files = False
        self._others = (0, -_LOOK_S)  # bytes of other processes' files, and when they were looked at

    def append(self, line: bytes) -> None:
        data = form.line(line)
        with self._lock:
            self._check_room(len(data))
            active = self._active
            if active is None or active.size + len(data) > self._segment_bytes:
                active = self._new_segment()
            active.append(data)
            if self._fsync_each:
                active.sync()
                self._sync_folder()
            else:
                self._dirty.add(active)
            self._bytes += len(data)
            self._added += 1

    def take(self, max_events: int) -> Taken | None:
        with self._lock:
            while self._segments and self._segments[0].waiting_bytes <= 0:
                if self._segments[0] is self._active:
                    return None
                self._finish_first()
            if not self._segments:
                return None
            first = self._segments[0]
            lines = first.lines(max_events, _READ_BYTES)
            if lines.end == first.position:  # so damaged that no line ends for long
                lines = first.lines(max_events, first.waiting_bytes)
        return Taken(lines.whole, lines.damaged, lines.end)

    def settle(self, taken: Taken) -> None:
        with self._lock:
            if not self._segments:  # closed meanwhile: the next process sends them again
                return
            first = self._segments[0]
            self._bytes -= taken.end - first.position
            self._settled += len(taken.lines) + taken.damaged
            first.damaged += taken.damaged
            if taken.end < first.size or (first is self._active and first.size < _DRAINED_BYTES):
                first.settle(taken.end)
                return
            self._finish_first()

    def count(self) -> Counted:
        with self._lock:
            return Counted(self._added, self._settled)

    def sync(self) -> None:
        """By the sender alone: it is the one that closes files."""
        with self._lock:
            dirty, self._dirty = self._dirty, set()
        for segment in dirty:
            segment.sync()
        self._sync_folder()

    def adopt(self) -> int:
        found = 0
        for path in sorted(self._folder.glob(f"*{SUFFIX}")):
            with self._lock:
                if any(segment.path == path for segment in self._segments):
                    continue
                adopted = Segment.adopt(path)
                if adopted is None:
                    continue
                segment, lines = adopted
                # Behind what waits already: the order of sending is the order of counting.
                self._active = None
                self._segments.append(segment)
                self._bytes += segment.waiting_bytes
                self._added += lines
                found += lines
        return found

    def close(self) -> None:
        """What is settled goes, the rest waits in the folder for the next process."""
        with self._lock:
            for segment in self._segments:
                if segment.waiting_bytes:
                    segment.release()
                else:
                    segment.finish()
            self._segments.clear()
            self._active = None
            self._bytes = 0
        _open_spools.discard(self)

    def _finish_first(self) -> None:
        first = self._segments.popleft()
        if first is self._active:
            self._active = None
        self._dirty.discard(first)
        first.finish()

    def _check_room(self, more: int) -> None:
        now = time.monotonic()
        if now - self._others[1] >= _LOOK_S:
            self._others = (self._others_bytes(), now)
        there = self._bytes + self._others[0]
        if there + more > self._max_bytes:
            raise SpoolFull(
                f"{there} bytes wait in {self._folder}, at most {self._max_bytes} may: the event was not taken, and "
                "nothing that waits was dropped. Is the gateway up? `max_bytes` sets the bound"
            )

    def _others_bytes(self) -> int:
        own = {segment.path.name for segment in self._segments}
        total = 0
        with os.scandir(self._folder) as entries:
            for entry in entries:
                if entry.name not in own and not entry.is_dir():
                    try:
                        total += entry.stat().st_size
                    except FileNotFoundError:  # its owner was just done with it
                        continue
        return total

    def _new_segment(self) -> Segment:
        while True:
            # By age, so that what was left is sent in the order it was given.
            name = f"{time.time_ns() // 1_000:016d}-{os.getpid()}-{os.urandom(4).hex()}{SUFFIX}"
            made = Segment.create(self._folder / name)
            if made is not None:
                break
        self._segments.append(made)
        self._active = made
        self._new_files = True
        return made

    def _sync_folder(self) -> None:
        """Else a new file's name may be gone after a power cut, whatever was forced of its content."""
        if self._new_files:
            self._new_files = False
            fd = os.open(self._folder, os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    def _forked(self) -> None:
        for segment in self._segments:
            segment.release()  # the lock stays with the parent, which still has it open
        self._begin()


def _after_fork() -> None:
    for spool in list(_open_spools):
        spool._forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
