"""Links that the publisher's background builds: what they lead over, what they are made of, and that nothing waits for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

import numpy as np
import pytest

from rollwire.consumers.weights.link_builder import MAX_BEHIND, TOPIC, LinkBuilder, link_builder
from rollwire.consumers.weights.links import read_links
from rollwire.consumers.weights.paths import plan_path
from rollwire.consumers.weights.publisher import PublisherConfig, SnapshotPublisher
from rollwire.consumers.weights.reader import Loaded, load_path
from rollwire.kernels.digest import StateDigest
from rollwire.kernels.tensors import State, tensor
from rollwire.schemas.errors import StoreUnavailable
from rollwire.schemas.records import WeightLink, WeightVersion
from rollwire.streams.emit import outgoing
from rollwire.streams.seams.log_memory import MemoryLog
from rollwire.streams.seams.store_memory import MemoryStore
from rollwire.streams.seams.work import Inline

LINEAGE = "0197a1b2-0000-7000-8000-0000000000ac"
Coder = Literal["gap", "context"]


class Store(MemoryStore):
    def __init__(self) -> None:
        super().__init__()
        self.away = False

    def create(self, key: str, data: bytes) -> bool:
        if self.away:
            raise StoreUnavailable("no route to the store")
        return super().create(key, data)


class Trainer:
    """Commits versions by hand, one turn of the background at a time."""

    def __init__(self, log: MemoryLog, store: Store, coder: Coder = "gap") -> None:
        self.log, self.store, self.work = log, store, Inline()
        self.config = PublisherConfig(coder=coder, anchor_every=1_000)
        self.events: list[WeightVersion] = []
        self.states: list[State] = []
        self.start()

    def start(self) -> None:
        self.links = link_builder(
            self.log, self.store, self.config, model="m", lineage=LINEAGE, work=self.work
        )
        self.publisher = SnapshotPublisher(
            self.store, model="m", lineage=LINEAGE, config=self.config, work=self.work, links=self.links
        )

    def restart(self) -> None:
        self.work = Inline()
        self.start()
        self.publisher.resume(self.events[-1], self.states[-1])

    def commit(self, state: State, *, build: bool = True) -> None:
        version = len(self.events)
        future = self.publisher.publish(version, dict(state))
        while not future.done():
            assert self.work.turn("snapshot-publisher")
        event = future.result(0)
        self.log.writer().write([outgoing(event, source="trainer", time_us=event.published_us)])
        self.publisher.committed(version)
        self.events.append(event)
        self.states.append(state)
        while build and self.work.turn("weight-links"):
            pass

    def built(self) -> list[WeightLink]:
        return read_links(self.log, LINEAGE)


def moving() -> Iterator[State]:
    rng = np.random.default_rng(3)
    w = rng.standard_normal(3_000, dtype=np.float32) * np.float32(0.02)
    while True:
        bits = (w.view(np.uint32) >> 16).astype(np.uint16)
        yield {
            "w": tensor("BF16", (30, 100), bits),
            "n": tensor("I64", (1,), np.array([int(bits.sum())], "<u8")),
        }
        w = w + (rng.standard_normal(3_000, dtype=np.float32) * np.float32(2e-5))


Make = Callable[[Coder], Trainer]


@pytest.fixture
def log() -> MemoryLog:
    return MemoryLog({"weight-versions": 1, TOPIC: 1})


@pytest.fixture
def make(log: MemoryLog) -> Make:
    return lambda coder: Trainer(log, Store(), coder)


def digest(state: State) -> str:
    return StateDigest.of(state).hex


def go(trainer: Trainer, have: int, want: int) -> tuple[str, list[str]]:
    """Digest at the end of the planned way, and its steps."""
    path = plan_path(trainer.events, trainer.built(), have, want)
    base = trainer.states[have]
    loaded = load_path(trainer.store, path, Loaded(base, StateDigest.of(base)))
    return loaded.digest.hex, [str(step) for step in path]


def test_skip_links_are_composed_of_shorter_ones_and_lead_both_ways(make: Make) -> None:
    trainer = make("gap")
    for state, _ in zip(moving(), range(69), strict=False):
        trainer.commit(state)
    built = {(link.base_version, link.version) for link in trainer.built()}
    assert {(0, 4), (4, 8), (0, 16), (0, 32), (0, 64)} <= built
    assert all(link.kind == "skip" and link.coder == "gap" for link in trainer.built())
    for have, want in ((0, 68), (3, 67), (68, 0), (66, 2)):
        found, steps = go(trainer, have, want)
        assert found == trainer.events[want].state_digest == digest(trainer.states[want])
        assert len(steps) <= 8
    for link in trainer.built():
        assert link.base_version is not None
        assert link.base_digest == trainer.events[link.base_version].state_digest
        assert link.state_digest == trainer.events[link.version].state_digest


def test_context_deltas_get_a_way_back_and_skip_links_all_the_same(make: Make) -> None:
    trainer = make("context")
    for state, _ in zip(moving(), range(9), strict=False):
        trainer.commit(state)
    assert {event.coder for event in trainer.events[1:]} == {"context"}
    inverse = [link for link in trainer.built() if link.kind == "inverse"]
    assert [(link.base_version, link.version) for link in inverse] == [(v, v - 1) for v in range(1, 9)]
    assert {link.coder for link in inverse} == {"context"}
    assert {(0, 4), (4, 8)} <= {(link.base_version, link.version) for link in trainer.built()}
    for have, want in ((8, 0), (7, 5), (0, 8), (3, 2)):
        assert go(trainer, have, want)[0] == trainer.events[want].state_digest


def test_versions_go_first_and_memory_stays_bounded(make: Make) -> None:
    """Nothing is built while versions come one upon the other; the pair that a way back needs is one, not many."""
    trainer = make("context")
    held = 0
    for state, version in zip(moving(), range(30), strict=False):
        trainer.commit(state, build=False)
        held = trainer.publisher.buffer_bytes if version == 2 else held
    assert trainer.publisher.buffer_bytes <= max(held, 6 * (6_000 + 128))
    assert trainer.built() == []
    assert trainer.work.ready() == ["weight-links"]
    while trainer.work.turn("weight-links"):
        pass
    built = trainer.built()
    assert len([link for link in built if link.kind == "inverse"]) <= MAX_BEHIND
    last = next(moving())
    trainer.commit(last)
    assert [link.version for link in trainer.built() if link.kind == "inverse"][-1] == 29


def test_deltas_in_memory_are_those_of_the_shortest_span_alone(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollwire.consumers.weights.link_builder._KEPT_BYTES", 0)
    trainer = make("context")
    assert trainer.links is not None
    held: list[int] = []
    for state, _ in zip(moving(), range(18), strict=False):
        trainer.commit(state)
        held.append(trainer.links.nbytes)
    assert held[4] == held[8] == held[16] == 0
    assert max(held) < 5 * held[1]
    assert (0, 16) in {(link.base_version, link.version) for link in trainer.built()}


def test_a_version_on_its_way_makes_links_wait(make: Make) -> None:
    trainer = make("gap")
    states = moving()
    trainer.commit(next(states), build=False)
    trainer.publisher.publish(1, dict(next(states)))
    assert trainer.work.ready() == ["snapshot-publisher"]
    assert trainer.work.turn("snapshot-publisher")
    assert trainer.work.ready() == ["weight-links"]


def test_a_restart_builds_on_what_was_there(make: Make) -> None:
    trainer = make("gap")
    states = moving()
    for _ in range(7):
        trainer.commit(next(states))
    before = trainer.built()
    trainer.restart()
    for _ in range(10):
        trainer.commit(next(states))
    links = trainer.built()
    assert links[: len(before)] == before
    assert len({(link.base_version, link.version) for link in links}) == len(links)
    assert {(4, 8), (0, 16)} <= {(link.base_version, link.version) for link in links}


def test_a_store_that_is_away_costs_links_and_nothing_else(make: Make) -> None:
    trainer = make("gap")
    states = moving()
    for _ in range(4):
        trainer.commit(next(states))
    trainer.commit(next(states), build=False)
    trainer.store.away = True
    while trainer.work.turn("weight-links"):
        pass
    trainer.store.away = False
    assert trainer.built() == []
    for _ in range(4):
        trainer.commit(next(states))
    assert (4, 8) in {(link.base_version, link.version) for link in trainer.built()}
    assert go(trainer, 0, 8)[0] == trainer.events[8].state_digest


def test_a_log_without_the_topic_is_served_without_links() -> None:
    trainer = Trainer(MemoryLog({"weight-versions": 1}), Store())
    for state, _ in zip(moving(), range(5), strict=False):
        trainer.commit(state)
    assert trainer.built() == []
    assert isinstance(trainer.links, LinkBuilder)
    trainer.publisher.close()


def test_links_can_be_switched_off(log: MemoryLog) -> None:
    config = PublisherConfig(links=False)
    assert link_builder(log, MemoryStore(), config, model="m", lineage=LINEAGE) is None
