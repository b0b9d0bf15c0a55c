"""What keeps a demo whole: one process a run, an ordered end on any signal, a clean-up that is not broken off."""

from __future__ import annotations

import fcntl
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

from rollwire.schemas.errors import StackError


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One demo a run: two would fence each other's processes back and forth. Raises `StackError`."""
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StackError(f"another demo runs {folder}: end it first, or begin a new one") from None
        yield


@contextmanager
def interruptible() -> Iterator[None]:
    """SIGTERM and SIGHUP end a demo as Ctrl-C does: in order, with nothing left running."""

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def undisturbed() -> Iterator[None]:
    """A second Ctrl-C must not break off the clean-up, which ends by its own deadlines."""
    before = {n: signal.signal(n, signal.SIG_IGN) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
