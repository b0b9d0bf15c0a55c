"""One file of the spool, held by one process: whoever has its lock appends to it, sends it and deletes it.

The lock is `flock`: it goes with the process, however that ends, so what a process left is free for the next one and never
taken from a living one. Not thread-safe: `Spool` serialises.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Final, Self

from rollwire.producers.feedback import spool_format as form
from rollwire.schemas.errors import EnvironmentMissing, FeedbackError, SpoolFull

SUFFIX: Final = ".jsonl"
DAMAGED: Final = ".damaged"
_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Segment:
    """`size` is where the next line goes, `position` where the first unsettled one begins."""

    def __init__(self, path: Path, fd: int, size: int, position: int) -> None:
        self.path = path
        self.fd = fd
        self.size = size
        self.position = position
        self.damaged = 0

    @classmethod
    def create(cls, path: Path) -> Self | None:
        """A new one, locked; None where another process was quicker to take the file for an abandoned one."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            if _lock(fd) and os.fstat(fd).st_nlink:
                made = cls(path, fd, form.HEAD_BYTES, form.HEAD_BYTES)
                made._write(form.head(form.HEAD_BYTES), 0)
                return made
        except BaseException:
            os.close(fd)
            path.unlink(missing_ok=True)
            raise
        os.close(fd)
        return None

    @classmethod
    def adopt(cls, path: Path) -> tuple[Self, int] | None:
        """What another process left, cut behind its last whole line, and how many unsettled lines it has.

        None where somebody has it, or where it is none of ours; a segment of which nothing is left is deleted.
        """
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        kept = False
        try:
            if not _lock(fd) or not _is_at(path, fd):
                return None
            data = _read(fd, os.fstat(fd).st_size, 0)
            position = form.read_head(data)
            if position is None:
                if not data or form.head(0).startswith(data[: form.HEAD_BYTES]):
                    path.unlink()  # its maker died before the first line
                return None
            size = data.rfind(b"\n") + 1
            if size < len(data):
                os.ftruncate(fd, size)
            lines = data.count(b"\n", position)
            if not lines:
                path.unlink()
                return None
            kept = True
            return cls(path, fd, size, position), lines
        finally:
            if not kept:
                os.close(fd)

    @property
    def waiting_bytes(self) -> int:
        return self.size - self.position

    def append(self, data: bytes) -> None:
        """All of it or nothing. Raises `SpoolFull` where the disk is full."""
        self._write(data, self.size)
        self.size += len(data)

    def lines(self, max_lines: int, max_bytes: int) -> form.Lines:
        data = _read(self.fd, min(self.waiting_bytes, max_bytes), self.position)
        return form.read_lines(data, self.position, max_lines)

    def settle(self, position: int) -> None:
        self.position = position
        os.pwrite(self.fd, form.head(position), 0)

    def sync(self) -> None:
        _sync(self.fd)

    def finish(self) -> None:
        """Everything is settled: the file goes, or is kept under another name where lines of it could not be read."""
        if self.damaged:
            self.path.rename(self.path.with_suffix(DAMAGED))
        else:
            self.path.unlink(missing_ok=True)
        os.close(self.fd)

    def release(self) -> None:
        os.close(self.fd)

    def _write(self, data: bytes, at: int) -> None:
        done = 0
        try:
            while done < len(data):
                done += os.pwrite(self.fd, data[done:], at + done)
        except OSError as error:
            os.ftruncate(self.fd, at)
            if error.errno in _NO_ROOM:
                raise SpoolFull(
                    f"the disk under {self.path.parent} has no room: the event was not taken ({error.strerror})"
                ) from error
            raise FeedbackError(f"{self.path} cannot be written: {error}; the event was not taken") from error


def _read(fd: int, count: int, at: int) -> bytes:
    parts: list[bytes] = []
    while count > 0 and (part := os.pread(fd, count, at)):
        parts.append(part)
        count -= len(part)
        at += len(part)
    return b"".join(parts)


def _sync(fd: int) -> None:
    getattr(os, "fdatasync", os.fsync)(fd)


def _is_at(path: Path, fd: int) -> bool:
    """Whether the open file is still the one under its name: its owner may have finished it just now."""
    try:
        there, here = os.stat(path), os.fstat(fd)
    except FileNotFoundError:
        return False
    return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)


def _lock(fd: int) -> bool:
    try:
        import fcntl
    except ImportError:
        raise EnvironmentMissing(
            "a spool needs flock, which this system has not: leave `spool` out"
        ) from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise EnvironmentMissing(
            f"the spool's file system takes no locks ({error}): choose a folder on a local disk"
        ) from error
    return True
