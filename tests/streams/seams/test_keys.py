"""One behaviour of the key store: the twin, the one over an object store (in memory, and on a real S3 server), cached."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from rollwire.schemas.errors import ConfigError, Erased, KeyMissing, SealInvalid, StoreUnavailable
from rollwire.streams.seams.clock import ManualClock
from rollwire.streams.seams.keys import KeyStore
from rollwire.streams.seams.keys_cached import CachedKeys
from rollwire.streams.seams.keys_memory import MemoryKeys
from rollwire.streams.seams.keys_store import StoredKeys
from rollwire.streams.seams.master_key import LocalMasterKey, new_master_key
from rollwire.streams.seams.store import ObjectInfo
from rollwire.streams.seams.store_memory import MemoryStore
from rollwire.streams.seams.store_s3 import S3Store

ADA, BOB = "a" * 32, "b" * 32
MASTER = LocalMasterKey(bytes(range(32)))


def s3(request: pytest.FixtureRequest) -> S3Store:
    stack = request.getfixturevalue("stack")
    made = S3Store(stack.s3_endpoint, f"t{uuid.uuid4().hex[:12]}", stack.access_key, stack.secret_key)
    made.ensure_bucket()
    return made


@pytest.fixture(params=["memory", "store", "cached", pytest.param("s3", marks=pytest.mark.system)])
def keys(request: pytest.FixtureRequest) -> KeyStore:
    if request.param == "memory":
        return MemoryKeys()
    stored = StoredKeys(s3(request) if request.param == "s3" else MemoryStore(), MASTER)
    return CachedKeys(stored) if request.param == "cached" else stored


def test_a_person_has_one_key(keys: KeyStore) -> None:
    made = keys.data_key(ADA)
    assert (made.generation, len(made.key)) == (1, 32)
    assert keys.data_key(ADA) == made
    assert keys.key_of(ADA, 1) == made.key
    assert keys.data_key(BOB).key != made.key
    assert keys.state(ADA) == ((1,), ())


def test_all_who_ask_at_once_get_the_same_key(keys: KeyStore) -> None:
    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(lambda _: keys.data_key(ADA), range(16)))) == 1


def test_a_destroyed_key_is_erased_for_ever_and_others_live(keys: KeyStore) -> None:
    first, other = keys.data_key(ADA), keys.data_key(BOB)
    assert keys.destroy(ADA) == 1
    with pytest.raises(Erased, match="erased"):
        keys.key_of(ADA, 1)
    assert keys.destroy(ADA) == 1
    assert keys.state(ADA) == ((), (1,))
    assert keys.key_of(BOB, 1) == other.key
    again = keys.data_key(ADA)
    assert again.generation == 2
    assert again.key != first.key
    with pytest.raises(Erased):
        keys.key_of(ADA, 1)
    assert keys.key_of(ADA, 2) == again.key
    assert keys.destroy(ADA) == 2
    assert keys.state(ADA) == ((), (1, 2))


def test_a_key_that_never_was_is_not_called_erased(keys: KeyStore) -> None:
    keys.data_key(ADA)
    for subject, generation in ((ADA, 2), (BOB, 1)):
        with pytest.raises(KeyMissing, match=f"no data key {generation} of {subject}"):
            keys.key_of(subject, generation)
    assert keys.destroy(BOB) == 0
    assert keys.state(BOB) == ((), ())


def test_the_key_is_not_shown_by_accident(keys: KeyStore) -> None:
    made = keys.data_key(ADA)
    assert repr(made) == "DataKey(generation=1)"
    assert made.key.hex() not in f"{made!r}{made}{[made]}"


def test_two_stores_of_keys_over_one_bucket_agree(request: pytest.FixtureRequest) -> None:
    store = MemoryStore()
    first, second = StoredKeys(store, MASTER), StoredKeys(store, MASTER)
    assert first.data_key(ADA) == second.data_key(ADA)
    second.destroy(ADA)
    with pytest.raises(Erased):
        first.key_of(ADA, 1)


def test_the_bucket_never_holds_a_key_in_clear() -> None:
    store = MemoryStore()
    made = StoredKeys(store, MASTER).data_key(ADA)
    (found,) = store.list("")
    assert found.key == f"keys/{ADA}/1"
    data = store.get(found.key)
    assert made.key not in data
    assert made.key.hex().encode() not in data


def test_a_wrapped_key_opens_only_at_its_place_and_under_its_master_key() -> None:
    store = MemoryStore()
    StoredKeys(store, MASTER).data_key(ADA)
    wrapped = store.get(f"keys/{ADA}/1")
    store.create(f"keys/{BOB}/1", wrapped)
    store.create(f"keys/{BOB}/2", wrapped[:-1] + bytes([wrapped[-1] ^ 1]))
    store.create(f"keys/{BOB}/3", b"")
    for generation in (1, 2, 3):
        with pytest.raises(SealInvalid):
            StoredKeys(store, MASTER).key_of(BOB, generation)
    with pytest.raises(ConfigError, match="ROLLWIRE_MASTER_KEY_FILE"):
        StoredKeys(store, LocalMasterKey(new_master_key())).key_of(ADA, 1)
    with pytest.raises(ConfigError, match="32 bytes"):
        LocalMasterKey(b"short")
    assert MASTER.pseudonym_secret() == LocalMasterKey(bytes(range(32))).pseudonym_secret()


class Meddled(MemoryStore):
    """Runs what is planned for the n-th call from now on, before it: every interleaving of two processes that matters."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.at: int | None = None
        self.then: Callable[[], object] = lambda: None

    def _turn(self) -> None:
        self.calls += 1
        if self.calls == self.at:
            self.at = None
            self.then()

    def create(self, key: str, data: bytes) -> bool:
        self._turn()
        return super().create(key, data)

    def get(self, key: str, *, sha256: str | None = None) -> bytes:
        self._turn()
        return super().get(key, sha256=sha256)

    def head(self, key: str) -> ObjectInfo | None:
        self._turn()
        return super().head(key)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        self._turn()
        return super().list(prefix)

    def purge(self, key: str) -> None:
        self._turn()
        super().purge(key)


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("at", range(1, 8))
def test_a_key_that_is_made_while_the_person_is_erased(known: bool, before: bool, at: int) -> None:
    """At each call of `data_key` another process makes a key (perhaps) and erases the person, whole. What was given out is
    erased by the next erasure, and nothing that was given out before comes back."""
    store = Meddled()
    other = StoredKeys(store, MASTER)
    given = [other.data_key(ADA)] if known else []

    def meddle() -> None:
        if before:
            given.append(other.data_key(ADA))
        other.destroy(ADA)

    store.calls, store.at, store.then = 0, at, meddle
    mine = StoredKeys(store, MASTER).data_key(ADA)
    store.at = None
    for one in given:
        if one != mine:
            with pytest.raises(Erased):
                other.key_of(ADA, one.generation)
    overtaken = other.state(ADA).live == ()
    if not overtaken:
        assert other.key_of(ADA, mine.generation) == mine.key
    other.destroy(ADA)
    with pytest.raises(Erased):
        other.key_of(ADA, mine.generation)
    assert [o.key for o in store.list("keys/") if not o.key.endswith(".erased")] == []


@pytest.mark.parametrize("at", range(1, 6))
def test_an_erasure_that_dies_half_way_is_finished_by_the_next(at: int) -> None:
    store = Meddled()
    keys = StoredKeys(store, MASTER)
    keys.data_key(ADA)

    def die() -> None:
        raise StoreUnavailable("killed")

    store.calls, store.at, store.then = 0, at, die
    try:
        keys.destroy(ADA)
    except StoreUnavailable:
        died = True
    else:
        died = False
    store.at = None
    assert died == (at <= 3)  # the listing, the tombstone, the deletion
    if at == 3:  # the tombstone stands: erased for every reader, though the key object is still there
        with pytest.raises(Erased):
            keys.key_of(ADA, 1)
        assert keys.data_key(ADA).generation == 2
    assert keys.destroy(ADA) == (2 if at == 3 else 1)
    assert keys.state(ADA).live == ()
    assert [o.key for o in store.list("keys/") if not o.key.endswith(".erased")] == []


def test_makers_and_erasers_side_by_side(request: pytest.FixtureRequest) -> None:
    """Whoever seals while the person is erased time and again: after the last erasure nothing opens."""
    store = MemoryStore()
    given: set[tuple[int, bytes]] = set()
    stop = threading.Event()

    def make() -> None:
        keys = StoredKeys(store, MASTER)
        while not stop.is_set():
            given.add(tuple(keys.data_key(ADA)))  # type: ignore[arg-type]

    with ThreadPoolExecutor(4) as pool:
        makers = [pool.submit(make) for _ in range(3)]
        for _ in range(100):
            StoredKeys(store, MASTER).destroy(ADA)
        stop.set()
        for maker in makers:
            maker.result(30)
    keys = StoredKeys(store, MASTER)
    keys.destroy(ADA)
    assert len({g for g, _ in given}) == len(given)  # a generation has one key for ever
    for generation, _ in given:
        with pytest.raises(Erased):
            keys.key_of(ADA, generation)


def test_a_cache_asks_once_and_again_after_its_time() -> None:
    clock, store = ManualClock(), Meddled()
    keys = CachedKeys(StoredKeys(store, MASTER), clock, ttl_s=60.0)
    made = keys.data_key(ADA)
    asked = store.calls
    assert keys.data_key(ADA) == made
    assert keys.key_of(ADA, 1) == made.key
    assert store.calls == asked
    StoredKeys(store, MASTER).destroy(ADA)  # by another process
    assert keys.key_of(ADA, 1) == made.key  # the stated price
    clock.advance(61)
    with pytest.raises(Erased):
        keys.key_of(ADA, 1)
    asked = store.calls
    with pytest.raises(Erased):
        keys.key_of(ADA, 1)
    assert store.calls == asked  # erased is for ever
    assert keys.data_key(ADA).generation == 2


def test_a_cache_forgets_at_once_when_told_and_keeps_nothing_that_was_under_way() -> None:
    store = Meddled()
    stored = StoredKeys(store, MASTER)
    keys = CachedKeys(stored)
    made = keys.data_key(ADA)
    stored.destroy(ADA)
    keys.forget(ADA)
    with pytest.raises(Erased):
        keys.key_of(ADA, 1)
    # The answer of a question asked before `forget` comes after it: it is given, and not kept.
    second = keys.data_key(ADA)
    keys.forget(ADA)
    store.calls, store.at = 0, 2  # after the object was read, before the tombstone is looked for
    store.then = lambda: keys.forget(ADA)
    assert keys.key_of(ADA, 2) == second.key
    stored.destroy(ADA)
    with pytest.raises(Erased):
        keys.key_of(ADA, 2)
    assert made.generation == 1


def test_a_cache_is_bounded() -> None:
    store = Meddled()
    keys = CachedKeys(StoredKeys(store, MASTER), entries=4)
    for n in range(10):
        keys.data_key(f"{n:032x}")
    asked = store.calls
    keys.data_key(f"{9:032x}")
    assert store.calls == asked
    keys.data_key(f"{0:032x}")
    assert store.calls > asked
