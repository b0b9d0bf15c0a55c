"""All ranks of one trainer: rank 0 here, the others in processes of their own, joined by torch.distributed (gloo).

A step has three phases, each finished by every rank before the next begins: read, compute, apply. Only the last is a
collective, so a rank that finds a bad plan says so instead of leaving the others in an all-reduce.
"""

from __future__ import annotations

import multiprocessing
import os
import platform
import signal
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import NamedTuple

import torch
import torch.distributed as dist

# Exported, but not declared so: torch's public documentation names it torch.distributed.TCPStore.
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # pyright: ignore[reportPrivateImportUsage]

from rollwire.consumers.trainer.checkpoint import load_checkpoint, parameter_layout, snapshot_vectors
from rollwire.consumers.trainer.checkpoint_store import DueCheckpoint
from rollwire.consumers.trainer.config import TrainerConfig
from rollwire.consumers.trainer.figures import Figures
from rollwire.consumers.trainer.learner import Head
from rollwire.consumers.trainer.messages import (
    Apply,
    Command,
    Compute,
    Computed,
    Done,
    Failed,
    HasPlan,
    Move,
    Place,
    Read,
    Reply,
    Start,
    Stop,
    receive_command,
    receive_reply,
    send,
)
from rollwire.consumers.trainer.rank import RankWorker
from rollwire.consumers.trainer.weights import Snapshot, TrainedWeights
from rollwire.kernels.policy.config import PolicyConfig
from rollwire.kernels.tensors import State
from rollwire.schemas.errors import ConfigError, DeadlineExceeded, RankLost, RollwireError, StateMismatch
from rollwire.schemas.records import Claim, PackedBatch
from rollwire.schemas.release import code_version
from rollwire.streams.seams.clock import Clock, SystemClock
from rollwire.streams.seams.log import Log
from rollwire.streams.seams.sealing import OpenKeys
from rollwire.streams.seams.store import ObjectStore

Connect = Callable[[], tuple[Log, ObjectStore]]
"""Opens a rank's own log and store; a module-level function or a partial of one, since it goes to another process."""


class RankSpec(NamedTuple):
    """What a rank's process is started with."""

    policy_config: PolicyConfig
    config: TrainerConfig
    model: str
    lineage: str
    rank: int
    port: int  # of rank 0's TCPStore on 127.0.0.1


class RankGroup:
    """Rank 0's side, and the session's `Learner`. `initial` are the weights of a new lineage."""

    def __init__(
        self,
        log: Log,
        store: ObjectStore,
        policy_config: PolicyConfig,
        config: TrainerConfig,
        *,
        model: str,
        lineage: str,
        clock: Clock,
        connect: Connect | None,
        initial: State | None = None,
        keys: OpenKeys | None = None,
    ) -> None:
        if config.ranks > 1 and connect is None:
            raise ConfigError(
                f"{config.ranks} ranks need `connect`, so that every rank opens its own log and store"
            )
        self._store = store
        self._policy_config = policy_config
        self._config = config
        self._model = model
        self._lineage = lineage
        self._initial = initial
        self._parameters = parameter_layout(policy_config)
        self._settings = config.settings(
            torch_version=str(torch.__version__),
            policy=policy_config.model_dump_json(),
            cpu=f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
            code=code_version(),
        )
        self._snapshot: Snapshot | None = None  # what `start` gives to every rank
        self._children: list[tuple[SpawnProcess, Connection]] = []
        self._joined = False
        self.local = RankWorker(
            log,
            store,
            policy_config,
            config,
            model=model,
            lineage=lineage,
            rank=0,
            clock=clock,
            all_reduce=_all_reduce if config.ranks > 1 else _alone,
            keys=keys,
        )
        if connect is not None and config.ranks > 1:
            try:
                self._spawn(policy_config, model, lineage, connect, keys)
            except BaseException:
                self.close()
                raise

    @property
    def settings(self) -> dict[str, str]:
        return dict(self._settings)

    @property
    def plan(self) -> PackedBatch | None:
        return self.local.plan

    def begin(self) -> None:
        if self._initial is None:
            raise ConfigError(f"lineage {self._lineage} has no version yet and no initial weights were given")
        self.local.weights.load(self._initial)
        self._snapshot = self.local.weights.snapshot()

    def restore(self, claim: Claim) -> tuple[int, ...]:
        checkpoint, self._snapshot = load_checkpoint(
            self._store, claim, lineage=self._lineage, parameters=self._parameters
        )
        return checkpoint.next_offsets

    def start(
        self,
        version: int,
        offsets: Sequence[int],
        last_digest: str | None,
        newest_revert: int | None = None,
    ) -> None:
        """Every rank holds what `begin` or `restore` read, and reads on from its offset."""
        snapshot, self._snapshot = self._snapshot, None
        if snapshot is None:
            raise StateMismatch("there are no weights to start from: begin or restore first")
        self.local.weights.restore(snapshot)
        rng = snapshot.rng.numpy().tobytes()
        for rank, (_, connection) in enumerate(self._children, 1):
            place = Place(version, offsets[rank], last_digest, newest_revert)
            send(connection, Start(place, snapshot.updates, rng))
        if self._children:
            _collective(lambda: _broadcast(snapshot))
            self._replies()
        self.local.start(version, offsets[0], last_digest, newest_revert)

    def move(
        self, version: int, offsets: Sequence[int], last_digest: str | None, newest_revert: int | None
    ) -> None:
        for rank, (_, connection) in enumerate(self._children, 1):
            send(connection, Move(Place(version, offsets[rank], last_digest, newest_revert)))
        self._replies()
        self.local.start(version, offsets[0], last_digest, newest_revert)

    def read(self, timeout_s: float) -> list[Head] | None:
        """The next plan's heads by rank, or `None` while rank 0 has none."""
        head = self.local.read(timeout_s)
        if head is None:
            return None
        self._tell(Read())
        return [head, *(reply.head for reply in self._replies() if isinstance(reply, HasPlan))]

    def compute(self) -> list[Figures]:
        self._tell(Compute())
        mine = self.local.compute()
        return [mine, *(reply.figures for reply in self._replies() if isinstance(reply, Computed))]

    def apply(self) -> float:
        self._tell(Apply())
        norm = self.local.apply()
        self._replies()
        return norm

    def rate(self, step: int) -> float:
        return self._config.rate(step)

    def published(self) -> State:
        return self.local.weights.published()

    def checkpoint(self, step: int, next_offsets: tuple[int, ...]) -> DueCheckpoint:
        snapshot = self.local.weights.snapshot()
        return DueCheckpoint(
            self._store,
            snapshot_vectors(snapshot),
            model=self._model,
            lineage=self._lineage,
            step=step,
            updates=snapshot.updates,
            next_offsets=next_offsets,
            parameters=self._parameters,
            settings=self.settings,
        )

    def close(self) -> None:
        for _, connection in self._children:
            try:
                send(connection, Stop())
            except RankLost:
                continue
        for process, connection in self._children:
            process.join(timeout=5.0)
            if process.is_alive():
                process.kill()
                process.join(timeout=5.0)
            connection.close()
        self._children.clear()
        if self._joined:
            dist.destroy_process_group()
            self._joined = False
        self.local.close()

    def _spawn(
        self,
        policy_config: PolicyConfig,
        model: str,
        lineage: str,
        connect: Connect,
        keys: OpenKeys | None,
    ) -> None:
        config = self._config
        context = multiprocessing.get_context("spawn")
        deadline = timedelta(seconds=config.rank_deadline_s)
        # Port 0: the store binds a free one and says which, so nobody can take it in between.
        rendezvous = TCPStore(
            "127.0.0.1", 0, config.ranks, is_master=True, timeout=deadline, wait_for_workers=False
        )
        os.environ.setdefault(
            "OMP_NUM_THREADS", str(config.threads)
        )  # read when a rank's process loads torch
        for rank in range(1, config.ranks):
            here, there = context.Pipe()
            spec = RankSpec(policy_config, config, model, lineage, rank, rendezvous.port)
            process = context.Process(
                target=rank_main,
                args=(there, spec, connect, keys),
                name=f"trainer-rank-{rank}",
                daemon=True,
            )
            process.start()
            there.close()
            self._children.append((process, here))
        # A rank that cannot even start says so, or its pipe closes; only then is it worth waiting in a collective.
        self._replies()
        _join(rendezvous, 0, config)
        self._joined = True

    def _tell(self, command: Command) -> None:
        for _, connection in self._children:
            send(connection, command)

    def _replies(self) -> list[Reply]:
        return [
            receive_reply(connection, rank, self._config.rank_deadline_s)
            for rank, (_, connection) in enumerate(self._children, 1)
        ]


def rank_main(connection: Connection, spec: RankSpec, connect: Connect, keys: OpenKeys | None = None) -> None:
    """The process of one rank: obeys rank 0 until it says stop or dies."""
    # Ctrl-C reaches every process of a terminal; rank 0 decides, and finishes the step first.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    log, store = connect()
    worker = RankWorker(
        log,
        store,
        spec.policy_config,
        spec.config,
        model=spec.model,
        lineage=spec.lineage,
        rank=spec.rank,
        clock=SystemClock(),
        all_reduce=_all_reduce,
        keys=keys,
    )
    try:
        send(connection, Done())
        deadline = timedelta(seconds=spec.config.rank_deadline_s)
        rendezvous = TCPStore("127.0.0.1", spec.port, spec.config.ranks, is_master=False, timeout=deadline)
        _join(rendezvous, spec.rank, spec.config)
        while not isinstance(command := receive_command(connection), Stop):
            send(connection, _obey(worker, command, spec.config))
    except RankLost:
        return  # rank 0 is gone; there is nobody to tell
    finally:
        worker.close()
        log.close()
        if dist.is_initialized():
            dist.destroy_process_group()


def _obey(worker: RankWorker, command: Command, config: TrainerConfig) -> Reply:
    try:
        if isinstance(command, Start | Move):
            if isinstance(command, Start):
                _take_over(worker.weights, command)
            at = command.place
            worker.start(at.version, at.offset, at.last_digest, at.newest_revert)
            return Done()
        if isinstance(command, Read):
            head = worker.read(config.read_deadline_s)
            if head is None:
                raise DeadlineExceeded(
                    f"no plan within {config.read_deadline_s:g} s, though rank 0 has its slice of it"
                )
            return HasPlan(head)
        if isinstance(command, Compute):
            return Computed(worker.compute())
        worker.apply()
        return Done()
    except RollwireError as error:
        return Failed(type(error).__name__, str(error))
    except Exception as error:  # noqa: BLE001  the process's edge: rank 0 reports it
        return Failed("RollwireError", repr(error))


def _take_over(weights: TrainedWeights, start: Start) -> None:
    blank = weights.snapshot()
    snapshot = Snapshot(
        torch.empty_like(blank.masters_N),
        torch.empty_like(blank.exp_avg_N),
        torch.empty_like(blank.exp_avg_sq_N),
        start.updates,
        torch.frombuffer(bytearray(start.rng), dtype=torch.uint8),
    )
    _broadcast(snapshot)
    weights.restore(snapshot)


def _broadcast(snapshot: Snapshot) -> None:
    for vector in snapshot[:3]:
        dist.broadcast(vector, src=0)


def _join(rendezvous: TCPStore, rank: int, config: TrainerConfig) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # ranks of one machine; a cluster sets its own
    _collective(
        lambda: dist.init_process_group(
            "gloo",
            store=rendezvous,
            rank=rank,
            world_size=config.ranks,
            timeout=timedelta(seconds=config.rank_deadline_s),
        )
    )


def _collective(call: Callable[[], object]) -> None:
    try:
        call()
    except RuntimeError as error:  # what torch.distributed raises for a lost peer and for a time-out
        raise RankLost(f"a collective of the ranks failed: {error}") from error


def _all_reduce(vector: torch.Tensor) -> None:
    _collective(lambda: dist.all_reduce(vector, op=dist.ReduceOp.SUM))


def _alone(vector: torch.Tensor) -> None:
    """One rank's gradient is the whole gradient."""
