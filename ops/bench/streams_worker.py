"""The processes of `rollwire bench streams`: assemble, pack, and the two bare loops, each ready before the clock starts.

A process connects, takes over and stands in front of its first read of an input; there it says that it is ready and waits
for the word to go. So neither side's imports and start-up are in the figures. Until it is told to stop it works; then it
says how much CPU time it took from the word on.
"""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Mapping, Sequence
from multiprocessing.context import SpawnContext, SpawnProcess
from typing import TYPE_CHECKING, Final, NamedTuple, Self

from rollwire.ops.bench.streams_bare import Bare, BareLog, bare_assemble, bare_pack
from rollwire.ops.bench.streams_load import LINEAGE, MODEL
from rollwire.ops.logs import configure_logging
from rollwire.ops.memory import tune_memory
from rollwire.schemas.errors import DeadlineExceeded
from rollwire.streams.assemble_config import AssembleConfig
from rollwire.streams.pack import PackConfig
from rollwire.streams.run_assemble import run_assemble
from rollwire.streams.run_pack import run_pack
from rollwire.streams.seams.log import Reader, Record, TopicPartition
from rollwire.streams.seams.log_kafka import KafkaLog

if TYPE_CHECKING:
    from multiprocessing.queues import Queue
    from multiprocessing.synchronize import Event, Semaphore

_START_S: Final = 60.0
_HELD_S: Final = 300.0
_STOP_S: Final = 20.0
_GATED: Final = ("rollouts", "groups")
CONTEXT: Final[SpawnContext] = multiprocessing.get_context("spawn")


class Gate(NamedTuple):
    """Between the process that measures and one that works."""

    ready: Semaphore  # released once for every session that stands before its first read
    go: Event
    stop: Event
    cpu_s: Queue[float]

    def pass_through(self) -> None:
        self.ready.release()
        if not self.go.wait(_HELD_S):
            raise DeadlineExceeded(f"no word to go after {_HELD_S:g} s")


def new_gate() -> Gate:
    return Gate(CONTEXT.Semaphore(0), CONTEXT.Event(), CONTEXT.Event(), CONTEXT.Queue())


class _GatedReader:
    """A reader that is paused when it is assigned a processor's inputs, and held before its first poll of them."""

    def __init__(self, reader: Reader, gate: Gate) -> None:
        self._reader, self._gate = reader, gate
        self._held: tuple[TopicPartition, ...] = ()
        self.seek, self.pause, self.resume = reader.seek, reader.pause, reader.resume
        self.positions, self.close = reader.positions, reader.close

    def assign(self, positions: Mapping[TopicPartition, int]) -> None:
        self._reader.assign(positions)
        if any(p.topic in _GATED for p in positions):
            self._held = tuple(positions)
            self._reader.pause(self._held)

    def poll(self, max_records: int, timeout_s: float) -> list[Record]:
        if self._held:
            self._gate.pass_through()
            self._reader.resume(self._held)
            self._held = ()
        return self._reader.poll(max_records, timeout_s)


class GatedLog(KafkaLog):
    def __init__(self, bootstrap: str, prefix: str, gate: Gate) -> None:
        super().__init__(bootstrap, prefix, client_id="bench")
        self._gate = gate

    def reader(self) -> Reader:
        return _GatedReader(super().reader(), self._gate)


class Work(NamedTuple):
    """What a process is to do."""

    role: str  # "assemble" | "pack" | "bare-assemble" | "bare-pack"
    bootstrap: str
    prefix: str
    partitions: tuple[int, ...]
    config: AssembleConfig | PackConfig | Bare


def _work(work: Work, gate: Gate, stop: threading.Event) -> None:
    config = work.config
    if isinstance(config, Bare):
        loop = bare_assemble if work.role == "bare-assemble" else bare_pack
        bare = BareLog(work.bootstrap, work.prefix, client_id="bench")
        loop(bare, config, work.prefix, work.partitions, stop, gate.pass_through)
        return
    log = GatedLog(work.bootstrap, work.prefix, gate)
    if isinstance(config, AssembleConfig):
        run_assemble(log, config, prefix=work.prefix, partitions=work.partitions, stop=stop)
    else:
        warm_pack(config)
        run_pack(log, config, prefix=work.prefix, model=MODEL, lineage=LINEAGE, stop=stop)


def warm_pack(config: PackConfig) -> None:
    """Whatever is compiled at first use is compiled before the clock starts."""
    from rollwire.kernels.packing import plan_microbatches

    plan_microbatches([8] * 64, [1.0] * 64, config.ranks, config.token_budget)


def _process(work: Work, gate: Gate) -> None:
    configure_logging("warning")
    tune_memory()
    stop = threading.Event()
    began: list[float] = [0.0]

    def watch() -> None:
        gate.go.wait()
        began[0] = time.process_time()
        gate.stop.wait()
        gate.cpu_s.put(time.process_time() - began[0])
        stop.set()

    threading.Thread(target=watch, daemon=True).start()
    _work(work, gate, stop)


class Crew:
    """Processes that start together: a context that leaves none behind."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = works
        self._gates = [new_gate() for _ in works]
        self._processes: list[SpawnProcess] = []

    def __enter__(self) -> Self:
        for work, gate in zip(self._works, self._gates, strict=True):
            process = CONTEXT.Process(target=_process, args=(work, gate), daemon=True)
            process.start()
            self._processes.append(process)
        deadline = time.monotonic() + _START_S
        for work, gate, process in zip(self._works, self._gates, self._processes, strict=True):
            for _ in range(len(work.partitions) if "assemble" in work.role else 1):
                while not gate.ready.acquire(timeout=0.2):
                    if time.monotonic() > deadline or not process.is_alive():
                        self._end()
                        raise DeadlineExceeded(f"{work.role} did not get ready")
        return self

    def go(self) -> float:
        """The word to go; gives the (monotonic) second of it."""
        began = time.monotonic()
        for gate in self._gates:
            gate.go.set()
        return began

    def check(self) -> None:
        """Raises `DeadlineExceeded` where a process has ended."""
        for work, process in zip(self._works, self._processes, strict=True):
            if not process.is_alive():
                raise DeadlineExceeded(f"{work.role} ended with code {process.exitcode}")

    def stop(self) -> list[float]:
        """Ends the processes; their CPU seconds since the word to go, in order."""
        for gate in self._gates:
            gate.stop.set()
        return [gate.cpu_s.get(timeout=_STOP_S) for gate in self._gates]

    def __exit__(self, *_: object) -> None:
        self._end()

    def _end(self) -> None:
        for gate in self._gates:
            gate.go.set()
            gate.stop.set()
        for process in self._processes:
            process.join(_STOP_S)
            if process.is_alive():
                process.kill()
                process.join()
