"""The publisher: order, bounds, failures, restarts; what is not committed is visible to nobody."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from rollwire.consumers.weights.manifest import decode_manifest
from rollwire.consumers.weights.paths import plan_path
from rollwire.consumers.weights.publisher import PublisherConfig, SnapshotPublisher
from rollwire.consumers.weights.reader import load_version
from rollwire.kernels.digest import StateDigest
from rollwire.kernels.tensors import State, Tensor
from rollwire.schemas.errors import (
    DeadlineExceeded,
    DigestMismatch,
    StateMismatch,
    StoreUnavailable,
    WeightError,
)
from rollwire.schemas.records import WeightVersion
from rollwire.streams.seams.store_memory import MemoryStore

WAIT = 20.0

MakeState = Callable[..., State]
Move = Callable[..., State]


class TroubledStore(MemoryStore):
    """Fails chosen creates, and can hold all of them up."""

    def __init__(self) -> None:
        super().__init__()
        self.creates: list[str] = []
        self.fail_on: Callable[[str], bool] = lambda key: False
        self.gate = threading.Event()
        self.gate.set()

    def create(self, key: str, data: bytes) -> bool:
        if not self.gate.wait(WAIT):
            raise StoreUnavailable("the gate stayed shut")
        if self.fail_on(key):
            raise StoreUnavailable(f"no answer for {key}")
        self.creates.append(key)
        return super().create(key, data)


@pytest.fixture
def store() -> TroubledStore:
    return TroubledStore()


Publish = Callable[..., SnapshotPublisher]


@pytest.fixture
def publisher_on(store: TroubledStore) -> Iterator[Publish]:
    made: list[SnapshotPublisher] = []

    def make(**settings: float) -> SnapshotPublisher:
        config = PublisherConfig.model_validate(settings)
        made.append(SnapshotPublisher(store, model="policy", lineage="L", config=config))
        return made[-1]

    yield make
    store.gate.set()
    for publisher in made:
        publisher.close()


def digest(state: State) -> str:
    return StateDigest.of(state).hex


def run_versions(publisher: SnapshotPublisher, states: list[State]) -> list[WeightVersion]:
    events = []
    for version, state in enumerate(states):
        events.append(publisher.submit(version, version, state).result(WAIT))
        publisher.committed(version)
    return events


def test_every_version_can_be_read_from_nothing_and_from_its_base(
    store: TroubledStore, publisher_on: Publish, make_state: MakeState, move: Move
) -> None:
    states = [make_state()]
    for seed in range(5):
        states.append(move(states[-1], seed))
    events = run_versions(publisher_on(anchor_every=3), states)
    assert [e.kind for e in events] == ["anchor"] + ["delta"] * 5
    assert [e.anchor is not None for e in events] == [True, False, False, True, False, False]
    for version, state in enumerate(states):
        path = plan_path(events, (), None, version)
        assert digest(load_version(store, path, None)) == events[version].state_digest == digest(state)
    final = load_version(store, plan_path(events, (), 1, 5), states[1])
    assert {n: t.bits.tobytes() for n, t in final.items()} == {
        n: t.bits.tobytes() for n, t in states[5].items()
    }
    for e in events[1:]:
        assert 0 < e.changed_elements < e.total_elements
        assert e.full_bytes == sum(t.nbytes for t in states[0].values())
        manifest = decode_manifest(store.get(e.manifest.key, sha256=e.manifest.sha256))
        assert manifest.base is not None
        assert manifest.base.manifest == events[e.version - 1].manifest.key
        assert e.stored_bytes == e.manifest.size + sum(o.size for o in manifest.objects)


def test_c24_identical_weights_are_an_empty_version_with_an_equal_digest(
    store: TroubledStore, publisher_on: Publish, make_state: MakeState
) -> None:
    """C24 (a)."""
    events = run_versions(publisher_on(), [make_state(), make_state()])
    assert events[1].kind == "empty"
    assert events[1].changed_elements == 0
    assert events[1].state_digest == events[0].state_digest
    state = load_version(store, plan_path(events, (), None, 1), None)
    assert digest(state) == events[0].state_digest


def test_c24_c26_a_failed_upload_leaves_no_event_and_the_next_version_fails_too(
    store: TroubledStore, publisher_on: Publish, make_state: MakeState, move: Move
) -> None:
    """C24 (b), C26, law 3: shard 2 of 3 does not land; version 1's manifest is never written, version 2 rests on nothing."""
    states = [make_state(), *(_large(seed) for seed in (1, 2, 3))]
    publisher = publisher_on(shard_bytes=1, store_patience_s=0, puts=1)
    publisher.submit(0, 0, states[1]).result(WAIT)
    publisher.committed(0)
    written = len(store.creates)
    store.gate.clear()
    shards: list[str] = []

    def second_shard(key: str) -> bool:
        if "/deltas/" in key:
            shards.append(key)
        return len(shards) == 2

    store.fail_on = second_shard
    first, second = publisher.submit(1, 1, states[2]), publisher.submit(2, 2, states[3])
    store.gate.set()
    with pytest.raises(StoreUnavailable, match="no answer"):
        first.result(WAIT)
    with pytest.raises(WeightError, match="version 2 is not published, since version 1 failed"):
        second.result(WAIT)
    with pytest.raises(WeightError, match="version 3 is not published"):
        publisher.submit(3, 3, states[3]).result(WAIT)
    assert [key for key in store.creates[written:] if "/manifests/" in key] == []
    with pytest.raises(WeightError, match="not the next one"):
        publisher.committed(1)

    store.fail_on = lambda key: False
    publisher.discard_from(1)
    again = publisher.submit(1, 1, states[2]).result(WAIT)
    assert again.kind == "delta"
    manifest = decode_manifest(store.get(again.manifest.key, sha256=again.manifest.sha256))
    assert len(manifest.objects) > 2
    assert store.creates[-1] == again.manifest.key  # last


def _large(seed: int) -> State:
    import numpy as np

    rng = np.random.default_rng(seed)
    size = 9 << 20  # three blocks
    return {"w": Tensor("U8", (size,), rng.integers(0, 2, size, dtype=np.uint8))}


def test_at_most_two_versions_are_uncommitted(
    publisher_on: Publish, make_state: MakeState, move: Move
) -> None:
    state = make_state()
    publisher = publisher_on(submit_timeout_s=0.2)
    for version in (0, 1):
        publisher.submit(version, version, move(state, version)).result(WAIT)
    with pytest.raises(
        DeadlineExceeded, match=r"versions 0 \(stored\), 1 \(stored\) are not committed, and at most 2"
    ):
        publisher.submit(2, 2, state)
    publisher.committed(0)
    assert publisher.submit(2, 2, state).result(WAIT).base_version == 1


def test_submit_waits_for_the_commit(publisher_on: Publish, make_state: MakeState, move: Move) -> None:
    state = make_state()
    publisher = publisher_on(max_uncommitted=1)
    publisher.submit(0, 0, state).result(WAIT)
    done: list[WeightVersion] = []
    thread = threading.Thread(target=lambda: done.append(publisher.submit(1, 1, move(state, 1)).result(WAIT)))
    thread.start()
    publisher.committed(0)
    thread.join(WAIT)
    assert done[0].version == 1


def test_versions_go_up_by_one(publisher_on: Publish, make_state: MakeState) -> None:
    publisher = publisher_on()
    publisher.submit(0, 0, make_state())
    for version in (0, 2):
        with pytest.raises(WeightError, match="versions go up by one"):
            publisher.submit(version, version, make_state())
    with pytest.raises(WeightError, match="not the next one"):
        publisher.committed(1)


def test_c24_a_discarded_version_is_replaced_and_later_ones_build_on_the_new_one(
    store: TroubledStore, publisher_on: Publish, make_state: MakeState, move: Move
) -> None:
    """C24 (c): the event of version 1 could not be written; what replaces it may differ."""
    base = make_state()
    publisher = publisher_on()
    events = run_versions(publisher, [base])
    stale = publisher.submit(1, 1, move(base, 1)).result(WAIT)
    store.gate.clear()
    waiting = publisher.submit(2, 2, move(base, 2))
    publisher.discard_from(1)
    with pytest.raises(WeightError, match="version 2 was discarded"):
        waiting.result(WAIT)
    store.gate.set()
    other = move(base, 3)
    replaced = publisher.submit(1, 1, other).result(WAIT)
    assert replaced.state_digest == digest(other) != stale.state_digest
    publisher.committed(1)
    with pytest.raises(WeightError, match="is committed"):
        publisher.discard_from(1)
    last = publisher.submit(2, 2, base).result(WAIT)
    assert digest(load_version(store, plan_path([*events, replaced, last], (), None, 2), None)) == digest(
        base
    )


def test_a_restart_goes_on_and_publishes_the_same_objects(
    store: TroubledStore, publisher_on: Publish, make_state: MakeState, move: Move
) -> None:
    states = [make_state(), move(make_state(), 1), move(make_state(), 2)]
    first = publisher_on()
    events = run_versions(first, states[:2])
    orphan = first.submit(2, 2, states[2]).result(WAIT)
    first.close()

    publisher = publisher_on()
    with pytest.raises(DigestMismatch, match="version 1 is"):
        publisher.resume(events[1], states[0])
    publisher.resume(events[1], states[1])
    again = publisher.submit(2, 2, states[2]).result(WAIT)
    assert again.manifest == orphan.manifest
    assert again.base_version == 1


def test_resume_refuses_another_lineage(
    store: TroubledStore, publisher_on: Publish, make_state: MakeState
) -> None:
    (event,) = run_versions(publisher_on(), [make_state()])
    other = SnapshotPublisher(store, model="policy", lineage="other")
    try:
        with pytest.raises(WeightError, match="policy/L, not policy/other"):
            other.resume(event, make_state())
    finally:
        other.close()


def test_c27_renamed_tensors_are_not_published(publisher_on: Publish, make_state: MakeState) -> None:
    """C27."""
    state = make_state()
    publisher = publisher_on()
    run_versions(publisher, [state])
    renamed = {("layer.0.weight" if name == "layers.0.weight" else name): t for name, t in state.items()}
    with pytest.raises(StateMismatch, match="lacks 1 tensors"):
        publisher.submit(1, 1, renamed).result(WAIT)


def test_a_closed_publisher_says_so(publisher_on: Publish, make_state: MakeState) -> None:
    publisher = publisher_on()
    publisher.close()
    with pytest.raises(WeightError, match="closed"):
        publisher.submit(0, 0, make_state())
