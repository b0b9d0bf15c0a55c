"""API keys: whose a request is, how keys change, and how soon every gateway knows."""

from __future__ import annotations

import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rollwire.producers.gateway.access import Caller, LocalQuotas, LocalRepeats, OpenAccess, Refusal, lacks
from rollwire.producers.gateway.config import GatewayConfig
from rollwire.producers.gateway.key_store import (
    KeysConfig,
    StoredKeys,
    change_table,
    new_secret,
    read_table,
)
from rollwire.producers.gateway.keys import (
    KeyIndex,
    KeyTable,
    NewKey,
    add_key,
    revoke_key,
    rotate_key,
    shown,
)
from rollwire.producers.serving.config import ServingConfig
from rollwire.schemas.errors import ConfigError, FormatUnknown, StoreUnavailable
from rollwire.schemas.golden import load_examples
from rollwire.schemas.records import Feedback
from rollwire.schemas.validate_feedback import check_feedback
from rollwire.streams.seams.clock import ManualClock, SystemClock
from rollwire.streams.seams.store import ObjectInfo, ObjectStore
from rollwire.streams.seams.store_memory import MemoryStore
from rollwire.streams.seams.store_s3 import S3Store

NOW_US = 1_800_000_000_000_000
HOUR_US = 3_600_000_000
PAGE = "https://app.example.com"


@pytest.fixture
def folder() -> str:
    return f"keys-{uuid.uuid4().hex}"


@pytest.fixture(params=["memory", pytest.param("s3", marks=pytest.mark.system)])
def store(request: pytest.FixtureRequest) -> Iterator[ObjectStore]:
    if request.param == "memory":
        yield MemoryStore()
        return
    stack = request.getfixturevalue("stack")
    yield S3Store(stack.s3_endpoint, stack.bucket, stack.access_key, stack.secret_key, stack.region)


def made(new: NewKey, table: KeyTable | None = None) -> tuple[KeyTable, str, str]:
    """(the table with the key, its id, its secret)"""
    key_id, secret = new_secret()
    return add_key(table or KeyTable(), key_id, secret, new, NOW_US), key_id, secret


def asked(
    table: KeyTable,
    key: str | None,
    *,
    origin: str | None = None,
    in_address: bool = False,
    now_us: int = NOW_US,
) -> Caller | Refusal:
    header = None if key is None or in_address else f"Bearer {key}"
    return KeyIndex(table).identify(header, origin, key if in_address else None, now_us)


def code(answer: Caller | Refusal) -> tuple[int, str]:
    assert isinstance(answer, Refusal), answer
    return answer.status, answer.code


@pytest.mark.parametrize("tenant", ["_acme", "-acme", ".", ":a", "a" * 65, "a/b", "ä", "", "acme\n"])
def test_a_tenant_that_readers_of_the_log_refuse_is_none_here(tenant: str) -> None:
    """Else its events would be acknowledged, and every one of them a dead letter."""
    with pytest.raises(ConfigError, match="tenant"):
        made(NewKey(tenant))
    for kind in (GatewayConfig, ServingConfig):
        with pytest.raises(ValidationError):
            kind.model_validate({"tenant": tenant})


@given(st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9._:-]{0,63}\Z"))
def test_every_tenant_of_a_key_is_one_for_readers_of_the_log(tenant: str) -> None:
    table, _, _ = made(NewKey(tenant))
    (key,) = table.keys
    thumb = next(e.event for e in load_examples("user-feedback") if e.name == "thumb")
    assert isinstance(thumb, Feedback)
    check_feedback(msgspec.structs.replace(thumb, tenant=key.tenant))
    assert GatewayConfig.model_validate({"tenant": tenant}).tenant == tenant


def test_a_key_says_whose_it_is_and_what_it_may() -> None:
    table, key_id, secret = made(NewKey("acme", ("feedback:write", "metrics"), rate=5, burst=7))
    caller = asked(table, shown(key_id, secret, publishable=False))
    assert caller == Caller(key_id, "acme", frozenset(("feedback:write", "metrics")), 5, 7, False)
    assert isinstance(caller, Caller)
    assert lacks(caller, "metrics") is None
    assert code(lacks(caller, "feedback:read") or caller) == (403, "scope_missing")


def test_secrets_are_stored_hashed_only() -> None:
    table, _, secret = made(NewKey("acme"))
    assert secret.encode() not in msgspec.json.encode(table)
    assert len(set(secret)) > 10
    assert re.fullmatch(r"[A-Za-z0-9_-]{43}", secret)  # 256 bits


def test_wrong_keys_are_told_apart_only_by_who_holds_the_secret() -> None:
    table, key_id, secret = made(NewKey("acme"))
    _, other = new_secret()
    key = shown(key_id, secret, publishable=False)
    assert code(asked(table, None)) == (401, "key_missing")
    for malformed in ("", "x", key[:-1], key + "A", key.upper(), key + "\n", "rw_" + "é" * 56, "Basic abc"):
        assert code(asked(table, malformed)) == (401, "key_malformed"), malformed
    assert code(KeyIndex(table).identify(f"Basic {key}", None, None, NOW_US)) == (401, "key_malformed")
    assert isinstance(KeyIndex(table).identify(f"bearer  {key}", None, None, NOW_US), Caller)
    unknown_id, unknown_secret = (
        asked(table, shown("a" * 12, secret, publishable=False)),
        asked(table, shown(key_id, other, publishable=False)),
    )
    assert unknown_id == unknown_secret
    assert code(unknown_id) == (401, "key_unknown")
    assert code(asked(table, shown(key_id, secret, publishable=True))) == (401, "key_unknown")
    ended = revoke_key(table, key_id, NOW_US)
    assert code(asked(ended, key)) == (401, "key_revoked")
    assert code(asked(ended, shown(key_id, other, publishable=False))) == (401, "key_unknown")


def test_a_key_lives_between_its_first_and_its_last_moment() -> None:
    table, key_id, secret = made(NewKey("acme", not_before_us=NOW_US + 10, expires_us=NOW_US + 20))
    key = shown(key_id, secret, publishable=False)
    assert code(asked(table, key, now_us=NOW_US + 9)) == (401, "key_not_yet")
    assert isinstance(asked(table, key, now_us=NOW_US + 10), Caller)
    assert isinstance(asked(table, key, now_us=NOW_US + 19), Caller)
    assert code(asked(table, key, now_us=NOW_US + 20)) == (401, "key_expired")


def test_a_key_that_was_right_before_is_asked_again_for_its_time_and_its_page() -> None:
    table, key_id, secret = made(NewKey("acme", origins=("https://a.example",), expires_us=NOW_US + 20))
    index, header = KeyIndex(table), f"Bearer {shown(key_id, secret, publishable=True)}"
    for _ in range(2):
        assert isinstance(index.identify(header, "https://a.example", None, NOW_US), Caller)
        assert code(index.identify(header, "https://b.example", None, NOW_US)) == (403, "origin_refused")
        assert code(index.identify(header, "https://a.example", None, NOW_US + 20)) == (401, "key_expired")
        assert code(index.identify(header[:-1] + "!", "https://a.example", None, NOW_US)) == (
            401,
            "key_malformed",
        )


def test_a_rotated_secret_works_on_until_the_overlap_is_over() -> None:
    table, key_id, first = made(NewKey("acme"))
    _, second = new_secret()
    _, third = new_secret()
    table = rotate_key(table, key_id, second, NOW_US, overlap_s=3600)
    for secret in (first, second):
        assert isinstance(asked(table, shown(key_id, secret, publishable=False), now_us=NOW_US + 1), Caller)
    with pytest.raises(ConfigError, match="two valid secrets"):
        rotate_key(table, key_id, third, NOW_US + 1)
    after_us = NOW_US + HOUR_US
    assert code(asked(table, shown(key_id, first, publishable=False), now_us=after_us)) == (
        401,
        "key_expired",
    )
    table = rotate_key(table, key_id, third, after_us)
    for secret in (second, third):
        assert isinstance(asked(table, shown(key_id, secret, publishable=False), now_us=after_us), Caller)
    with pytest.raises(ConfigError, match="revoked"):
        rotate_key(revoke_key(table, key_id, after_us), key_id, first, after_us + 30 * HOUR_US)
    with pytest.raises(ConfigError, match="no key"):
        rotate_key(table, "a" * 12, first, after_us)


def test_a_publishable_key_writes_from_its_pages_only() -> None:
    table, key_id, secret = made(NewKey("acme", origins=(PAGE, "https://*.acme.test")))
    key = shown(key_id, secret, publishable=True)
    for origin in (PAGE, "https://shop.acme.test", "https://a.b.acme.test"):
        for in_address in (False, True):
            assert isinstance(asked(table, key, origin=origin, in_address=in_address), Caller)
    for bad in (
        None,
        "null",
        "https://acme.test",
        "http://shop.acme.test",
        "https://evilacme.test",
        PAGE + ".evil.test",
    ):
        assert code(asked(table, key, origin=bad)) == (403, "origin_refused"), bad
    index = KeyIndex(table)
    assert index.allows_origin(PAGE)
    assert not index.allows_origin("https://evil.test")
    assert not KeyIndex(revoke_key(table, key_id, NOW_US)).allows_origin(PAGE)
    with pytest.raises(ConfigError, match="publishable"):
        made(NewKey("acme", ("feedback:write", "feedback:read"), origins=(PAGE,)))


def test_a_secret_key_belongs_neither_in_pages_nor_in_addresses() -> None:
    table, key_id, secret = made(NewKey("acme"))
    key = shown(key_id, secret, publishable=False)
    assert code(asked(table, key, origin=PAGE)) == (403, "origin_refused")
    assert code(asked(table, key, in_address=True)) == (401, "key_in_address")


@pytest.mark.parametrize(
    "new",
    [
        NewKey("", ()),
        NewKey("a b"),
        NewKey("acme", ()),
        NewKey("acme", rate=0),
        NewKey("acme", rate=float("nan")),
        NewKey("acme", burst=0),
        NewKey("acme", expires_us=NOW_US),
        NewKey("acme", not_before_us=NOW_US + 5, expires_us=NOW_US + 5),
        NewKey("acme", origins=("app.example.com",)),
    ],
)
def test_a_key_that_could_not_be_used_is_not_made(new: NewKey) -> None:
    with pytest.raises(ConfigError):
        made(new)


def adding(key_id: str, secret: str, table: KeyTable) -> KeyTable:
    return add_key(table, key_id, secret, NewKey("acme"), NOW_US)


def test_changes_at_the_same_time_are_all_kept(store: ObjectStore, folder: str) -> None:
    ids = [new_secret() for _ in range(6)]
    failures: list[Exception] = []

    def work(mine: list[tuple[str, str]]) -> None:
        for key_id, secret in mine:
            try:
                change_table(store, folder, partial(adding, key_id, secret), NOW_US)
            except (StoreUnavailable, ConfigError) as failure:
                failures.append(failure)

    threads = [threading.Thread(target=work, args=(ids[i::3],)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    table = read_table(store, folder)
    assert table.revision == 6
    assert {key.key_id for key in table.keys} == {key_id for key_id, _ in ids}


def test_every_gateway_learns_of_a_change_without_being_told(store: ObjectStore, folder: str) -> None:
    key_id, secret = new_secret()
    header = "Bearer " + shown(key_id, secret, publishable=False)
    config = KeysConfig(folder=folder, poll_s=0.05)
    with (
        closing(StoredKeys(store, config, SystemClock())) as one,
        closing(StoredKeys(store, config, SystemClock())) as two,
    ):
        assert code(one.identify(header, None)) == (401, "key_unknown")
        change_table(store, folder, lambda t: add_key(t, key_id, secret, NewKey("acme"), NOW_US), NOW_US)
        for keys in (one, two):
            until(lambda keys=keys: isinstance(keys.identify(header, None), Caller))  # type: ignore[misc]
        change_table(store, folder, lambda t: revoke_key(t, key_id, NOW_US), NOW_US)
        for keys in (one, two):
            until(lambda keys=keys: keys.identify(header, None)[1] == "key_revoked")  # type: ignore[misc]


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)


def test_a_change_is_known_within_five_seconds_by_its_settings() -> None:
    assert KeysConfig().poll_s + 2.0 <= 5.0  # and one request of the store, whose time-out is 2 s


class Away(MemoryStore):
    away = False

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        if self.away:
            raise StoreUnavailable("away")
        return super().list(prefix)


def test_the_last_table_holds_while_the_store_is_away_but_not_for_ever(folder: str) -> None:
    store, clock = Away(), ManualClock()
    table, key_id, secret = made(NewKey("acme"))
    header = "Bearer " + shown(key_id, secret, publishable=False)
    change_table(store, folder, lambda _: table, NOW_US)
    config = KeysConfig(folder=folder, poll_s=5.0, trust_s=900)
    with closing(StoredKeys(store, config, clock)) as keys:
        store.away = True
        clock.advance(900)
        assert not keys.refresh()
        assert isinstance(keys.identify(header, None), Caller)
        assert keys.ready
        clock.advance(1)
        assert code(keys.identify(header, None)) == (503, "keys_unavailable")
        assert not keys.ready
        store.away = False
        assert keys.refresh()
        assert isinstance(keys.identify(header, None), Caller)


def test_a_gateway_that_never_saw_the_keys_refuses_for_now(folder: str) -> None:
    store = Away()
    store.away = True
    with closing(StoredKeys(store, KeysConfig(folder=folder), SystemClock())) as keys:
        refusal = keys.identify("Bearer x", None)
        assert isinstance(refusal, Refusal)
        assert (refusal.status, refusal.code) == (503, "keys_unavailable")
        assert refusal.retry_after_s
        assert not keys.allows_origin(PAGE)


def test_a_table_that_begins_again_is_read(folder: str) -> None:
    store = MemoryStore()
    key_id, secret = new_secret()
    header = "Bearer " + shown(key_id, secret, publishable=False)
    change_table(store, folder, lambda t: add_key(t, key_id, secret, NewKey("acme"), NOW_US), NOW_US)
    change_table(store, folder, lambda t: revoke_key(t, key_id, NOW_US), NOW_US)
    with closing(StoredKeys(store, KeysConfig(folder=folder), SystemClock())) as keys:
        for info in list(store.list(folder)):
            store.delete(info.key)
        change_table(store, folder, lambda t: add_key(t, key_id, secret, NewKey("acme"), NOW_US), NOW_US)
        assert keys.refresh()
        assert isinstance(keys.identify(header, None), Caller)


def test_a_table_of_a_newer_format_is_refused_by_name(folder: str) -> None:
    store = MemoryStore()
    store.create(f"{folder}/000000000001.json", b'{"format": 2, "keys": []}')
    with pytest.raises(FormatUnknown, match="upgrade"):
        read_table(store, folder)
    with closing(StoredKeys(store, KeysConfig(folder=folder), SystemClock())) as keys:
        assert code(keys.identify("Bearer x", None)) == (503, "keys_unavailable")


def test_old_revisions_are_removed_after_an_hour_only(folder: str) -> None:
    clock = ManualClock(NOW_US)
    store = MemoryStore(clock)
    for _ in range(20):
        change_table(store, folder, lambda table: table, clock.now_us())
    assert len(list(store.list(folder))) == 20
    clock.advance(3601)
    change_table(store, folder, lambda table: table, clock.now_us())
    assert [info.key[-7:-5] for info in store.list(folder)] == [f"{i:02d}" for i in range(6, 22)]


def test_an_open_gateway_serves_no_strange_pages() -> None:
    access = OpenAccess("me", origins=(PAGE,))
    caller = access.identify(None, None)
    assert isinstance(caller, Caller)
    assert caller.tenant == "me"
    assert isinstance(access.identify(None, PAGE), Caller)
    assert code(access.identify(None, "https://evil.test")) == (403, "origin_refused")


def test_a_local_quota_is_a_rate_with_a_burst() -> None:
    quotas = LocalQuotas()
    caller = Caller("k", "t", frozenset(), rate=10, burst=5)
    assert [quotas.take(caller, 1, 0.0) for _ in range(5)] == [None] * 5
    assert quotas.take(caller, 1, 0.0) == pytest.approx(0.1)
    assert quotas.take(caller, 1, 0.1) is None
    assert quotas.take(caller._replace(key_id="other"), 5, 0.1) is None
    # More than the burst passes once the bucket is full, and is paid off afterwards.
    assert quotas.take(caller, 50, 0.1) is not None
    assert quotas.take(caller, 50, 1.0) is None
    assert quotas.take(caller, 1, 1.0) == pytest.approx(4.6)


def test_local_repeats_forget_the_oldest() -> None:
    repeats = LocalRepeats(size=2)
    a, b, c = ("t", "a"), ("t", "b"), ("t", "c")
    repeats.remember({a: b"1", b: b"2"})
    repeats.remember({a: b"1"})
    repeats.remember({c: b"3"})
    assert repeats.known([a, b, c, ("u", "a")]) == {a: b"1", c: b"3"}
