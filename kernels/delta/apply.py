"""From a state and delta shards to the next state, on copies: what is being served is never written to (C31, C34)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from rollwire.kernels.delta.chain import apply_chain
from rollwire.kernels.delta.format import read_head
from rollwire.kernels.delta.prepare import Incoming, Prepared, read_shard
from rollwire.kernels.digest import StateDigest
from rollwire.kernels.tensors import State, Tensor


class Applied(NamedTuple):
    state: dict[str, Tensor]
    digest: StateDigest


class DeltaStage:
    """A state under construction. Tensors are copied when they first change and shared with the base until then.

    Deltas are applied one after the other; after any error the stage is spoilt and must be dropped, the base is whole.
    """

    def __init__(self, base: State, digest: StateDigest, *, threads: int = 1, owned: bool = False) -> None:
        """`digest` is the digest of `base`; it is not changed. `owned`: the arrays of `base` are the stage's to write to."""
        self._state = dict(base)
        self._digest = digest.copy()
        self._copied: set[str] = set(base) if owned else set()
        self._threads = threads

    def apply(self, shards: Iterable[bytes], *, backwards: bool = False) -> None:
        """Applies one delta: all of its shards, in any order; memory holds one at a time. Errors as `prepare_delta`."""
        incoming = Incoming(self._digest, backwards=backwards)
        for data in shards:
            changes = read_shard(self._state, self._digest, data, incoming, self._threads)
            prepared = Prepared(self._state, changes, self._digest)
            self._own(prepared.names)
            prepared.apply()
        incoming.finish(self._digest)

    def apply_chain(self, deltas: Sequence[Sequence[bytes]]) -> list[str]:
        """Applies deltas that follow one another, each given by all of its shards; the state's digest after each, hex.

        In one pass over the state where they are gap deltas of elements of one size. Errors as `apply`.
        """
        held = {
            name
            for shards in deltas
            for data in shards
            for name in read_head(data, self._digest.table_limit).columns.names
            if name in self._state
        }
        self._own(held)
        digests = apply_chain(self._state, self._digest, deltas, threads=self._threads)
        if digests is None:
            found: list[str] = []
            for shards in deltas:
                self.apply(shards)
                found.append(self._digest.hex)
            return found
        if digests:
            self._digest = digests[-1]
        return [digest.hex for digest in digests]

    def _own(self, names: Collection[str]) -> None:
        """Copies what is still shared with the base."""
        for name in set(names) - self._copied:
            held = self._state[name]
            self._state[name] = held._replace(bits=np.array(held.bits, order="C"))
            self._copied.add(name)

    def done(self) -> Applied:
        return Applied(self._state, self._digest)


def apply_delta(
    base: State, shards: Iterable[bytes], *, digest: StateDigest | None = None, backwards: bool = False
) -> Applied:
    """The state that a delta gives. `base` is not written to; unchanged tensors of the result are shared with it.

    `digest` is the digest of `base`, where the caller has it: it saves one pass. Errors as `prepare_delta`.
    """
    stage = DeltaStage(base, StateDigest.of(base) if digest is None else digest)
    stage.apply(shards, backwards=backwards)
    return stage.done()
