"""Locks of objects: asked for where the bucket has them, and never of a store that would take the request for a put."""

from __future__ import annotations

import http.server
import uuid
from collections.abc import Callable
from typing import ClassVar
from urllib.parse import urlsplit

import pytest

from rollwire.ops.stack import StackInfo
from rollwire.schemas.errors import StoreUnavailable
from rollwire.streams.seams.store_s3 import S3Store

_ENABLED = "<ObjectLockConfiguration><ObjectLockEnabled>Enabled</ObjectLockEnabled></ObjectLockConfiguration>"


class Locking(http.server.BaseHTTPRequestHandler):
    """A bucket that is asked for its object lock, and for one of an object."""

    answer: ClassVar[tuple[int, str]] = (200, _ENABLED)
    put: ClassVar[list[tuple[str, str]]] = []

    def do_GET(self) -> None:
        assert urlsplit(self.path).query == "object-lock"
        self._answer(*self.answer)

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        self.put.append((self.path, body))
        self._answer(200, "")

    def _answer(self, status: int, body: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@pytest.fixture
def locking(
    serves: Callable[[type[http.server.BaseHTTPRequestHandler]], S3Store],
) -> tuple[S3Store, type[Locking]]:
    class Own(Locking):
        put: ClassVar[list[tuple[str, str]]] = []

    return serves(Own), Own


def test_an_object_is_locked_until_the_time_that_is_said(locking: tuple[S3Store, type[Locking]]) -> None:
    store, bucket = locking
    assert store.hold("archive/a.json", 1_800_000_000_000_000)
    ((path, body),) = bucket.put
    assert path == "/bucket/archive/a.json?retention"
    assert "<Mode>COMPLIANCE</Mode><RetainUntilDate>2027-01-15T08:00:00Z</RetainUntilDate>" in body


@pytest.mark.parametrize(
    "answer",
    [
        (404, "<Error><Code>ObjectLockConfigurationNotFoundError</Code></Error>"),
        (501, "<Error><Code>NotImplemented</Code></Error>"),
        (400, "<Error><Code>InvalidRequest</Code></Error>"),
        (200, "<ListBucketResult><Name>bucket</Name></ListBucketResult>"),
    ],
)
def test_a_bucket_without_locks_is_asked_for_none(
    locking: tuple[S3Store, type[Locking]], answer: tuple[int, str]
) -> None:
    store, bucket = locking
    bucket.answer = answer
    assert not store.hold("archive/a.json", 1_800_000_000_000_000)
    assert bucket.put == []


def test_who_may_not_ask_is_told_so(locking: tuple[S3Store, type[Locking]]) -> None:
    store, bucket = locking
    bucket.answer = (403, "<Error><Code>AccessDenied</Code></Error>")
    with pytest.raises(StoreUnavailable, match="AccessDenied"):
        store.hold("archive/a.json", 1_800_000_000_000_000)


@pytest.mark.system
def test_the_local_store_has_no_locks_and_keeps_its_objects(stack: StackInfo) -> None:
    store = S3Store(stack.s3_endpoint, f"t{uuid.uuid4().hex[:12]}", stack.access_key, stack.secret_key)
    store.ensure_bucket()
    store.create("a.json", b"content")
    assert not store.hold("a.json", 1_800_000_000_000_000)
    assert store.get("a.json") == b"content"
