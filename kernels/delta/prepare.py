"""Reads a delta against a state and verifies all of it before a byte of the state changes (law 5; C23, C31, C34)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollwire.kernels.delta import gap
from rollwire.kernels.delta.changes import gather, scatter, weigh
from rollwire.kernels.delta.context import LAYOUTS, decode_context
from rollwire.kernels.delta.format import CODER_CONTEXT, CODER_GAP, Head, Row, payload_checksum, read_head
from rollwire.kernels.digest import MASK_128, StateDigest
from rollwire.kernels.tensors import CHUNK_ELEMENTS, State, Tensor, lane_dtype
from rollwire.schemas.errors import BaseMismatch, DeltaCorrupt, DigestMismatch, StateMismatch, WeightError

_STATUS: Final = {
    gap.OUT_OF_RANGE: "a changed element lies beyond its chunk",
    gap.NO_CHANGE: "a changed element does not change",
    gap.CUT: "the payload does not end where its changes do",
    gap.BAD_PARAMETER: "an impossible parameter",
}


class Change(NamedTuple):
    """The changed elements of one chunk, before and after."""

    name: str
    chunk: int
    positions_N: NDArray[np.uint32]  # in the chunk
    old_N: NDArray[Any]
    new_N: NDArray[Any]


class Wanted(NamedTuple):
    """A chunk of a shard that is to be decoded."""

    row: Row
    at: int  # its place in the row
    offset: int  # of its payload, from the end of the head


class Prepared:
    """A delta that was verified against a state, ready to be written into it. Holds the changed elements alone."""

    def __init__(self, state: State, changes: Sequence[Change], digest: StateDigest) -> None:
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
        return frozenset(change.name for change in self._changes)

    @property
    def changed(self) -> int:
        """Elements."""
        return sum(change.positions_N.size for change in self._changes)

    @property
    def nbytes(self) -> int:
        """Memory held."""
        return sum(c.positions_N.nbytes + c.old_N.nbytes + c.new_N.nbytes for c in self._changes)

    @property
    def changes(self) -> Sequence[Change]:
        return self._changes

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
            fits = (
                t is not None
                and (t.dtype, t.shape, t.start, t.bits.size)
                == (before.dtype, before.shape, before.start, before.bits.size)
                and t.bits.dtype == before.bits.dtype
            )
            if t is None or not fits:
                raise StateMismatch(
                    f"{name}: the target is not of the layout that the delta was prepared for"
                )
            flags = t.bits.flags
            if not (flags.writeable and flags.c_contiguous and flags.aligned):
                raise StateMismatch(
                    f"{name}: cannot be written in place: it is read-only, strided or unaligned"
                )
        for change in self._changes:
            t = target[change.name]
            at = change.chunk * CHUNK_ELEMENTS - t.start
            scatter(
                t.bits[at : at + CHUNK_ELEMENTS], change.positions_N, change.old_N if undo else change.new_N
            )


class Incoming:
    """The shards of one delta as they come in, in any order: all of one delta, each once, for this state."""

    def __init__(self, digest: StateDigest, *, backwards: bool) -> None:
        self.backwards = backwards
        self._held = digest.hex
        self._result: str | None = None
        self._count = 0
        self._seen: set[int] = set()

    def accept(self, head: Head) -> None:
        """Raises `BaseMismatch` for another base, `DeltaCorrupt` for a shard of another delta or a repeat."""
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
    changes: list[Change] = []
    for data in shards:
        changes += read_shard(state, result, data, incoming, threads)
    incoming.finish(result)
    return Prepared(state, changes, result)


def read_shard(
    state: State, digest: StateDigest, data: bytes, incoming: Incoming, threads: int = 1
) -> list[Change]:
    """The changes of one shard; `digest` is updated to the state that they give."""
    head = read_head(data)
    if len(data) != head.size:
        raise DeltaCorrupt(
            f"shard {head.shard} of {head.shards} has {len(data)} bytes, its head says {head.size}"
        )
    check_rows(state, head)
    incoming.accept(head)
    payloads = memoryview(data)[head.head_bytes :]
    return decode_chunks(
        state,
        digest,
        list(chunks_of(head)),
        lambda wanted: payloads[wanted.offset : wanted.offset + wanted.row.sizes[wanted.at]],
        backwards=incoming.backwards,
        threads=threads,
    )


def check_rows(state: State, head: Head) -> None:
    """Every tensor of the shard is held whole, with its dtype and shape. Raises `StateMismatch`."""
    for row in head.rows:
        held = state.get(row.name)
        if held is None:
            raise StateMismatch(f"the delta changes {row.name!r}, which is not held")
        check_row(row, held.dtype, held.shape)
        if not held.whole or held.bits.dtype != lane_dtype(held.dtype):
            raise StateMismatch(f"{row.name}: {held.bits.size} of {held.elements} elements are held")


def check_row(row: Row, dtype: str, shape: tuple[int, ...]) -> None:
    lane_dtype(row.dtype)
    if (dtype, shape) != (row.dtype, row.shape):
        raise StateMismatch(
            f"{row.name}: {row.dtype}{list(row.shape)} in the delta, {dtype}{list(shape)} held"
        )


def chunks_of(head: Head) -> Iterator[Wanted]:
    offset = 0
    for row in head.rows:
        for at, size in enumerate(row.sizes):
            yield Wanted(row, at, offset)
            offset += size


def decode_chunks(
    state: State,
    digest: StateDigest,
    wanted: Sequence[Wanted],
    payload: Callable[[Wanted], memoryview],
    *,
    backwards: bool,
    threads: int,
) -> list[Change]:
    """Decodes and verifies chunks that the state holds; `digest` moves on to the sums after them."""

    def work(w: Wanted) -> tuple[Change, int]:
        before = digest.chunk_sum(w.row.name, w.row.chunks[w.at])
        return _decode(state[w.row.name], w, payload(w), before, backwards)

    if threads > 1 and len(wanted) > 1:
        with ThreadPoolExecutor(threads, thread_name_prefix="delta") as pool:
            decoded = list(pool.map(work, wanted))
    else:
        decoded = [work(w) for w in wanted]
    for change, total in decoded:
        digest.set(change.name, change.chunk, total)
    return [change for change, _ in decoded]


def _decode(
    held: Tensor, wanted: Wanted, payload: memoryview, before: int, backwards: bool
) -> tuple[Change, int]:
    row, at = wanted.row, wanted.at
    chunk, coder, changed = row.chunks[at], row.coders[at], row.changed[at]
    announced = int.from_bytes(row.sums[16 * at : 16 * at + 16], "little")
    where = f"{row.name}: chunk {chunk}"
    if payload_checksum(payload) != row.checksums[8 * at : 8 * at + 8]:
        raise DeltaCorrupt(f"{where}: its payload is damaged: fetch it again")
    if backwards and announced != before:
        raise BaseMismatch(f"{where}: what is held is not what the delta leads to")
    first = chunk * CHUNK_ELEMENTS
    base_M = held.bits[first - held.start : first - held.start + CHUNK_ELEMENTS]
    positions_N = np.empty(changed, np.uint32)
    old_N, new_N = np.empty(changed, held.bits.dtype), np.empty(changed, held.bits.dtype)
    stream = np.frombuffer(payload, np.uint8)
    if coder == CODER_CONTEXT and held.dtype in LAYOUTS:
        if backwards:
            raise WeightError(
                f"{where}: a context delta does not run backwards; its inverse is a delta of its own"
            )
        status = decode_context(base_M, held.dtype, stream, positions_N, new_N)
    elif coder == CODER_GAP:
        status = gap.decode_gap(base_M, held.dtype, stream, positions_N, new_N, backwards=backwards)
    else:
        raise DeltaCorrupt(f"{where}: coder {coder} is not known: upgrade this software")
    if status != gap.OK:
        raise DeltaCorrupt(f"{where}: {_STATUS[status]}")
    gather(base_M, positions_N, old_N)
    after = (before + weigh(first, positions_N, old_N, new_N)) & MASK_128
    if not backwards and after != announced:
        raise DigestMismatch(f"{where}: the delta gave other bits than it announces")
    return Change(row.name, chunk, positions_N, old_N, new_N), after
