"""From a path to an update of what is held: in place, and verified whole before a byte of it changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import structlog

from rollwire.consumers.weights.parts import Choose, prepare_parts
from rollwire.consumers.weights.paths import GAP, PathStep
from rollwire.consumers.weights.reader import (
    Loaded,
    check_result,
    explain_base,
    load_path,
    named,
    read_shards,
    shards_of,
)
from rollwire.consumers.weights.targets.scatter import Scatter
from rollwire.consumers.weights.targets.target import Change
from rollwire.kernels.delta.compose import compose_deltas
from rollwire.kernels.delta.prepare import Prepared, prepare_delta
from rollwire.kernels.digest import StateDigest
from rollwire.kernels.tensors import State
from rollwire.schemas.errors import BaseMismatch, WeightError
from rollwire.schemas.records import WeightVersion
from rollwire.streams.seams.store import ObjectStore

_log = structlog.get_logger()


class Made(NamedTuple):
    """`change` is None: `state` is the version, in arrays of its own. Else `state` becomes it by the change."""

    state: State
    digest: StateDigest  # of the version
    change: Change | None
    changed: frozenset[str] | None  # tensors; None = any may


class Maker:
    """`Go` for arrays that are held. `into`: arrays that serve though nothing is known of their bits: they are to become
    the version as well; {} or None = there are none, and the first version brings its own.
    """

    def __init__(self, *, into: State | None, choose: Choose | None, threads: int) -> None:
        self._into = into
        self._choose = choose
        self._threads = threads

    def __call__(
        self,
        store: ObjectStore,
        path: Sequence[PathStep],
        base: Loaded | None,
        /,
        *,
        entering: Callable[[PathStep], None] | None = None,
    ) -> Made:
        """Writes to nothing that is held. Raises as `load_path`."""
        real = [step for step in path if step.kind != "same"]
        if base is not None and self._choose is None and _composable(real):
            composed = self._compose(store, real, base, path[-1].event, entering)
            if composed is not None:
                return Made(base.state, composed.digest, composed, composed.names)
        step = real[0] if len(real) == 1 and not real[0].full else None
        if base is not None and step is not None and not (step.backwards and self._choose):
            # The ordinary case: the next version. Only the changed elements are ever in memory twice.
            if entering is not None:
                entering(step)
            with named(step):
                prepared = self._prepare(store, step, base)
                check_result(path[-1].event, prepared.digest)
            return Made(base.state, prepared.digest, prepared, prepared.names)
        loaded = load_path(store, path, base, choose=self._choose, entering=entering)
        held = self._into if base is None else base.state
        if not held:
            return Made(loaded.state, loaded.digest, None, None)
        change = Scatter(held, loaded.state)
        return Made(held, loaded.digest, change, change.names)

    def _compose(
        self,
        store: ObjectStore,
        real: Sequence[PathStep],
        base: Loaded,
        event: WeightVersion,
        entering: Callable[[PathStep], None] | None,
    ) -> Prepared | None:
        """One delta out of several: the state is never in memory twice. None: one of them is wrong, and going them one
        by one will say which."""
        deltas: list[list[bytes]] = []
        for step in real:
            if entering is not None:
                entering(step)
            with named(step):
                deltas.append(list(read_shards(store, step)))
        backwards = real[0].backwards
        try:
            composed = compose_deltas(*(reversed(deltas) if backwards else deltas), threads=self._threads)
            prepared = prepare_delta(
                base.state, base.digest, composed.shards, backwards=backwards, threads=self._threads
            )
            check_result(event, prepared.digest)
        except WeightError as error:
            _log.warning("weights.not_composed", version=event.version, error=str(error))
            return None
        return prepared

    def _prepare(self, store: ObjectStore, step: PathStep, base: Loaded) -> Prepared:
        if self._choose is not None:
            return prepare_parts(store, base.state, base.digest, shards_of(store, step.source))
        shards = read_shards(store, step)
        try:
            return prepare_delta(
                base.state, base.digest, shards, backwards=step.backwards, threads=self._threads
            )
        except BaseMismatch:
            explain_base(store, step, base.state)
            raise


def _composable(real: Sequence[PathStep]) -> bool:
    """Several gap deltas, all forwards or all backwards: they add up to one."""
    return (
        len(real) > 1
        and all(not step.full and step.source.coder == GAP for step in real)
        and len({step.backwards for step in real}) == 1
    )
