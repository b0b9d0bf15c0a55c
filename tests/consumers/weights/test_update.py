"""From a path to a change of what is held: the same bits whichever way it is made, and nothing written before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import numpy as np
import pytest

from rollwire.consumers.weights import update
from rollwire.consumers.weights.paths import PathStep, plan_path
from rollwire.consumers.weights.publisher import PublisherConfig, SnapshotPublisher
from rollwire.consumers.weights.reader import Loaded
from rollwire.consumers.weights.targets.scatter import Scatter
from rollwire.consumers.weights.update import Maker
from rollwire.kernels.delta.compose import Composed, compose_deltas
from rollwire.kernels.delta.prepare import Prepared
from rollwire.kernels.digest import StateDigest
from rollwire.kernels.tensors import State
from rollwire.schemas.errors import BaseMismatch, DeltaCorrupt
from rollwire.schemas.records import WeightVersion
from rollwire.streams.seams.store_memory import MemoryStore

WAIT = 120.0  # the first use of a kernel compiles it
VERSIONS = 6

MakeState = Callable[..., State]
Move = Callable[..., State]


class Published(NamedTuple):
    store: MemoryStore
    events: list[WeightVersion]
    states: list[State]

    def held(self, version: int) -> Loaded:
        state = {name: one._replace(bits=np.array(one.bits)) for name, one in self.states[version].items()}
        return Loaded(state, StateDigest.of(state))


def publish(make_state: MakeState, move: Move, coder: Literal["gap", "context"]) -> Published:
    store = MemoryStore()
    config = PublisherConfig(anchor_every=100, coder=coder)
    publisher = SnapshotPublisher(store, model="policy", lineage="lineage", config=config)
    states, events = [make_state()], []
    try:
        for version in range(VERSIONS):
            events.append(publisher.submit(version, version, states[-1]).result(WAIT))
            publisher.committed(version)
            states.append(move(states[-1], version))
    finally:
        publisher.close()
    return Published(store, events, states)


def bits(state: State) -> dict[str, bytes]:
    return {name: one.bits.tobytes() for name, one in state.items()}


def maker() -> Maker:
    return Maker(into=None, choose=None, threads=2)


@pytest.mark.parametrize(
    ("have", "want", "coder", "kind"),
    [
        (0, 1, "gap", Prepared),  # the next version
        (0, 5, "gap", Prepared),  # several, added up
        (5, 4, "gap", Prepared),
        (4, 1, "gap", Prepared),  # back
        (0, 1, "context", Prepared),
        (1, 4, "context", Scatter),  # context deltas need the states between
    ],
)
def test_a_change_makes_the_version_and_takes_it_back(
    have: int,
    want: int,
    coder: Literal["gap", "context"],
    kind: type,
    make_state: MakeState,
    move: Move,
) -> None:
    published = publish(make_state, move, coder)
    held = published.held(have)
    path = plan_path(published.events, (), have, want)
    entered: list[PathStep] = []
    made = maker()(published.store, path, held, entering=entered.append)
    assert isinstance(made.change, kind)
    assert made.state is held.state
    assert bits(held.state) == bits(published.states[have])
    assert made.digest.hex == published.events[want].state_digest
    assert entered == list(path)
    assert made.change is not None
    made.change.apply()
    assert bits(held.state) == bits(published.states[want])
    assert StateDigest.of(held.state).hex == made.digest.hex
    made.change.undo()
    assert bits(held.state) == bits(published.states[have])


class Damaged(MemoryStore):
    """Gives one object that is whole, has its digest, and is another one's."""

    def __init__(self, store: MemoryStore, key: str, instead: str) -> None:
        super().__init__()
        self._inner, self._key, self._instead = store, key, instead

    def get(self, key: str, *, sha256: str | None = None) -> bytes:
        return self._inner.get(self._instead if key == self._key else key)


def test_of_several_deltas_the_wrong_one_is_named(make_state: MakeState, move: Move) -> None:
    published = publish(make_state, move, "gap")
    (second,), (third,) = published.events[2].objects, published.events[3].objects
    store = Damaged(published.store, second.key, third.key)
    held = published.held(0)
    path = plan_path(published.events, (), 0, 4)
    entered: list[PathStep] = []
    with pytest.raises((BaseMismatch, DeltaCorrupt), match="version 2 by delta 1>2"):
        maker()(store, path, held, entering=entered.append)
    assert entered[-1].event.version == 2
    assert bits(held.state) == bits(published.states[0])


def test_a_wrong_sum_is_found_by_going_one_by_one(
    make_state: MakeState, move: Move, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever composing makes of the deltas, the outcome is checked; and what it can't make is made the long way."""
    published = publish(make_state, move, "gap")

    def other(*deltas: Sequence[bytes], threads: int = 1) -> Composed:
        return compose_deltas(*deltas[:-1], threads=threads)

    monkeypatch.setattr(update, "compose_deltas", other)
    held = published.held(0)
    made = maker()(published.store, plan_path(published.events, (), 0, 4), held)
    assert isinstance(made.change, Scatter)
    made.change.apply()
    assert bits(held.state) == bits(published.states[4])
