"""Puts one version into the store from all ranks of a trainer, each its own part; rank 0 writes the manifest.

    every rank   compares and encodes its chunks            -> all ranks learn everyone's new chunk sums
    every rank   seals its shards with the whole's digests, puts them -> rank 0 learns their names
    every rank   (an anchor is due) gets the missing parts of the files that it writes, puts them
    rank 0       manifest, event                            -> all ranks learn the event

Whatever fails on one rank is told to all of them in the same exchange, so that the version fails everywhere and no rank
waits for another. Implements `publisher.VersionWriter`; runs in the publisher's background, on a group of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final, Literal, NamedTuple, TypeVar

import msgspec
import numpy as np

from rollwire.consumers.adapters.exchange import Bytes, Ranks
from rollwire.consumers.adapters.halo import Span, moves
from rollwire.consumers.weights.anchor import AnchorFile, anchor_file, plan_anchor
from rollwire.consumers.weights.links import put_shards
from rollwire.consumers.weights.manifest import MadeFrom, ObjectEntry, TensorEntry
from rollwire.consumers.weights.snapshot import Held, SnapshotWriter, Written
from rollwire.consumers.weights.sums import Layout
from rollwire.kernels.delta.encode import encode_chunks, seal, split_chunks
from rollwire.kernels.digest import StateDigest, held_sums, tensor_blake3
from rollwire.kernels.tensors import CHUNK_ELEMENTS, LANE_BYTES, State, Tensor, chunk_count, lane_dtype
from rollwire.schemas.errors import RollwireError, StateMismatch, WeightError
from rollwire.schemas.records import Claim, LinkObject, WeightVersion
from rollwire.streams.seams.store import ObjectStore

T = TypeVar("T")
_SUM: Final = 16


class _Share(msgspec.Struct, frozen=True, array_like=True):
    """What a rank's comparison gave."""

    shards: int
    changed: int
    sums: list[tuple[str, int, bytes]]  # name, chunk, its new sum


class _Files(msgspec.Struct, frozen=True, array_like=True):
    """What a rank wrote of an anchor."""

    objects: list[ObjectEntry]
    blake3: dict[str, str]


class _Answer(msgspec.Struct, frozen=True, array_like=True):
    error: str  # "" = it went well
    data: bytes


class Plan(NamedTuple):
    """How the whole state is shared out. The same on every rank."""

    layout: Layout
    published: Mapping[str, tuple[Span, ...]]  # by rank


class ShardedWriter:
    """States and digests: a rank's `State` holds its parts, its `StateDigest` knows every chunk of the whole."""

    def __init__(
        self,
        store: ObjectStore,
        ranks: Ranks,
        writer: SnapshotWriter,
        *,
        model: str,
        coder: Literal["gap", "context"],
        shard_bytes: int,
        anchor_shard_bytes: int,
        threads: int,
        puts: int,
        hf_config: Mapping[str, object] | None,
    ) -> None:
        self._store = store
        self._ranks = ranks
        self._writer = writer
        self._model = model
        self._coder: Literal["gap", "context"] = coder
        self._shard_bytes = shard_bytes
        self._anchor_shard_bytes = anchor_shard_bytes
        self._threads = threads
        self._puts = puts
        self._hf_config = hf_config
        self.plan: Plan | None = None  # set before the first version

    def write_first(self, version: int, step: int, state: State, published_us: int) -> Held:
        plan = self._planned()
        own = self._all(lambda: _pack_sums(state), bytes)
        digest = _joined(plan.layout, own)
        written = self._anchor(plan, version, step, state, digest)
        event = self._event(
            lambda: self._writer.first_version(version, step, plan.layout, digest, written, published_us)
        )
        return Held(event, state, digest)

    def write_next(
        self,
        base: Held,
        version: int,
        step: int,
        state: State,
        published_us: int,
        *,
        anchor: bool,
        made_from: MadeFrom | None = None,
    ) -> Held:
        plan = self._planned()
        encoded = self._try(
            lambda: encode_chunks(
                base.state, state, base=base.digest, coder=self._coder, threads=self._threads
            )
        )
        shards = [] if isinstance(encoded, str) else split_chunks(encoded.chunks, self._shard_bytes)

        def share() -> _Share:
            if isinstance(encoded, str):
                raise WeightError(encoded)
            sums = [(c.name, c.chunk, c.total.to_bytes(_SUM, "little")) for c in encoded.chunks]
            return _Share(len(shards), encoded.changed_elements, sums)

        shares = self._all(share, _Share)
        result = base.digest.copy()
        for one in shares:
            for name, chunk, total in one.sums:
                result.set(name, chunk, int.from_bytes(total, "little"))
        first = sum(one.shards for one in shares[: self._ranks.rank])
        count = sum(one.shards for one in shares)

        def put() -> list[LinkObject]:
            sealed = seal(shards, base.digest.hex, result.hex, coder=self._coder, first=first, of=count)
            return list(
                put_shards(
                    self._store, self._model, [s for s, _ in sealed], [h for _, h in sealed], puts=self._puts
                )
            )

        objects = tuple(o for some in self._all(put, list[LinkObject]) for o in some)
        snapshot = self._anchor(plan, version, step, state, result)[0] if anchor else None
        written = Written(objects, self._coder if objects else "", result, sum(one.changed for one in shares))
        event = self._event(
            lambda: self._writer.write_version(
                base.event,
                version,
                step,
                plan.layout,
                written,
                published_us,
                anchor=snapshot,
                made_from=made_from,
            )
        )
        return Held(event, state, result)

    def _anchor(
        self, plan: Plan, version: int, step: int, state: State, digest: StateDigest
    ) -> tuple[Claim, int]:
        """File k is written by rank k modulo their number, a round at a time: no rank holds more than one file."""
        ranks = self._ranks
        sizes = {name: math.prod(shape) * LANE_BYTES[dtype] for name, (dtype, shape) in plan.layout.items()}
        files = plan_anchor(sizes, shard_bytes=self._anchor_shard_bytes, hf_config=self._hf_config)
        wrote: list[_Files] = []
        for begin in range(0, len(files.files), ranks.count):
            turn = files.files[begin : begin + ranks.count]
            writers = {name: rank for rank, (_, names) in enumerate(turn) for name in names}
            whole = _gather_whole(ranks, plan, state, writers)

            def put(turn: tuple[tuple[str, tuple[str, ...]], ...] = turn, whole: State = whole) -> _Files:
                if ranks.rank >= len(turn):
                    return _Files([], {})
                file, names = turn[ranks.rank]
                entry = self._writer.put_anchor_file(AnchorFile(file, anchor_file(whole, names)))
                return _Files([entry], {name: tensor_blake3(whole[name]) for name in names})

            wrote += self._all(put, _Files)

        def finish() -> tuple[Claim, int]:
            entries = [entry for some in wrote for entry in some.objects]
            entries += [self._writer.put_anchor_file(file) for file in files.others]
            blake3 = {name: digest for some in wrote for name, digest in some.blake3.items()}
            tensors = [TensorEntry(name, *plan.layout[name], blake3[name]) for name in sorted(plan.layout)]
            return self._writer.write_anchor_manifest(version, step, tensors, digest, entries)

        return self._first(finish, tuple[Claim, int])

    def _event(self, make: Callable[[], WeightVersion]) -> WeightVersion:
        return self._first(make, WeightVersion)

    def _planned(self) -> Plan:
        if self.plan is None:
            raise WeightError("no plan says which rank publishes what")
        return self.plan

    def _try(self, work: Callable[[], T]) -> T | str:
        try:
            return work()
        except RollwireError as error:
            return f"{type(error).__name__}: {error}"

    def _all(self, work: Callable[[], T], kind: type[T]) -> list[T]:
        """Everyone's result, by rank; if one of them failed, all do: raises `WeightError` with the rank."""
        answers = [
            msgspec.msgpack.decode(data, type=_Answer)
            for data in self._ranks.gather(_answer(self._try(work)))
        ]
        for rank, answer in enumerate(answers):
            if answer.error:
                raise WeightError(f"rank {rank}: {answer.error}")
        return [msgspec.msgpack.decode(answer.data, type=kind) for answer in answers]

    def _first(self, work: Callable[[], T], kind: type[T]) -> T:
        """Rank 0's result, on every rank. As `_all`."""
        mine = _answer(self._try(work)) if self._ranks.rank == 0 else None
        answer = msgspec.msgpack.decode(self._ranks.tell(mine), type=_Answer)
        if answer.error:
            raise WeightError(f"rank 0: {answer.error}")
        return msgspec.msgpack.decode(answer.data, type=kind)


def _answer(result: object) -> bytes:
    failed = isinstance(result, str)
    return msgspec.msgpack.encode(
        _Answer(result if isinstance(result, str) else "", b"" if failed else msgspec.msgpack.encode(result))
    )


def _pack_sums(state: State) -> bytes:
    """The sums of the chunks that a rank holds: [(name, first chunk, 16 bytes a chunk)]."""
    return msgspec.msgpack.encode(
        [
            (
                name,
                t.start // CHUNK_ELEMENTS,
                b"".join(s.to_bytes(_SUM, "little") for s in held_sums(t, name)),
            )
            for name, t in state.items()
        ]
    )


def _joined(layout: Layout, packed: list[bytes]) -> StateDigest:
    """The whole's digest. Raises `StateMismatch` where a chunk is nobody's, or two ranks'."""
    sums = {name: bytearray(_SUM * chunk_count(math.prod(shape))) for name, (_, shape) in layout.items()}
    missing = {name: len(all_) // _SUM for name, all_ in sums.items()}
    for data in packed:
        for name, first, part in msgspec.msgpack.decode(data, type=list[tuple[str, int, bytes]]):
            sums[name][first * _SUM : first * _SUM + len(part)] = part
            missing[name] -= len(part) // _SUM
    wrong = sorted(name for name, left in missing.items() if left)
    if wrong:
        raise StateMismatch(f"{len(wrong)} tensors are not held by the ranks once, first {wrong[0]!r}")
    return StateDigest.from_sums({name: (*layout[name], bytes(sums[name])) for name in layout})


def _gather_whole(ranks: Ranks, plan: Plan, state: State, writers: Mapping[str, int]) -> State:
    """The whole tensors that this rank writes; `writers`: which rank writes which."""
    wanted: dict[str, list[Span]] = {}
    for name, writer in writers.items():
        elements = math.prod(plan.layout[name][1])
        wanted[name] = [(0, elements) if rank == writer else (0, 0) for rank in range(ranks.count)]
    whole: dict[str, Tensor] = {}
    for name, writer in writers.items():
        if writer != ranks.rank:
            continue
        dtype, shape = plan.layout[name]
        bits_N = np.empty(math.prod(shape), lane_dtype(dtype))
        held = state.get(name)
        if held is not None:
            bits_N[held.start : held.start + held.bits.size] = held.bits
        whole[name] = Tensor(dtype, shape, bits_N)

    def read(name: str, start: int, end: int) -> Bytes:
        held = state[name]
        return held.bits[start - held.start : end - held.start].view(np.uint8)

    def write(name: str, start: int, end: int, data: Bytes) -> None:
        whole[name].bits[start:end] = data.view(whole[name].bits.dtype)

    todo = moves({name: plan.published[name] for name in writers}, wanted)
    ranks.exchange(todo, lambda name: LANE_BYTES[plan.layout[name][0]], read, write)
    return whole
