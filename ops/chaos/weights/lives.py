"""Lives of the roles: in memory, a thread each; for real, a process each, forked from one that has imported everything."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal, Protocol, Self

import msgspec
import structlog

from rollwire.consumers.weights.targets.folder import FolderTarget
from rollwire.consumers.weights.targets.numpy_state import NumpyTarget
from rollwire.ops.chaos.weights.effects import DIED, Crash, Effects
from rollwire.ops.chaos.weights.roles import Coder, collect_all, follow, publish, serve
from rollwire.ops.chaos.weights.targets import Failure
from rollwire.ops.demo.supervisor import child_environment, tail
from rollwire.schemas.errors import DeadlineExceeded, StackError
from rollwire.streams.seams.log import Log
from rollwire.streams.seams.store import ObjectStore

Role = Literal["publish", "follow", "numpy", "slice", "folder", "collect"]
_log = structlog.get_logger()
_START_S: Final = 60.0
_KILL_S: Final = 30.0


class Access(msgspec.Struct, frozen=True):
    """How a process reaches log and store."""

    bootstrap: str
    prefix: str
    endpoint: str | None
    bucket: str
    access_key: str | None
    secret_key: str | None
    region: str


class Task(msgspec.Struct, frozen=True):
    """One life: what it does, and where it ends."""

    role: Role
    lineage: str
    upto: int
    crash: Crash | None = None
    folder: str = ""  # of the role that serves one
    failure: Failure | None = None  # of the target, instead of a death
    coder: Coder = "gap"  # of who publishes


class Ended(msgspec.Struct, frozen=True):
    """How a life ended."""

    code: int  # 0 = done, DIED = at its crash, another one = an error, negative = a signal
    why: str
    seen: Mapping[str, int]  # how often each effect came by; of lives that ended well

    @property
    def died(self) -> bool:
        return self.code == DIED or self.code < 0


class Life(Protocol):
    def ended(self, timeout_s: float = 0.0) -> Ended | None:
        """How it ended; None where it has not within `timeout_s`."""
        ...

    def kill(self) -> None:
        """kill -9."""
        ...


class Lives(Protocol):
    def start(self, task: Task) -> Life: ...


def run_role(task: Task, log: Log, store: ObjectStore, effects: Effects) -> None:
    """The life of a task, in this thread. Raises what the role raises."""
    match task.role:
        case "publish":
            publish(log, store, task.lineage, task.upto, effects, task.coder)
        case "follow":
            follow(log, store, task.lineage, task.upto, effects)
        case "numpy":
            serve(log, store, task.lineage, task.upto, effects, NumpyTarget(), task.failure)
        case "collect":
            collect_all(log, store, effects)
        case "slice":
            serve(log, store, task.lineage, task.upto, effects, NumpyTarget(), task.failure, parts=True)
        case "folder":
            target = FolderTarget(Path(task.folder))
            serve(log, store, task.lineage, task.upto, effects, target, task.failure)


class MemoryLives:
    """Lives that are threads, on twins of log and store that outlive them."""

    def __init__(self, log: Log, store: ObjectStore) -> None:
        self._log = log
        self._store = store

    def start(self, task: Task) -> Life:
        return _ThreadLife(task, self._log, self._store)


class _ThreadLife:
    def __init__(self, task: Task, log: Log, store: ObjectStore) -> None:
        self._effects = Effects(task.crash)
        self._end: Ended | None = None
        self._thread = threading.Thread(
            target=self._run, args=(task, log, store), daemon=True, name=task.role
        )
        self._thread.start()

    def ended(self, timeout_s: float = 0.0) -> Ended | None:
        self._thread.join(timeout_s)
        return None if self._thread.is_alive() else self._end

    def kill(self) -> None:
        self._effects.dead.set()
        self._thread.join(
            _KILL_S
        )  # its threads end with it, so that nothing of it is left over in the next cell

    def _run(self, task: Task, log: Log, store: ObjectStore) -> None:
        try:
            run_role(task, log, store, self._effects)
        except SystemExit:  # its death
            self._end = Ended(DIED, "", {})
        except Exception as error:  # noqa: BLE001  # a thread's edge: how it ended is told to whoever waits for it
            dead = self._effects.dead.is_set()  # a death in the background reaches the foreground as an error
            self._end = Ended(DIED if dead else 1, f"{type(error).__name__}: {error}", {})
        else:
            self._end = Ended(0, "", dict(self._effects.seen))


class Forked(msgspec.Struct, frozen=True):
    """What the nursery says of a life: its pid when it began, its end when it ended."""

    number: int
    pid: int | None = None
    end: Ended | None = None


class Order(msgspec.Struct, frozen=True):
    """What the nursery is asked for."""

    number: int
    task: Task
    access: Access
    log: str  # file that takes what the life writes to standard output and error


class ForkedLives:
    """Lives that are processes. One process, the nursery, imports everything once and forks them, so that a life takes as
    long as its work does. It ends with this object."""

    def __init__(self, access: Access, logs: Path) -> None:
        self._access = access
        self._logs = logs
        self._lock = threading.Lock()
        self._number = 0
        self._lives: dict[int, _ForkedLife] = {}
        self._ready: queue.Queue[bytes] = queue.Queue()

    def __enter__(self) -> Self:
        self._logs.mkdir(parents=True, exist_ok=True)
        with (self._logs / "nursery.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "rollwire.ops.chaos.weights.nursery"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=child_environment(os.environ),
                start_new_session=True,
            )
        self._reader = threading.Thread(target=self._listen, daemon=True, name="nursery")
        self._reader.start()
        try:
            self._ready.get(timeout=_START_S)
        except queue.Empty:
            self.close()
            raise StackError(
                f"the nursery of processes did not start within {_START_S:g} s: {tail(self._logs / 'nursery.log')}"
            ) from None
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def at(self, access: Access) -> Lives:
        """Lives of the same nursery, elsewhere."""
        return _Elsewhere(self, access)

    def start(self, task: Task, access: Access | None = None) -> Life:
        if self._process.stdin is None:
            raise StackError("the nursery takes no orders")
        with self._lock:
            self._number += 1
            log = self._logs / f"{self._number:04d}-{task.role}.log"
            life = self._lives[self._number] = _ForkedLife(log)
            order = Order(self._number, task, access or self._access, str(log))
            self._process.stdin.write(msgspec.json.encode(order) + b"\n")
            self._process.stdin.flush()
        return life

    def close(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()  # it kills what still lives, and ends
        try:
            self._process.wait(10.0)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(10.0)
        self._reader.join(10.0)
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _listen(self) -> None:
        if self._process.stdout is None:
            return
        for line in self._process.stdout:
            if not line.startswith(b"{"):
                self._ready.put(line)
                continue
            said = msgspec.json.decode(line, type=Forked)
            self._lives[said.number].hear(said)


class _Elsewhere:
    def __init__(self, lives: ForkedLives, access: Access) -> None:
        self._lives = lives
        self._access = access

    def start(self, task: Task) -> Life:
        return self._lives.start(task, self._access)


class _ForkedLife:
    def __init__(self, log: Path) -> None:
        self._log = log
        self._born = threading.Event()
        self._over = threading.Event()
        self._pid: int | None = None
        self._end: Ended | None = None

    def hear(self, said: Forked) -> None:
        if said.pid is not None:
            self._pid = said.pid
            self._born.set()
        if said.end is not None:
            end = said.end
            self._end = end if end.code in (0, DIED) else msgspec.structs.replace(end, why=tail(self._log, 3))
            self._over.set()

    def ended(self, timeout_s: float = 0.0) -> Ended | None:
        return self._end if self._over.wait(timeout_s) else None

    def kill(self) -> None:
        if not self._born.wait(_START_S) or self._pid is None:
            raise DeadlineExceeded("the process never began")
        if not self._over.is_set():
            try:
                os.kill(self._pid, signal.SIGKILL)
            except ProcessLookupError:
                return
