"""One behaviour of the object store seam, for the twin in memory, a folder, and a real S3 server."""

from __future__ import annotations

import hashlib
import http.server
import os
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from email.utils import formatdate
from pathlib import Path
from typing import ClassVar

import pytest

from rollwire.schemas.errors import (
    DeltaCorrupt,
    ObjectConflict,
    ObjectMissing,
    StoreError,
    StoreUnavailable,
    StoreUnfit,
)
from rollwire.streams.seams.clock import ManualClock
from rollwire.streams.seams.store import ObjectStore
from rollwire.streams.seams.store_folder import FolderStore
from rollwire.streams.seams.store_memory import MemoryStore
from rollwire.streams.seams.store_s3 import S3Store

DAY_US = 24 * 3600 * 1_000_000


@pytest.fixture(params=["memory", "folder", pytest.param("s3", marks=pytest.mark.system)])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    if request.param == "memory":
        return MemoryStore()
    if request.param == "folder":
        return FolderStore(tmp_path / "store")
    return live(request)


def now_us() -> int:
    return time.time_ns() // 1_000


def live(request: pytest.FixtureRequest, clock_us: Callable[[], int] = now_us) -> S3Store:
    stack = request.getfixturevalue("stack")
    bucket = f"t{uuid.uuid4().hex[:12]}"
    made = S3Store(stack.s3_endpoint, bucket, stack.access_key, stack.secret_key, clock_us=clock_us)
    made.ensure_bucket()
    made.ensure_bucket()  # a second time changes nothing
    return made


@pytest.mark.parametrize("size", [0, 1, 5_000_000])
def test_an_object_comes_back_as_it_was(store: ObjectStore, size: int) -> None:
    data = os.urandom(size)
    assert store.create("a/b c+ü", data)
    assert store.get("a/b c+ü") == data
    assert store.get("a/b c+ü", sha256=hashlib.sha256(data).hexdigest()) == data
    info = store.head("a/b c+ü")
    assert info is not None
    assert (info.key, info.size) == ("a/b c+ü", size)


def test_the_second_creator_of_the_same_content_is_told_so(store: ObjectStore) -> None:
    assert store.create("k", b"same")
    assert not store.create("k", b"same")


@pytest.mark.parametrize("other", [b"sane", b"longer than before", b""])
def test_other_content_under_the_same_key_is_a_conflict(store: ObjectStore, other: bytes) -> None:
    assert store.create("k", b"same")
    with pytest.raises(ObjectConflict, match="'k'"):
        store.create("k", other)
    assert store.get("k") == b"same"


def test_of_racing_creators_one_wins(store: ObjectStore) -> None:
    def create(n: int) -> bool:
        try:
            return store.create("k", b"%d" % n)
        except ObjectConflict:
            return False

    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(create, range(8)))
    assert won.count(True) == 1
    assert store.get("k") == b"%d" % won.index(True)


def test_a_wrong_digest_is_corruption(store: ObjectStore) -> None:
    store.create("k", b"v")
    with pytest.raises(DeltaCorrupt, match="'k'"):
        store.get("k", sha256="0" * 64)


def test_ranges(store: ObjectStore) -> None:
    store.create("k", bytes(range(100)))
    assert store.get_range("k", 0, 1) == b"\x00"
    assert store.get_range("k", 10, 20) == bytes(range(10, 20))
    with pytest.raises(ValueError, match="no range"):
        store.get_range("k", 5, 5)


def test_what_is_not_there(store: ObjectStore) -> None:
    assert store.head("nothing") is None
    with pytest.raises(ObjectMissing, match="nothing"):
        store.get("nothing")
    with pytest.raises(ObjectMissing, match="nothing"):
        store.get_range("nothing", 0, 1)
    store.delete("nothing")
    assert list(store.list("nothing")) == []


def test_listing_is_by_prefix_in_key_order(store: ObjectStore) -> None:
    for key in ("b/2", "a/1", "b/10", "b/1", "bb"):
        store.create(key, key.encode())
    assert [(o.key, o.size) for o in store.list("b/")] == [("b/1", 3), ("b/10", 4), ("b/2", 3)]
    store.delete("b/10")
    assert [o.key for o in store.list("b/")] == ["b/1", "b/2"]
    assert store.create("b/10", b"new")


def test_the_probe_passes_and_leaves_nothing(store: ObjectStore) -> None:
    store.probe()
    assert list(store.list("")) == []


def test_an_old_object_is_put_again(request: pytest.FixtureRequest) -> None:
    clock = ManualClock()
    store = MemoryStore(clock)
    store.create("k", b"v")
    first = store.head("k")
    clock.advance(11 * 3600)
    assert not store.create("k", b"v")
    assert store.head("k") == first
    clock.advance(2 * 3600)
    assert not store.create("k", b"v")
    second = store.head("k")
    assert first is not None
    assert second is not None
    assert second.modified_us == first.modified_us + 13 * 3600 * 1_000_000


def test_an_old_file_gets_a_new_time(tmp_path: Path) -> None:
    store = FolderStore(tmp_path, ManualClock(now_us() + DAY_US))
    store.create("k", b"v")
    first = store.head("k")
    assert not store.create("k", b"v")
    second = store.head("k")
    assert first is not None
    assert second is not None
    assert second.modified_us > first.modified_us + DAY_US // 2


@pytest.mark.parametrize("key", ["", "/etc/passwd", "../out", "a/../../out", "a//b", "a/"])
def test_a_folder_takes_no_key_that_leads_out_of_it(tmp_path: Path, key: str) -> None:
    with pytest.raises(ValueError, match="no key"):
        FolderStore(tmp_path / "store").create(key, b"v")


def test_what_a_killed_writer_left_is_no_object(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    store.create("a/k", b"v")
    (tmp_path / "a" / ".part-0123").write_bytes(b"half")
    assert [info.key for info in store.list("")] == ["a/k"]


@pytest.mark.system
def test_an_old_object_is_put_again_on_s3(request: pytest.FixtureRequest) -> None:
    later = live(request, lambda: DAY_US + 4_000_000_000_000_000)
    assert later.create("k", b"v")
    first = later.head("k")
    assert first is not None

    def refreshed() -> bool:
        assert not later.create("k", b"v")
        now = later.head("k")
        assert now is not None
        return now.modified_us > first.modified_us

    assert any(refreshed() for _ in range(2_000))  # the store's clock may count in seconds


class Script(http.server.BaseHTTPRequestHandler):
    """An S3 server that answers as it is told: C64's lost answers and stores that ignore conditions."""

    answers: ClassVar[
        list[tuple[str, int, bytes]]
    ] = []  # (method, status, body), in order; the last one repeats
    seen: ClassVar[list[tuple[str, str | None]]] = []

    def _answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        type(self).seen.append((self.command, self.headers.get("If-None-Match")))
        at = next((i for i, a in enumerate(self.answers) if a[0] in (self.command, "*")), None)
        _, status, body = ("", 500, b"") if at is None else self.answers[at]
        if at is not None and sum(a[0] == self.answers[at][0] for a in self.answers) > 1:
            self.answers.pop(at)
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Last-Modified", formatdate(usegmt=True))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_PUT = do_HEAD = do_DELETE = _answer

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@pytest.fixture
def scripted() -> type[Script]:
    class Own(Script):
        answers: ClassVar[list[tuple[str, int, bytes]]] = []
        seen: ClassVar[list[tuple[str, str | None]]] = []

    return Own


@pytest.fixture
def against(
    serves: Callable[[type[http.server.BaseHTTPRequestHandler]], S3Store], scripted: type[Script]
) -> S3Store:
    return serves(scripted)


def test_c64_a_lost_answer_is_settled_by_content(against: S3Store, scripted: type[Script]) -> None:
    """The first put landed but its answer was a 500; the second meets its own object (C64)."""
    scripted.answers = [("PUT", 500, b""), ("PUT", 412, b""), ("HEAD", 200, b"mine"), ("GET", 200, b"mine")]
    assert not against.create("k", b"mine")
    assert [m for m, _ in scripted.seen] == ["PUT", "PUT", "HEAD", "GET"]
    assert {c for m, c in scripted.seen if m == "PUT"} == {"*"}


def test_c64_a_rival_of_the_same_length_is_a_conflict(against: S3Store, scripted: type[Script]) -> None:
    scripted.answers = [("PUT", 412, b""), ("HEAD", 200, b"them"), ("GET", 200, b"them")]
    with pytest.raises(ObjectConflict):
        against.create("k", b"mine")


def test_c64_a_409_is_tried_again(against: S3Store, scripted: type[Script]) -> None:
    scripted.answers = [("PUT", 409, b""), ("PUT", 409, b""), ("PUT", 200, b"")]
    assert against.create("k", b"mine")
    assert len(scripted.seen) == 3


def test_a_full_disk_is_named(against: S3Store, scripted: type[Script]) -> None:
    scripted.answers = [("*", 507, b"<Error><Code>InsufficientStorage</Code></Error>")]
    with pytest.raises(StoreUnavailable, match="full; free space"):
        against.create("k", b"v")


def test_a_broken_store_is_given_up_with_advice(against: S3Store, scripted: type[Script]) -> None:
    scripted.answers = [("*", 500, b"")]
    with pytest.raises(StoreUnavailable, match="space on its disk"):
        against.create("k", b"v")
    assert len(scripted.seen) > 1


def test_a_store_that_is_not_there_is_unavailable() -> None:
    with pytest.raises(StoreUnavailable, match="is the store up"):
        S3Store("http://127.0.0.1:9", "bucket", "a", "s", timeout_s=1).get("k")


def test_a_store_that_ignores_the_condition_is_refused(against: S3Store, scripted: type[Script]) -> None:
    scripted.answers = [("*", 200, b"")]
    with pytest.raises(StoreUnfit, match="ignores If-None-Match") as caught:
        against.probe()
    assert isinstance(caught.value, StoreError)
    assert caught.value.exit_code == 2
