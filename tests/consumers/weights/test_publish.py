"""Publishing by a copy: pooled memory, what a wait is for, and a store that comes back."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from rollwire.consumers.weights.buffers import BufferPool
from rollwire.consumers.weights.links import put_shards
from rollwire.consumers.weights.publisher import PublisherConfig, SnapshotPublisher
from rollwire.consumers.weights.sources import as_state, sources_of
from rollwire.kernels.digest import StateDigest
from rollwire.kernels.tensors import State, Tensor
from rollwire.schemas.errors import DeadlineExceeded, StateMismatch, StoreUnavailable, WeightError
from rollwire.streams.seams.store_memory import MemoryStore

WAIT = 60.0


class AwayStore(MemoryStore):
    """Can be away, and can hold creates up."""

    def __init__(self) -> None:
        super().__init__()
        self.away = False
        self.tries = 0
        self.gate = threading.Event()
        self.gate.set()

    def create(self, key: str, data: bytes) -> bool:
        if not self.gate.wait(WAIT):
            raise StoreUnavailable("the gate stayed shut")
        self.tries += 1
        if self.away:
            raise StoreUnavailable("no route to the store")
        return super().create(key, data)


@pytest.fixture
def store() -> AwayStore:
    return AwayStore()


@pytest.fixture
def publisher(store: AwayStore) -> Iterator[SnapshotPublisher]:
    made = SnapshotPublisher(
        store, model="m", lineage="L", config=PublisherConfig(submit_timeout_s=0.2, store_patience_s=WAIT)
    )
    yield made
    store.away = False
    store.gate.set()
    made.close(WAIT)


def weights(seed: int) -> dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float32]]]:
    rng = np.random.default_rng(seed)
    return {"w": rng.standard_normal((30, 40), dtype=np.float32), "b": np.full(7, seed, np.float32)}


def digest(named: object) -> str:
    pool = BufferPool(1)
    return StateDigest.of(pool.fill(sources_of(named))).hex  # type: ignore[arg-type]


def test_what_is_published_is_a_copy(publisher: SnapshotPublisher, store: AwayStore) -> None:
    held = weights(1)
    wanted = digest(held)
    store.gate.clear()
    future = publisher.publish(0, held)
    for array in held.values():
        array += 1.0  # the trainer goes on
    store.gate.set()
    assert future.result(WAIT).state_digest == wanted
    publisher.committed(0)
    event = publisher.publish(1, held.items(), step=5).result(WAIT)
    assert (event.state_digest, event.step, event.base_version) == (digest(held), 5, 0)


def test_two_threads_do_not_publish_the_same_version(
    publisher: SnapshotPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"w": Tensor("I8", (8,), np.zeros(8, np.uint8))}
    publisher.submit(0, 0, state)

    class Meanwhile:
        """While it is copied somebody else publishes."""

        dtype, shape, elements, start, allocate = "I8", (8,), 8, 0, None

        def copy_to(self, bits_N: np.ndarray[Any, Any]) -> None:
            publisher.submit(1, 1, state)

        def wait(self) -> None:
            pass

    monkeypatch.setattr("rollwire.consumers.weights.publisher.sources_of", lambda _: {"w": Meanwhile()})
    with pytest.raises(WeightError, match="version 1 submitted after 1"):
        publisher.publish(1, {})


def test_memory_is_bounded_and_used_again(publisher: SnapshotPublisher) -> None:
    for version in range(12):
        assert publisher.publish(version, weights(version)).result(WAIT).state_digest == digest(
            weights(version)
        )
        publisher.committed(version)
    assert publisher.buffer_bytes <= 4 * (30 * 40 * 4 + 64)


def test_arrays_of_any_layout_keep_their_logical_order() -> None:
    array = np.arange(24, dtype=np.float32).reshape(4, 6)
    for view in (array.T, array[:, ::2], array[::-1], array[1:3], np.array(3.0, np.float32)):
        state = BufferPool(1).fill(sources_of({"w": view}))
        assert state["w"].bits.tobytes() == np.ascontiguousarray(view).tobytes()
        assert state["w"].shape == view.shape


def test_a_pool_says_that_it_is_full_and_takes_memory_back() -> None:
    pool = BufferPool(2)
    sources = sources_of(weights(0))
    first, second = pool.fill(sources), pool.fill(sources)
    assert not pool.has_room
    with pytest.raises(DeadlineExceeded, match="all 2 buffers"):
        pool.fill(sources)
    held = pool.nbytes
    pool.give_back(first)
    third = pool.fill(sources)
    assert third is first
    assert third is not second
    assert pool.nbytes == held
    assert not pool.grow()
    pool.give_back(second)
    pool.give_back(third)
    pool.give_back({})  # none of its own
    other = pool.fill(sources_of({"w": np.zeros(3, np.int8)}))  # another layout: what was kept is let go
    assert other["w"].dtype == "I8"
    assert pool.nbytes == 3
    assert pool.grow()
    assert not pool.grow()


def test_a_pool_grows_beside_a_copy_and_not_beyond_its_capacity() -> None:
    pool = BufferPool(2)
    first = sources_of({"w": np.zeros(64, np.int8)})
    pool.give_back(pool.fill(first))

    class Slow:
        """While it is copied the background makes memory ahead."""

        dtype, shape, elements, start, allocate = "I8", (64,), 64, 0, None

        def copy_to(self, bits_N: np.ndarray[Any, Any]) -> None:
            while pool.grow():
                pass

        def wait(self) -> None:
            pass

    pool.fill({"w": Slow()})
    assert pool.nbytes == 2 * 64
    pool.fill(first)
    assert not pool.has_room


@pytest.mark.parametrize(
    ("named", "text"),
    [
        ([("w", np.zeros(3, np.float32)), ("w", np.zeros(3, np.float32))], "given twice"),
        ({"w": [1.0, 2.0]}, "w is a list, no tensor"),
        ({"w": np.zeros(3, np.complex64)}, "arrays of complex64"),
    ],
)
def test_what_is_no_tensor_is_refused(publisher: SnapshotPublisher, named: object, text: str) -> None:
    with pytest.raises(StateMismatch, match=text):
        publisher.publish(0, named)  # type: ignore[arg-type]
    assert publisher.waiting_for() is None


def test_only_a_state_can_be_given_away() -> None:
    state: State = {"w": Tensor("U8", (2,), np.zeros(2, np.uint8))}
    assert as_state(state) == state
    with pytest.raises(StateMismatch, match="copy=True"):
        as_state({"w": np.zeros(2, np.float32)})


def test_a_wait_says_that_the_commit_is_awaited(publisher: SnapshotPublisher) -> None:
    for version in (0, 1):
        publisher.publish(version, weights(version)).result(WAIT)
    with pytest.raises(DeadlineExceeded, match="version 0 is stored, its commit is awaited since"):
        publisher.publish(2, weights(2))
    waiting = publisher.waiting_for()
    assert waiting is not None
    assert (waiting.version, waiting.on) == (0, "commit")
    publisher.committed(0)
    assert publisher.publish(2, weights(2)).result(WAIT).version == 2


def test_a_store_that_is_away_is_named_and_loses_no_version(
    publisher: SnapshotPublisher, store: AwayStore
) -> None:
    publisher.publish(0, weights(0)).result(WAIT)
    publisher.committed(0)
    store.away = True
    futures = [publisher.publish(version, weights(version)) for version in (1, 2)]
    deadline = threading.Event()
    while store.tries < 4 and not deadline.wait(0.01):
        pass
    with pytest.raises(DeadlineExceeded, match=r"version 1 is being stored since .* no route to the store"):
        publisher.publish(3, weights(3))
    store.away = False
    events = [future.result(WAIT) for future in futures]
    assert [event.state_digest for event in events] == [digest(weights(1)), digest(weights(2))]


def test_patience_ends(store: AwayStore) -> None:
    publisher = SnapshotPublisher(store, model="m", lineage="L", config=PublisherConfig(store_patience_s=0.6))
    try:
        store.away = True
        failed = publisher.publish(0, weights(0))
        with pytest.raises(StoreUnavailable, match="no route"):
            failed.result(WAIT)
        assert store.tries >= 2
        with pytest.raises(WeightError, match="version 1 is not published, since version 0 failed"):
            publisher.publish(1, weights(1)).result(WAIT)
    finally:
        publisher.close(WAIT)


def test_versions_that_are_taken_back_while_they_are_stored_give_their_memory_back(
    publisher: SnapshotPublisher, store: AwayStore
) -> None:
    publisher.publish(0, weights(0)).result(WAIT)
    publisher.committed(0)
    for _ in range(5):
        store.gate.clear()
        publisher.publish(1, weights(1))
        publisher.discard_from(1)
        store.gate.set()
    assert publisher.publish(1, weights(2)).result(WAIT).state_digest == digest(weights(2))


def test_shards_are_put_side_by_side_and_named_in_order() -> None:
    """The puts of four shards meet: none of them ends before all have begun."""
    met = threading.Barrier(4, timeout=WAIT)

    class Meeting(MemoryStore):
        def create(self, key: str, data: bytes) -> bool:
            if key.endswith(".rwdl"):
                met.wait()
            return super().create(key, data)

    store = Meeting()
    shards = [bytes([number]) * 10 for number in range(8)]
    objects = put_shards(store, "m", shards, [1] * 8, puts=4)
    assert [store.get(entry.key) for entry in objects] == shards


def test_the_core_needs_no_torch() -> None:
    import subprocess

    code = "import sys; import rollwire.consumers.weights.publisher; assert 'torch' not in sys.modules, 'torch was imported'"
    subprocess.run([sys.executable, "-P", "-c", code], check=True, timeout=WAIT)
