"""What is done to the clients and the broker of a history run: a pause, kills, EndTxn requests cut and held, rebalances."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, Literal

import msgspec
from confluent_kafka import KafkaError

from rollwire.ops.chaos.history_book import book_file
from rollwire.ops.chaos.history_clients import COMMIT_S, Task
from rollwire.ops.chaos.proxy import ADD_PARTITIONS_TO_TXN, END_TXN, KafkaProxy, Side, error_code
from rollwire.ops.demo.supervisor import child_environment, describe_exit
from rollwire.ops.stack import StackInfo
from rollwire.ops.stack.processes import is_alive
from rollwire.schemas.errors import DeadlineExceeded, RollwireError

Kind = Literal["pause-broker", "kill-producer", "hold-request", "hold-answer", "cut-request", "cut-answer", "storm"]  # fmt: skip
KINDS: Final[tuple[Kind, ...]] = Kind.__args__  # type: ignore[attr-defined]
_CATCH_S: Final = 6.0
_OPEN_S: Final = 0.06
_STOP_S: Final = 15.0
_READY_S: Final = 20.0
_RUN: Final = "from rollwire.ops.chaos.history_clients import main; main()"


class ClientDied(RollwireError):
    """A client of the run ended by itself: that is a fault of ours, not of the run."""


class Clients:
    """The client processes by name. Each start has a number of its own, from 1."""

    def __init__(self, task: Task, logs: Path) -> None:
        self._task = task
        self._logs = logs
        self._starts = 0
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._numbers: dict[str, int] = {}
        self.producers: list[str] = []

    def start(self, role: Literal["producer", "member"], name: str) -> None:
        self._starts += 1
        self._numbers[name] = self._starts
        task = msgspec.structs.replace(self._task, role=role, name=name, number=self._starts)
        self._logs.mkdir(parents=True, exist_ok=True)
        with (self._logs / f"{name}.log").open("ab") as out:
            self._running[name] = subprocess.Popen(
                [sys.executable, "-P", "-c", _RUN, msgspec.json.encode(task).decode()],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=child_environment(os.environ),
                start_new_session=True,
            )
        if role == "producer" and name not in self.producers:
            self.producers.append(name)

    def wait_ready(self, name: str) -> None:
        """Until the client has opened its book: from then on it heeds SIGTERM. Raises `ClientDied` where it does not."""
        book = book_file(Path(self._task.folder), f"{name}.{self._numbers[name]}")
        deadline = time.monotonic() + _READY_S
        while not book.exists():
            if time.monotonic() > deadline:
                raise ClientDied(f"{name} was not ready after {_READY_S:g} s")
            self.check()
            time.sleep(0.02)

    def kill(self, name: str) -> None:
        process = self._running.pop(name)
        process.kill()
        process.wait(_STOP_S)

    def stop(self, names: Sequence[str]) -> None:
        """SIGTERM to all at once. Raises `ClientDied` for one that does not end well."""
        processes = {name: self._running.pop(name) for name in names}
        for process in processes.values():
            process.send_signal(signal.SIGTERM)
        for name, process in processes.items():
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(_STOP_S)
                raise ClientDied(f"{name} did not stop within {_STOP_S:g} s") from None
            if process.returncode != 0:
                raise ClientDied(self._how(name, process))

    def check(self) -> None:
        """Raises `ClientDied` for one that ended without having been told to."""
        for name, process in self._running.items():
            if process.poll() is not None:
                raise ClientDied(self._how(name, process))

    def kill_all(self) -> None:
        for name in list(self._running):
            self.kill(name)

    def names(self) -> list[str]:
        return list(self._running)

    def _how(self, name: str, process: subprocess.Popen[bytes]) -> str:
        log = self._logs / f"{name}.log"
        end = log.read_text(errors="replace")[-2_000:]
        return f"{name} ended with {describe_exit(process.returncode)}; the end of {log}:\n{end}"


class Nemesis:
    """Strikes once a call; says in one line what it did."""

    def __init__(
        self, stack: StackInfo, proxy: KafkaProxy, clients: Clients, seed: int, stop: threading.Event
    ) -> None:
        self._stack = stack
        self._proxy = proxy
        self._clients = clients
        self._random = random.Random(seed)
        self._stop = stop
        self._order = self._kinds()

    def strike(self, kind: Kind | None = None) -> tuple[Kind, str]:
        """`kind`: by default the next of a shuffled round of all kinds. Raises `DeadlineExceeded` where nothing was hit."""
        chosen: Kind = next(self._order) if kind is None else kind
        strikes: dict[Kind, Callable[[], str]] = {
            "pause-broker": self._pause_broker,
            "kill-producer": self._kill_producer,
            "hold-request": lambda: self._hold(Side.REQUEST, cut=False),
            "hold-answer": lambda: self._hold(Side.RESPONSE, cut=False),
            "cut-request": lambda: self._hold(Side.REQUEST, cut=True),
            "cut-answer": lambda: self._hold(Side.RESPONSE, cut=True),
            "storm": self._storm,
        }
        return chosen, strikes[chosen]()

    def _kinds(self) -> Iterator[Kind]:
        while True:
            yield from self._random.sample(KINDS, len(KINDS))

    def _pause_broker(self) -> str:
        seconds = self._random.uniform(1.5, 5.0)
        broker = self._stack.services["kafka"]
        if not is_alive(broker.pid, broker.started):
            raise ClientDied("the broker has ended")
        os.kill(broker.pid, signal.SIGSTOP)
        try:
            self._stop.wait(seconds)
        finally:
            os.kill(broker.pid, signal.SIGCONT)
        return f"SIGSTOP of the broker for {seconds:.1f} s"

    def _kill_producer(self) -> str:
        name = self._random.choice(self._clients.producers)
        self._clients.kill(name)
        seconds = self._random.uniform(0.0, 1.0)
        self._stop.wait(seconds)
        self._clients.start("producer", name)
        return f"kill -9 of {name}, started again {seconds:.1f} s later"

    def _hold(self, side: Side, *, cut: bool) -> str:
        name = self._random.choice(self._clients.producers)
        hold = self._proxy.hold_end_txn(f"history.{name}", side, cut=cut)
        try:
            request = hold.wait(_CATCH_S)
            began = time.monotonic()
            if cut and self._random.random() < 0.25:
                self._stop.wait(self._random.uniform(0.0, 0.1))  # among the client's own second tries
            else:
                self._await_transaction(f"history.{name}")
            code = error_code(hold.release(), request.api_version)
        finally:
            hold.cancel()
        held_s = time.monotonic() - began
        answer = "taken" if code == 0 else f"refused: {KafkaError(code).name()}"
        did = "its connection cut, " if cut else ""
        if side is Side.RESPONSE:
            return f"answer to an EndTxn of {name} held, {did}let go {held_s:.2f} s later"
        return f"EndTxn of {name} held, {did}let go {held_s:.2f} s later: {answer}"

    def _await_transaction(self, transactional_id: str) -> None:
        """Past the client's time-out, into the middle of a transaction that stays open for a while."""
        deadline = time.monotonic() + COMMIT_S + _CATCH_S
        while (left_s := deadline - time.monotonic()) > 0:
            if not self._proxy.watch_transaction(transactional_id, ADD_PARTITIONS_TO_TXN).wait(left_s):
                return
            if not self._proxy.watch_transaction(transactional_id, END_TXN).wait(_OPEN_S):
                return

    def _storm(self) -> str:
        """Members come and go, well and badly."""
        extra = ["storm-1", "storm-2", "storm-3"]
        for name in extra:
            self._clients.start("member", name)
            self._clients.wait_ready(name)
            self._stop.wait(self._random.uniform(0.0, 1.0))
        self._random.shuffle(extra)
        self._clients.stop(extra[:1])
        self._clients.kill(extra[1])
        self._stop.wait(self._random.uniform(0.0, 1.0))
        self._clients.stop(extra[2:])
        return "three members joined, one left, one was killed, one left"


def try_to_strike(nemesis: Nemesis, tries: int = 3) -> tuple[Kind, str] | None:
    """A strike that hits, or None: an EndTxn can only be held while its client commits."""
    for _ in range(tries):
        try:
            return nemesis.strike()
        except DeadlineExceeded:
            continue
    return None
