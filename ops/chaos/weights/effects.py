"""The effects of one life of a process, by name and number, and its death at one of them.

An effect is a call that somebody else may see: a put, a get, a transaction begun, written, committed, a report, a swap, a
change in a folder. Reading the log is none: it changes nothing and how often it is asked follows from time.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Literal, NoReturn, TypeVar

import msgspec

T = TypeVar("T")
Side = Literal["before", "after"]
SIDES: Final[tuple[Side, ...]] = ("before", "after")
DIED: Final = 86  # exit code of a process that ended where it was told to
FOLDER: Final = "fs "  # what the names of changes in a folder begin with

# What changes a folder, as the interpreter tells its audit hooks; `open` counts where it writes.
_CHANGES: Final = frozenset(
    {"open", "os.rename", "os.link", "os.symlink", "os.mkdir", "os.remove", "os.rmdir", "os.truncate"}
)
_WRITES: Final = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class Crash(msgspec.Struct, frozen=True):
    """Die at the `hit`-th effect of this name, on this side of it."""

    effect: str
    hit: int
    side: Side

    def __str__(self) -> str:
        return f"{self.side} {self.effect} #{self.hit}"


class Effects:
    """One life. After its death no effect of it happens any more, whichever thread asks for one. Thread-safe."""

    def __init__(self, crash: Crash | None, die: Callable[[], NoReturn] | None = None) -> None:
        """`die` ends the process; without it `SystemExit` is raised, here and in every later call: no handler of the code
        under test catches it, and a thread ends by it without a word."""
        self._crash = crash
        self._die = die
        self._lock = threading.Lock()
        self.seen: Counter[str] = Counter()  # how often each effect came by
        self.dead = threading.Event()

    def around(self, names: str | Sequence[str], act: Callable[[], T]) -> T:
        """`act()`, which is the effect of these names."""
        self.check()
        with self._lock:
            sides = {
                side for name in ([names] if isinstance(names, str) else names) for side in self._count(name)
            }
        if "before" in sides:
            self.end()
        result = act()
        if "after" in sides:
            self.end()
        self.check()
        return result

    def check(self) -> None:
        """Raises `SystemExit` after the end of this life."""
        if self.dead.is_set():
            raise SystemExit(DIED)

    def end(self) -> NoReturn:
        self.dead.set()
        if self._die is not None:
            self._die()
        raise SystemExit(DIED)

    def watch_folder(self, folder: Path) -> None:
        """From now on, changes below `folder` by this interpreter are effects, named `fs <event>`. Cannot be undone, so
        it is for processes that end with their life."""
        root = os.fspath(folder.resolve())

        def hook(event: str, args: tuple[Any, ...]) -> None:
            if event not in _CHANGES or (event == "open" and not (args[2] or 0) & _WRITES):
                return
            if any(
                isinstance(a, str | bytes | os.PathLike) and os.fsdecode(a).startswith(root) for a in args[:2]
            ):
                # It is told before the change; so one that dies after a change dies before the next one.
                self.around(f"{FOLDER}{event.removeprefix('os.')}", lambda: None)

        sys.addaudithook(hook)

    def _count(self, name: str) -> tuple[Side, ...]:
        self.seen[name] += 1
        crash = self._crash
        if crash is not None and (crash.effect, crash.hit) == (name, self.seen[name]):
            return (crash.side,)
        return ()


def exit_now() -> NoReturn:
    """As a kill -9 leaves it: no handler, no flush, no farewell to broker or store."""
    os._exit(DIED)
