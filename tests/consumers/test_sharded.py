"""Sharded modules: who publishes what, and two gloo processes with FSDP2 whose versions are the whole model's to the bit."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from rollwire.consumers.adapters.halo import Move, Sharded, Span, moves, published_by, rows_held
from rollwire.consumers.adapters.sharded import ShardedPublisher, look
from rollwire.consumers.torch_states import load_module, module_state
from rollwire.consumers.trainer.history import VERSIONS
from rollwire.consumers.weights.paths import plan_path
from rollwire.consumers.weights.publisher import PublisherConfig
from rollwire.consumers.weights.reader import load_version
from rollwire.kernels.digest import StateDigest
from rollwire.kernels.tensors import CHUNK_ELEMENTS
from rollwire.schemas.errors import ConfigError, ObjectMissing, StateMismatch, StoreUnavailable, WeightError
from rollwire.schemas.records import WeightVersion
from rollwire.streams.emit import decode_record
from rollwire.streams.seams.log_memory import MemoryLog
from rollwire.streams.seams.scan import scan
from rollwire.streams.seams.store import ObjectInfo
from rollwire.streams.seams.store_memory import verify

pytestmark = pytest.mark.torch

LINEAGE = "0197a1b2-0000-7000-8000-0000000000ab"
RANKS = 2
WAIT_S = 240.0  # two processes import torch first
C = CHUNK_ELEMENTS


# -- who publishes what ------------------------------------------------------------------------------------------------


def test_every_chunk_is_published_by_the_rank_that_holds_its_first_element() -> None:
    rows = 1_000
    held = tuple((a * 700, b * 700) for a, b in (rows_held(rows, 3, rank) for rank in range(3)))
    spans = published_by(Sharded("BF16", (rows, 700), held), "w")
    assert spans == ((0, C), (C, 2 * C), (2 * C, rows * 700)) or spans == (
        (0, C),
        (C, 2 * C),
        (2 * C, 700_000),
    )
    for (start, end), (first, last) in zip(spans, held, strict=True):
        for chunk in range(start // C, -(-end // C)):
            assert first <= chunk * C < last


@pytest.mark.parametrize("elements", [0, 1, C - 1, C, C + 1, 3 * C + 7])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_what_is_moved_fills_what_is_published_and_nothing_twice(elements: int, ranks: int) -> None:
    held = tuple(rows_held(elements, ranks, rank) for rank in range(ranks))
    spans = published_by(Sharded("BF16", (elements,), held), "w")
    filled = [np.zeros(elements, np.int64) for _ in range(ranks)]
    for rank, ((a, b), (start, end)) in enumerate(zip(held, spans, strict=True)):
        filled[rank][max(a, start) : max(min(b, end), max(a, start))] += 1
    for move in moves({"w": held}, {"w": spans}):
        filled[move.target][move.start : move.end] += 1
        assert held[move.source][0] <= move.start < move.end <= held[move.source][1]
        assert move.target < move.source
    for (start, end), mine in zip(spans, filled, strict=True):
        assert mine[start:end].all()
        assert mine.sum() == end - start
    assert sum(end - start for start, end in spans) == elements


def test_shards_that_do_not_join_are_refused() -> None:
    for held in (((0, 5), (6, 10)), ((0, 5), (5, 9))):
        with pytest.raises(StateMismatch, match="w: "):
            published_by(Sharded("BF16", (10,), held), "w")
    whole: tuple[Span, ...] = ((0, 4), (4, 4))
    assert moves({"w": whole}, {"w": ((0, 0), (0, 4))}) == [Move("w", 0, 1, 0, 4)]


# -- two processes -----------------------------------------------------------------------------------------------------


class FolderStore:
    """An object store that processes share: a folder. `broken` lists keys' endings that cannot be put."""

    def __init__(self, folder: Path, broken: str = "") -> None:
        self._folder = folder
        self.broken = broken

    def _path(self, key: str) -> Path:
        return self._folder / key.replace("/", "~")

    def create(self, key: str, data: bytes) -> bool:
        if self.broken and key.endswith(self.broken):
            raise StoreUnavailable(f"no answer for {key}")
        path = self._path(key)
        if path.exists():
            return False
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_bytes(data)
        partial.replace(path)
        return True

    def get(self, key: str, *, sha256: str | None = None) -> bytes:
        try:
            data = self._path(key).read_bytes()
        except FileNotFoundError:
            raise ObjectMissing(key) from None
        verify(key, data, sha256)
        return data

    def get_range(self, key: str, start: int, end: int) -> bytes:
        return self.get(key)[start:end]

    def head(self, key: str) -> ObjectInfo | None:
        path = self._path(key)
        return ObjectInfo(key, path.stat().st_size, 0) if path.exists() else None

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        for path in sorted(self._folder.iterdir()):
            if (key := path.name.replace("~", "/")).startswith(prefix):
                yield ObjectInfo(key, path.stat().st_size, 0)

    def delete(self, key: str) -> None:
        self._path(key).unlink(missing_ok=True)

    def probe(self) -> None:
        pass


class Model(torch.nn.Module):
    """Cut in the middle of a chunk, smaller than a chunk, fewer rows than ranks, and a buffer that every rank has."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.big = torch.nn.Linear(700, 1_000)
        self.small = torch.nn.Linear(3, 5, bias=False)
        self.one = torch.nn.Linear(4, 1, bias=False)
        self.register_buffer("scale", torch.tensor(2.5))


def _model() -> Model:
    torch.manual_seed(7)
    return Model()


def _move(model: torch.nn.Module, step: int) -> None:
    """The same change on whole and sharded parameters."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.0 + 2.0**-9 * step)
        model.get_buffer("scale").add_(step)


def _named(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def _rank(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=RANKS)
    for job in JOBS:
        store = folder / job.__name__
        store.mkdir(exist_ok=True)
        job(rank, store)
        dist.barrier()
        sys.stdout.write(f"rank {rank} ends {job.__name__}\n")
    dist.destroy_process_group()


def _sharded() -> tuple[Model, Model]:
    whole, model = _model(), _model()
    fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,)))
    assert isinstance(model.big.weight, DTensor)
    return whole, model


def _events(log: MemoryLog) -> list[WeightVersion]:
    events = [decode_record(record) for record in scan(log, (VERSIONS,))]
    return [event for event in events if isinstance(event, WeightVersion)]


def _log(rank: int) -> MemoryLog | None:
    return MemoryLog({VERSIONS: 1}) if rank == 0 else None


def _publishes(rank: int, folder: Path) -> None:
    whole, model = _sharded()
    log, store = _log(rank), FolderStore(folder)
    config = PublisherConfig(anchor_every=2, anchor_shard_bytes=1 << 20, shard_bytes=1 << 10)
    wanted = [StateDigest.of(module_state(whole)).hex]
    with ShardedPublisher(
        log, store, model="m", lineage=LINEAGE, config=config, timeout_s=WAIT_S
    ) as publisher:
        assert publisher.start(_named(model)) == (0, 0)
        for step in range(1, 4):
            _move(whole, step)
            _move(model, step)
            wanted.append(StateDigest.of(module_state(whole)).hex)
            assert publisher.publish(_named(model), 10 * step) == step
        publisher.flush()
    if log is None:
        return
    events = _events(log)
    assert [event.state_digest for event in events] == wanted
    assert [event.step for event in events] == [0, 10, 20, 30]
    assert [event.anchor is not None for event in events] == [True, False, True, False]
    assert all(len(event.objects) >= 2 for event in events[1:])  # each rank its own part
    for version in (1, 2, 3):
        state = load_version(store, plan_path(events, [], None, version), None)
        assert StateDigest.of(state).hex == wanted[version]
    state = load_version(
        store, plan_path(events, [], 0, 3), load_version(store, plan_path(events, [], None, 0), None)
    )
    other = _model()
    load_module(other, state)
    assert StateDigest.of(module_state(other)).hex == wanted[3]


def _restarts(rank: int, folder: Path) -> None:
    whole, model = _sharded()
    log, store = _log(rank), FolderStore(folder)

    def publisher() -> ShardedPublisher:
        return ShardedPublisher(log, store, model="m", lineage=LINEAGE, timeout_s=WAIT_S)

    with publisher() as first:
        first.start(_named(model))
        _move(model, 1)
        first.publish(_named(model), 1)
    _move(whole, 1)
    with publisher() as second:
        assert second.start(_named(model)) == (1, 1)
        for step in (2, 3):
            _move(whole, step)
            _move(model, step)
            assert second.publish(_named(model), step) == step
        with pytest.raises(StateMismatch, match="not those of the version before"):
            second.publish(_named(model)[:-1], 4)
    if log is not None:
        events = _events(log)
        assert [event.version for event in events] == [0, 1, 2, 3]
        assert events[-1].state_digest == StateDigest.of(module_state(whole)).hex


def _fails(rank: int, folder: Path) -> None:
    """Rank 1's store is away: the version fails on both, and neither waits for the other."""
    _, model = _sharded()
    log, store = _log(rank), FolderStore(folder)
    publisher = ShardedPublisher(log, store, model="m", lineage=LINEAGE, timeout_s=WAIT_S)
    publisher.start(_named(model))
    if rank == 1:
        store.broken = ".rwdl"
    _move(model, 1)
    publisher.publish(_named(model), 1)
    with pytest.raises(WeightError, match="rank 1: StoreUnavailable"):
        publisher.flush()
    publisher.close(flush=False)
    if log is not None:
        assert [event.version for event in _events(log)] == [0]


def _refuses(rank: int, folder: Path) -> None:
    mesh = init_device_mesh("cpu", (RANKS,))
    columns = distribute_tensor(torch.zeros(4, 6), mesh, [Shard(1)])
    with pytest.raises(StateMismatch, match="known is a cut along dimension 0"):
        look("w", columns, RANKS, rank, "BF16")
    everywhere = distribute_tensor(torch.zeros(4, 6), mesh, [Replicate()])
    assert look("w", everywhere, RANKS, rank, None)[0] == Sharded("F32", (4, 6), ((0, 24), (24, 24)))


JOBS = (_publishes, _restarts, _fails, _refuses)


def test_two_processes_publish_restart_fail_and_refuse_alike(tmp_path: Path) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-P", __file__, str(rank), str(tmp_path)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(RANKS)
    ]
    try:
        outputs = [process.communicate(timeout=WAIT_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)


def test_rank_0_needs_a_log(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        with pytest.raises(ConfigError, match="rank 0 commits"):
            ShardedPublisher(None, FolderStore(tmp_path), model="m", lineage=LINEAGE)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    _rank(int(sys.argv[1]), Path(sys.argv[2]))
