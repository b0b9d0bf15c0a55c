"""Reads a delta against a state and verifies all of it before a byte of the state changes (law 5; C23, C31, C34)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollwire.kernels.delta import gap, many
from rollwire.kernels.delta.changes import gather, weigh_parts
from rollwire.kernels.delta.context import LAYOUTS, decode_context
from rollwire.kernels.delta.format import CODER_CONTEXT, CODER_GAP, FLOATS, Columns, Head, read_head
from rollwire.kernels.digest import StateDigest, aligned
from rollwire.kernels.memory import address_of
from rollwire.kernels.tensors import CHUNK_ELEMENTS, LANE_BYTES, State, lane_dtype
from rollwire.schemas.errors import BaseMismatch, DeltaCorrupt, DigestMismatch, StateMismatch, WeightError

_STATUS: Final = {
    gap.OUT_OF_RANGE: "a changed element lies beyond its chunk",
    gap.NO_CHANGE: "a changed element does not change",
    gap.CUT: "the payload does not end where its changes do",
    gap.BAD_PARAMETER: "an impossible parameter",
    many.DAMAGED: "its payload is damaged: fetch it again",
    many.OTHER_CODER: "its coder is not known for this dtype: upgrade this software",
}


class Change(NamedTuple):
    """The changed elements of one chunk, before and after."""

    name: str
    chunk: int
    positions_N: NDArray[np.uint32]  # in the chunk
    old_N: NDArray[Any]
    new_N: NDArray[Any]


class Changes(NamedTuple):
    """The changed elements of K chunks of equal lanes; chunk k has [at_K[k], at_K[k + 1]) of N."""

    names: tuple[str, ...]
    tensor_K: NDArray[np.int64]  # which of `names`
    chunk_K: NDArray[np.int64]
    elements_K: NDArray[np.int64]  # that the chunk covers
    at_K: NDArray[np.int64]
    positions_N: NDArray[np.uint32]  # in the chunk
    old_N: NDArray[Any]
    new_N: NDArray[Any]

    def addresses(self, state: State) -> NDArray[np.uint64]:
        """Of each chunk, in the arrays of `state`, which are contiguous."""
        return chunk_addresses(state, self.names, self.tensor_K, self.chunk_K)

    def chunks(self) -> Iterator[Change]:
        for k, tensor in enumerate(self.tensor_K.tolist()):
            mine = slice(int(self.at_K[k]), int(self.at_K[k + 1]))
            yield Change(
                self.names[tensor],
                int(self.chunk_K[k]),
                self.positions_N[mine],
                self.old_N[mine],
                self.new_N[mine],
            )


class Prepared:
    """A delta that was verified against a state, ready to be written into it. Holds the changed elements alone."""

    def __init__(self, state: State, changes: Sequence[Changes], digest: StateDigest) -> None:
        self._state = state
        self._changes = changes
        self._digest = digest

    @property
    def digest(self) -> StateDigest:
        """Of the state after `apply`."""
        return self._digest

    @property
    def names(self) -> frozenset[str]:
        """The tensors that change."""
        return frozenset(c.names[i] for c in self._changes for i in set(c.tensor_K.tolist()))

    @property
    def changed(self) -> int:
        """Elements."""
        return sum(c.positions_N.size for c in self._changes)

    @property
    def nbytes(self) -> int:
        """Memory held."""
        return sum(c.positions_N.nbytes + c.old_N.nbytes + c.new_N.nbytes for c in self._changes)

    def changes(self) -> Iterator[Change]:
        """Chunk by chunk, for whoever writes them elsewhere."""
        for some in self._changes:
            yield from some.chunks()

    def apply(self, target: State | None = None) -> None:
        """Writes the new elements in place: into the state that was given, or into `target` of the same layout.

        Raises `StateMismatch` before the first byte where an array cannot be written to; after that nothing fails.
        """
        self._write(target, undo=False)

    def undo(self, target: State | None = None) -> None:
        """Writes the old elements back. As `apply`."""
        self._write(target, undo=True)

    def _write(self, target: State | None, *, undo: bool) -> None:
        target = self._state if target is None else target
        for name in self.names:
            before, t = self._state[name], target.get(name)
            if t is None or (
                t is not before
                and (
                    (t.dtype, t.shape, t.start, t.bits.size, t.bits.dtype)
                    != (before.dtype, before.shape, before.start, before.bits.size, before.bits.dtype)
                )
            ):
                raise StateMismatch(
                    f"{name}: the target is not of the layout that the delta was prepared for"
                )
            flags = t.bits.flags
            if not (flags.writeable and flags.c_contiguous and flags.aligned):
                raise StateMismatch(
                    f"{name}: cannot be written in place: it is read-only, strided or unaligned"
                )
        for some in self._changes:
            values_N = some.old_N if undo else some.new_N
            many.scatter_kernel(values_N.dtype.itemsize)(
                some.addresses(target), some.elements_K, some.at_K, some.positions_N, values_N
            )


def chunk_addresses(
    state: State, names: Sequence[str], tensor_K: NDArray[np.int64], chunk_K: NDArray[np.int64]
) -> NDArray[np.uint64]:
    used = set(tensor_K.tolist())
    held = [state[name] if i in used else None for i, name in enumerate(names)]
    first_T = np.array([0 if t is None else address_of(t.bits) for t in held], np.int64)
    lane_T = np.array([1 if t is None else t.bits.dtype.itemsize for t in held], np.int64)
    start_T = np.array([0 if t is None else t.start for t in held], np.int64)
    address_K = first_T[tensor_K] + (chunk_K * CHUNK_ELEMENTS - start_T[tensor_K]) * lane_T[tensor_K]
    return address_K.astype(np.uint64)


class Incoming:
    """The shards of one delta as they come in, in any order: all of one delta, each once, for this state."""

    def __init__(self, digest: StateDigest, *, backwards: bool) -> None:
        self.backwards = backwards
        self._held = digest.hex
        self.table_limit = digest.table_limit
        self._result: str | None = None
        self._count = 0
        self._seen: set[int] = set()
        self._chunks: set[tuple[str, int]] = set()

    def accept(self, head: Head) -> None:
        """Raises `BaseMismatch` for another base, `DeltaCorrupt` for a shard of another delta, a repeat, a chunk seen before."""
        base, result = (head.result, head.base) if self.backwards else (head.base, head.result)
        if base != self._held:
            raise BaseMismatch(
                f"the delta is for {'result' if self.backwards else 'base'} {base[:16]}, held is {self._held[:16]}: "
                f"load the version that it is for, or an anchor"
            )
        if self._result is None:
            self._result, self._count = result, head.shards
        if (result, head.shards) != (self._result, self._count) or head.shard in self._seen:
            raise DeltaCorrupt(f"shard {head.shard} of {head.shards} is of another delta, or a repeat")
        self._seen.add(head.shard)
        if head.shards > 1:
            names, columns = head.columns.names, head.columns
            tensors = [names[i] for i in columns.tensor_K.tolist()]
            chunks = set(zip(tensors, columns.chunk_K.tolist(), strict=True))
            if not self._chunks.isdisjoint(chunks):
                name, chunk = min(self._chunks & chunks)
                raise DeltaCorrupt(f"{name}: chunk {chunk} is in two shards of a delta")
            self._chunks |= chunks

    def finish(self, digest: StateDigest) -> None:
        """All shards are in, and `digest` is what they gave. Raises `DeltaCorrupt`, `DigestMismatch`."""
        if len(self._seen) != self._count:
            raise DeltaCorrupt(f"{len(self._seen)} of {self._count} shards of a delta")
        if self._result is not None and digest.hex != self._result:
            raise DigestMismatch(f"the delta gave {digest.hex[:16]}, announced was {self._result[:16]}")


def prepare_delta(
    state: State,
    digest: StateDigest,
    shards: Iterable[bytes],
    *,
    backwards: bool = False,
    threads: int = 1,
) -> Prepared:
    """Verifies a delta, all of its shards in any order, against `state`, whose digest is `digest`; writes nothing.

    `backwards`: a gap delta, from its result to its base. Memory: 4 bytes and two elements for each changed element, a
    number that is checked against the state's size first.

    Raises `DeltaCorrupt` (damage, a missing or repeated shard), `StateMismatch` (tensors that are not here, or of another
    dtype or shape), `BaseMismatch` (made for another state), `DigestMismatch` (another result), `WeightError` (a context
    delta backwards).
    """
    result = digest.copy()
    incoming = Incoming(digest, backwards=backwards)
    changes: list[Changes] = []
    for data in shards:
        changes += read_shard(state, result, data, incoming, threads)
    incoming.finish(result)
    return Prepared(state, changes, result)


def read_shard(
    state: State, digest: StateDigest, data: bytes, incoming: Incoming, threads: int = 1
) -> list[Changes]:
    """The changes of one shard; `digest` is updated to the state that they give."""
    head = read_head(data, incoming.table_limit)
    if len(data) != head.size:
        raise DeltaCorrupt(
            f"shard {head.shard} of {head.shards} has {len(data)} bytes, its head says {head.size}"
        )
    check_tensors(state, head.columns)
    incoming.accept(head)
    body = np.frombuffer(data, np.uint8)[head.head_bytes :]
    every_K = np.arange(head.columns.chunk_K.size)
    return decode_chunks(
        state, digest, head.columns, every_K, body, 0, backwards=incoming.backwards, threads=threads
    )


def check_tensors(state: State, columns: Columns) -> None:
    """Every tensor of the shard is held whole, with its dtype and shape. Raises `StateMismatch`."""
    for name, dtype, shape in zip(columns.names, columns.dtypes, columns.shapes, strict=True):
        held = state.get(name)
        if held is None:
            raise StateMismatch(f"the delta changes {name!r}, which is not held")
        check_layout(name, (dtype, shape), (held.dtype, held.shape))
        if not held.whole or held.bits.dtype != lane_dtype(held.dtype):
            raise StateMismatch(f"{name}: {held.bits.size} of {held.elements} elements are held")


def check_layout(name: str, said: tuple[str, tuple[int, ...]], held: tuple[str, tuple[int, ...]]) -> None:
    """(dtype, shape) in the delta and in the state. Raises `StateMismatch`."""
    lane_dtype(said[0])
    if said != held:
        raise StateMismatch(f"{name}: {said[0]}{list(said[1])} in the delta, {held[0]}{list(held[1])} held")


def decode_chunks(
    state: State,
    digest: StateDigest,
    columns: Columns,
    chosen: NDArray[np.int64],
    body: NDArray[np.uint8],
    shift: int,
    *,
    backwards: bool,
    threads: int,
) -> list[Changes]:
    """Decodes and verifies the chosen chunks, all of which the state holds; `digest` moves on to the sums after them.

    `body` holds their payloads, `shift` bytes before where the columns say.
    """
    # Alignment is the compiled loops' business: what lies askew in memory is read from a copy.
    used = {columns.names[i] for i in set(columns.tensor_K[chosen].tolist())}
    readable = {name: state[name]._replace(bits=aligned(state[name].bits)) for name in used}
    lane_T = np.array([LANE_BYTES[dtype] for dtype in columns.dtypes], np.int64)
    lane_K = lane_T[columns.tensor_K[chosen]]
    made: list[Changes] = []
    for lane in sorted(set(lane_K.tolist())):
        mine_K = chosen[lane_K == lane]
        made.append(_decode_lane(readable, digest, columns, mine_K, body, shift, lane, backwards, threads))
    return made


def _decode_lane(
    state: State,
    digest: StateDigest,
    columns: Columns,
    chosen: NDArray[np.int64],
    body: NDArray[np.uint8],
    shift: int,
    lane: int,
    backwards: bool,
    threads: int,
) -> Changes:
    count = chosen.size
    tensor_K, chunk_K = columns.tensor_K[chosen], columns.chunk_K[chosen]
    elements_K, changed_K = columns.elements_K[chosen], columns.changed_K[chosen]
    if backwards and (columns.coder_K[chosen] != CODER_GAP).any():
        raise WeightError("a context delta does not run backwards: its inverse is a delta of its own")
    at_K = np.zeros(count + 1, np.int64)
    np.cumsum(changed_K, out=at_K[1:])
    total = int(at_K[-1])
    lane_type = np.dtype(f"<u{lane}")
    changes = Changes(
        columns.names,
        tensor_K,
        chunk_K,
        elements_K,
        at_K,
        np.empty(total, np.uint32),
        np.empty(total, lane_type),
        np.empty(total, lane_type),
    )
    status_K, low_K, high_K = np.zeros((3, count), np.int64)
    top_K = np.zeros(count, np.uint64)
    floats_T = np.array([dtype in FLOATS for dtype in columns.dtypes], np.uint8)
    offset_K, start_K = columns.offset_K[chosen] - shift, (chunk_K * CHUNK_ELEMENTS).astype(np.uint64)
    kernel, address_K = many.decode_kernel(lane), changes.addresses(state)
    many.scatter_kernel(lane)  # compiled before the swap needs it

    def work(first: int, last: int) -> None:
        kernel(
            first,
            last,
            body,
            offset_K,
            columns.size_K[chosen],
            columns.checksum_K[chosen],
            columns.coder_K[chosen],
            address_K,
            elements_K,
            start_K,
            floats_T[tensor_K],
            at_K,
            lane,
            backwards,
            changes.positions_N,
            changes.old_N,
            changes.new_N,
            status_K,
            low_K,
            high_K,
            top_K,
        )
        for k in (first + np.flatnonzero(status_K[first:last] == many.OTHER_CODER)).tolist():
            row = int(chosen[k])
            held = state[columns.names[tensor_K[k]]]
            if columns.coder_K[row] != CODER_CONTEXT or held.dtype not in LAYOUTS:
                continue
            at, offset = int(chunk_K[k]) * CHUNK_ELEMENTS - held.start, int(offset_K[k])
            base_M, payload = (
                held.bits[at : at + CHUNK_ELEMENTS],
                body[offset : offset + int(columns.size_K[row])],
            )
            mine = slice(int(at_K[k]), int(at_K[k + 1]))
            positions_N, old_N, new_N = changes.positions_N[mine], changes.old_N[mine], changes.new_N[mine]
            status_K[k] = decode_context(base_M, held.dtype, payload, positions_N, new_N)
            if status_K[k] == gap.OK:
                gather(base_M, positions_N, old_N)
                low_K[k], high_K[k], top_K[k] = weigh_parts(int(start_K[k]), positions_N, old_N, new_N)

    if threads > 1 and count > 1:
        cuts = np.linspace(0, count, min(count, 4 * threads) + 1).astype(int).tolist()
        with ThreadPoolExecutor(threads, thread_name_prefix="delta") as pool:
            list(pool.map(work, cuts[:-1], cuts[1:]))
    else:
        work(0, count)
    settle(digest, columns, chosen, status_K, (low_K, high_K, top_K), backwards=backwards)
    return changes


def settle(
    digest: StateDigest,
    columns: Columns,
    chosen: NDArray[np.int64],
    status_K: NDArray[np.int64],
    weights: tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.uint64]],
    *,
    backwards: bool,
) -> None:
    """Each chunk's sum after its changes against the announced one; `digest` moves on to it. `status_K` and `weights` are
    what the decoding gave of the chosen chunks."""
    tensor_K, chunk_K = columns.tensor_K[chosen], columns.chunk_K[chosen]

    def where(wrong_K: NDArray[np.bool_]) -> str:
        k = int(np.flatnonzero(wrong_K)[0])
        return f"{columns.names[tensor_K[k]]}: chunk {chunk_K[k]}"

    if status_K.any():
        status = int(status_K[np.flatnonzero(status_K)[0]])
        raise DeltaCorrupt(f"{where(status_K != gap.OK)}: {_STATUS[status]}")
    rows_K = digest.rows(columns.names)[tensor_K] + chunk_K
    before_K = digest.sums_at(rows_K)
    announced_K = np.frombuffer(columns.sums, "<u8").reshape(-1, 2)[chosen]
    after_K = many.added(before_K, *weights)
    if backwards and (announced_K != before_K).any():
        raise BaseMismatch(
            f"{where((announced_K != before_K).any(axis=1))}: what is held is not what the delta leads to"
        )
    if not backwards and (announced_K != after_K).any():
        raise DigestMismatch(
            f"{where((announced_K != after_K).any(axis=1))}: the delta gave other bits than it announces"
        )
    digest.set_at(rows_K, after_K)
