"""The replicas of `rollwire bench sync`: each a process that follows one lineage into arrays of its own."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.context import SpawnContext
from typing import TYPE_CHECKING, Final, NamedTuple

from rollwire.consumers.weights.follower import Follower
from rollwire.consumers.weights.slices import Slice, choose_slices, share_of
from rollwire.consumers.weights.targets.numpy_state import NumpyTarget
from rollwire.ops.logs import configure_logging
from rollwire.ops.memory import tune_memory
from rollwire.streams.seams.log_kafka import KafkaLog
from rollwire.streams.seams.store_s3 import S3Store

if TYPE_CHECKING:
    from multiprocessing.synchronize import Event

_STOP_S: Final = 30.0
_CONTEXT: Final[SpawnContext] = multiprocessing.get_context("spawn")


class Where(NamedTuple):
    bootstrap: str
    prefix: str
    endpoint: str
    bucket: str
    access_key: str
    secret_key: str

    def log(self, name: str) -> KafkaLog:
        return KafkaLog(self.bootstrap, prefix=self.prefix, client_id=name)

    def store(self) -> S3Store:
        return S3Store(self.endpoint, self.bucket, self.access_key, self.secret_key)


class Replica(NamedTuple):
    name: str
    lineage: str
    slice: tuple[int, int] | None = None  # (rank, ranks) of every tensor; None = whole


@contextmanager
def replicas(where: Where, wanted: list[Replica]) -> Iterator[None]:
    stop = _CONTEXT.Event()
    processes = [_CONTEXT.Process(target=_follow, args=(where, one, stop), daemon=True) for one in wanted]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        stop.set()
        for process in processes:
            process.join(_STOP_S)
            if process.is_alive():
                process.kill()


def _follow(where: Where, replica: Replica, stop: Event) -> None:
    configure_logging()
    tune_memory()
    log = where.log(replica.name)
    spec = {} if replica.slice is None else {"*": Slice(*replica.slice)}
    follower = Follower(
        log,
        where.store(),
        NumpyTarget(),
        fleet="bench",
        replica=replica.name,
        lineage=replica.lineage,
        choose=choose_slices(spec) if spec else None,
        share=share_of(spec),
    )
    try:
        stop.wait()
    finally:
        follower.close()
        log.close()
