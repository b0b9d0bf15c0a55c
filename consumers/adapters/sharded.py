"""Publishes a module that is sharded over ranks (FSDP2, any DTensor cut along dimension 0): each rank its own part.

    dist.init_process_group(...)                              # on every rank, as for FSDP
    fully_shard(model)
    publisher = ShardedPublisher(log, store, model="policy", lineage=lineage)    # log: used on rank 0 alone
    publisher.start(model.named_parameters())                 # version 0 of a new lineage, or where the old one stands
    ...
    optimizer.step()
    publisher.publish(model.named_parameters(), step)         # on every rank, in the same order
    publisher.close()

No rank ever holds the whole model. On the trainer's thread a rank copies its shard into pooled memory and hands less than
a chunk per tensor to the rank before it (`halo`); comparing, encoding and putting are background work on every rank
(`sharded_writer`), and rank 0 commits. Names are those of the published checkpoint, so a wrapper's prefix is the caller's to
strip. What fails on one rank fails the version on all of them: start again from the trainer's checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple, Self

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.tensor import DTensor, Replicate, Shard

from rollwire.consumers.adapters.exchange import Bytes, Ranks
from rollwire.consumers.adapters.halo import Sharded, Span, moves, published_by, rows_held
from rollwire.consumers.adapters.sharded_writer import Plan, ShardedWriter
from rollwire.consumers.torch_states import TorchSource, torch_source
from rollwire.consumers.version_publisher import VersionPublisher
from rollwire.consumers.weights.buffers import Allocate, Source
from rollwire.consumers.weights.paths import plan_path
from rollwire.consumers.weights.publisher import PublisherConfig, SnapshotPublisher
from rollwire.consumers.weights.reader import load_path
from rollwire.consumers.weights.snapshot import SnapshotWriter
from rollwire.kernels.tensors import LANE_BYTES, State
from rollwire.schemas.errors import ConfigError, RollwireError, StateMismatch, WeightError
from rollwire.schemas.records import WeightVersion
from rollwire.streams.seams.log import Log
from rollwire.streams.seams.store import ObjectStore

Floats = Literal["BF16", "F16", "F32"]


class Started(NamedTuple):
    version: int  # the last one that is committed
    step: int  # the trainer's step of it


class _Word(msgspec.Struct, frozen=True, array_like=True):
    """What rank 0 says before a version is copied."""

    error: str
    committed: int
    events: list[WeightVersion] = []  # at the start of an old lineage: a way to its last version


class _Part(NamedTuple):
    """Implements `Source`: what this rank publishes of a tensor, as far as it holds it; the halo is written later."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    elements: int
    shard: TorchSource  # what it holds, flat
    begin: int  # the flat element that the shard begins with

    @property
    def allocate(self) -> Allocate | None:
        return self.shard.allocate

    def copy_to(self, bits_N: NDArray[Any]) -> None:
        first = max(self.begin, self.start)
        last = min(self.begin + self.shard.elements, self.start + self.elements)
        if first < last:
            part = self.shard.value[first - self.begin : last - self.begin]
            self.shard._replace(value=part).copy_to(bits_N[first - self.start : last - self.start])

    def wait(self) -> None:
        self.shard.wait()


class ShardedPublisher:
    """Made, used and closed by every rank, each from one thread. `timeout_s`: how long ranks wait for one another."""

    def __init__(
        self,
        log: Log | None,
        store: ObjectStore,
        *,
        model: str,
        lineage: str,
        prefix: str = "rollwire.",
        name: str = "trainer",
        dtype: Floats | None = "BF16",
        hf_config: Mapping[str, Any] | None = None,
        config: PublisherConfig | None = None,
        timeout_s: float = 120.0,
    ) -> None:
        # One rank's patience would be another one's time-out: the store's own tries must do.
        config = (config or PublisherConfig()).model_copy(update={"store_patience_s": 0.0})
        self._config = config
        self._dtype: Floats | None = dtype
        self._front = Ranks(timeout_s)  # of the trainer's thread
        self._back = Ranks(timeout_s)  # of the background
        self._store = store
        plain = SnapshotWriter(
            store,
            model=model,
            lineage=lineage,
            shard_bytes=config.shard_bytes,
            anchor_shard_bytes=config.anchor_shard_bytes,
            threads=config.threads,
            hf_config=hf_config,
            coder=config.coder,
        )
        self._writer = ShardedWriter(
            store,
            self._back,
            plain,
            model=model,
            coder=config.coder,
            shard_bytes=config.shard_bytes,
            anchor_shard_bytes=config.anchor_shard_bytes,
            threads=config.threads,
            puts=config.puts,
            hf_config=hf_config,
        )
        self._snapshots = SnapshotPublisher(
            store, model=model, lineage=lineage, config=config, writer=self._writer
        )
        self._committed = -1  # as far as this rank was told
        self._version = -1
        self._versions: VersionPublisher | None = None
        if self._front.rank == 0:
            if log is None:
                raise ConfigError("rank 0 commits the versions: it needs the log")
            self._versions = VersionPublisher(
                log,
                store,
                model=model,
                lineage=lineage,
                ranks=0,
                prefix=prefix,
                name=name,
                config=config,
                snapshots=self._snapshots,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close(flush=kind is None)

    def start(self, named: Iterable[tuple[str, torch.Tensor]]) -> Started:
        """Publishes `named` as version 0 of a new lineage, and waits for it; an old one goes on from its last version, whose
        parts each rank reads. The trainer restores its own checkpoint."""
        tensors = self._look(named)
        plan = self._plan(tensors)
        word = self._word(self._way)
        if not word.events:
            self._submit(tensors, plan, 0)
            self.flush()
            return Started(0, 0)
        last = max(word.events, key=lambda event: event.version)
        path = plan_path(word.events, [], None, last.version)

        def choose(layout: object) -> dict[str, Span]:
            return {name: spans[self._front.rank] for name, spans in plan.published.items()}

        loaded = load_path(self._store, path, None, choose=choose)
        own = {name: t for name, t in loaded.state.items() if t.bits.size}
        self._snapshots.resume(last, own, loaded.digest)
        if self._versions is not None:
            self._versions.resume(last)
        self._version = self._committed = last.version
        return Started(last.version, last.step)

    def publish(self, named: Iterable[tuple[str, torch.Tensor]], step: int) -> int:
        """The next version, made at the trainer's step `step`; its number. Returns when the weights are copied; waits
        before that while `max_uncommitted` versions are on their way.

        Raises `StateMismatch` for tensors that are cut otherwise, `RankLost`, and whatever stopped an earlier version.
        """
        tensors = self._look(named)
        plan = self._plan(tensors)
        word = self._word(self._room)
        self._catch_up(word.committed)
        return self._submit(tensors, plan, step)

    def flush(self) -> None:
        """Waits on every rank until everything published is committed. Raises what stopped it."""

        def all_committed() -> _Word:
            if self._versions is not None:
                self._versions.flush()
            return _Word("", self._version)

        self._catch_up(self._word(all_committed).committed)

    def close(self, *, flush: bool = True) -> None:
        try:
            if flush:
                self.flush()
        finally:
            if self._versions is not None:
                self._versions.close(flush=False)
            else:
                self._snapshots.close()
            self._front.close()
            self._back.close()

    # -- words of rank 0 ----------------------------------------------------------------------------------------------

    def _way(self) -> _Word:
        self._store.probe()
        events = [] if self._versions is None else self._versions.way()
        return _Word("", -1, events)

    def _room(self) -> _Word:
        if self._versions is None:
            return _Word("", -1)
        self._versions.wait_for_room()
        return _Word("", -1 if self._versions.last is None else self._versions.last.version)

    def _word(self, say: Any) -> _Word:
        mine: bytes | None = None
        if self._front.rank == 0:
            try:
                word = say()
            except RollwireError as error:
                self._front.tell(msgspec.msgpack.encode(_Word(f"{type(error).__name__}: {error}", -1)))
                raise
            mine = msgspec.msgpack.encode(word)
        told = msgspec.msgpack.decode(self._front.tell(mine), type=_Word)
        if told.error:
            raise WeightError(f"rank 0: {told.error}")
        return told

    def _catch_up(self, committed: int) -> None:
        """What rank 0 committed is the base to fall back to here as well; its own publisher knows already."""
        if self._versions is None:
            for version in range(self._committed + 1, committed + 1):
                self._snapshots.stored(version, self._config.submit_timeout_s)
                self._snapshots.committed(version)
        self._committed = max(self._committed, committed)

    # -- this rank's part ---------------------------------------------------------------------------------------------

    def _look(self, named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, tuple[Sharded, TorchSource]]:
        found: dict[str, tuple[Sharded, TorchSource]] = {}
        for name, value in named:
            if name in found:
                raise StateMismatch(
                    f"tensor {name!r} is given twice: a tied tensor is published under one name"
                )
            found[name] = look(name, value, self._front.count, self._front.rank, self._dtype)
        return found

    def _plan(self, tensors: Mapping[str, tuple[Sharded, TorchSource]]) -> Plan:
        layout = {name: (one.dtype, one.shape) for name, (one, _) in tensors.items()}
        if self._writer.plan is not None and self._writer.plan.layout == layout:
            return self._writer.plan
        if self._writer.plan is not None:
            raise StateMismatch("names, dtypes or shapes are not those of the version before")
        plan = Plan(layout, {name: published_by(one, name) for name, (one, _) in tensors.items()})
        self._writer.plan = plan
        return plan

    def _submit(self, tensors: Mapping[str, tuple[Sharded, TorchSource]], plan: Plan, step: int) -> int:
        state = self._copy(tensors, plan)
        version = self._version + 1
        if self._versions is not None:
            self._versions.publish_alone(state, step)
        else:
            self._snapshots.submit(version, step, state)
        self._version = version
        return version

    def _copy(self, tensors: Mapping[str, tuple[Sharded, TorchSource]], plan: Plan) -> State:
        rank = self._front.rank
        sources: dict[str, Source] = {}
        for name, (one, shard) in tensors.items():
            start, end = plan.published[name][rank]
            if start < end:
                sources[name] = _Part(
                    one.dtype, one.shape, start, end - start, _flat(shard), one.held[rank][0]
                )
        state = self._snapshots.copy(sources)

        def read(name: str, start: int, end: int) -> Bytes:
            one, shard = tensors[name]
            begin = one.held[rank][0]
            bits_N = np.empty((end - start) * LANE_BYTES[one.dtype], np.uint8).view(
                f"<u{LANE_BYTES[one.dtype]}"
            )
            part = _flat(shard)
            piece = part._replace(value=part.value[start - begin : end - begin])
            piece.copy_to(bits_N)
            piece.wait()
            return bits_N.view(np.uint8)

        def write(name: str, start: int, end: int, data: Bytes) -> None:
            mine = state[name]
            mine.bits[start - mine.start : end - mine.start] = data.view(mine.bits.dtype)

        todo = moves({name: one.held for name, (one, _) in tensors.items()}, plan.published)
        self._front.exchange(todo, lambda name: LANE_BYTES[plan.layout[name][0]], read, write)
        return state


def look(
    name: str, value: torch.Tensor, ranks: int, rank: int, dtype: Floats | None
) -> tuple[Sharded, TorchSource]:
    """How a tensor is shared out, and this rank's shard. What is whole on every rank is rank 0's to publish.

    Raises `StateMismatch` for another cut than along dimension 0 of a mesh of all ranks.
    """
    shape = tuple(value.shape)
    elements = math.prod(shape)
    alone: tuple[Span, ...] = ((0, elements), *(((elements, elements),) * (ranks - 1)))
    if not isinstance(value, DTensor):
        source = torch_source(name, value, dtype)
        return Sharded(source.dtype, shape, alone), source
    local: torch.Tensor = value.to_local().detach()
    source = torch_source(name, local, dtype)
    placements = tuple(value.placements)
    if all(isinstance(placement, Replicate) for placement in placements):
        return Sharded(source.dtype, shape, alone), source
    if placements != (Shard(0),) or value.device_mesh.size() != ranks:
        raise StateMismatch(
            f"{name} is placed as {placements} on a mesh of {value.device_mesh.size()} of {ranks} ranks; "
            "known is a cut along dimension 0 over all of them"
        )
    row = elements // shape[0] if shape[0] else 0
    held = tuple((a * row, b * row) for a, b in (rows_held(shape[0], ranks, r) for r in range(ranks)))
    if local.numel() != held[rank][1] - held[rank][0]:
        raise StateMismatch(
            f"{name}: rank {rank} holds {local.numel()} elements, its rows have {held[rank][1] - held[rank][0]}"
        )
    return Sharded(source.dtype, shape, held), source


def _flat(shard: TorchSource) -> TorchSource:
    return shard._replace(value=shard.value.reshape(-1))
