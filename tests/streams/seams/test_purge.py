"""Deleting for good: on the real S3 server, and on one that keeps versions, which the local stack's does not."""

from __future__ import annotations

import http.server
import uuid
from collections.abc import Callable
from typing import ClassVar
from urllib.parse import parse_qs, urlsplit

import pytest

from rollwire.ops.stack import StackInfo
from rollwire.schemas.errors import StoreUnavailable
from rollwire.streams.seams.store import PurgingStore
from rollwire.streams.seams.store_memory import MemoryStore
from rollwire.streams.seams.store_s3 import S3Store


@pytest.fixture(params=["memory", pytest.param("s3", marks=pytest.mark.system)])
def store(request: pytest.FixtureRequest) -> PurgingStore:
    if request.param == "memory":
        return MemoryStore()
    stack: StackInfo = request.getfixturevalue("stack")
    made = S3Store(stack.s3_endpoint, f"t{uuid.uuid4().hex[:12]}", stack.access_key, stack.secret_key)
    made.ensure_bucket()
    return made


def test_what_is_purged_is_gone_and_its_neighbours_are_not(store: PurgingStore) -> None:
    for key in ("keys/a/1", "keys/a/10", "keys/a/1.erased"):
        store.create(key, b"x")
    store.purge("keys/a/1")
    store.purge("keys/a/1")
    store.purge("never")
    assert [one.key for one in store.list("keys/")] == ["keys/a/1.erased", "keys/a/10"]


class Versioned(http.server.BaseHTTPRequestHandler):
    """The calls of a bucket with versions that `purge` makes; two versions a page."""

    status: ClassVar[str] = "Enabled"
    locked: ClassVar[bool] = False
    versions: ClassVar[list[tuple[str, str, bool]]] = []  # (key, id, a mark of deletion)

    def do_GET(self) -> None:
        query = parse_qs(urlsplit(self.path).query, keep_blank_values=True)
        if "versioning" in query:
            if self.status == "unknown":
                self._answer(501, "<Error><Code>NotImplemented</Code></Error>")
                return
            inner = f"<Status>{self.status}</Status>" if self.status else ""
            self._answer(200, f"<VersioningConfiguration>{inner}</VersioningConfiguration>")
            return
        found = [v for v in self.versions if v[0].startswith(query["prefix"][0])]
        if "key-marker" in query:
            found = found[found.index(next(v for v in found if v[1] == query["version-id-marker"][0])) + 1 :]
        page, more = found[:2], len(found) > 2
        rows = "".join(
            f"<{tag}><Key>{key}</Key><VersionId>{id_}</VersionId></{tag}>"
            for key, id_, mark in page
            for tag in ("DeleteMarker" if mark else "Version",)
        )
        marker = (
            f"<NextKeyMarker>{page[-1][0]}</NextKeyMarker><NextVersionIdMarker>{page[-1][1]}</NextVersionIdMarker>"
            if more
            else ""
        )
        truncated = str(more).lower()
        self._answer(
            200,
            f"<ListVersionsResult><IsTruncated>{truncated}</IsTruncated>{marker}{rows}</ListVersionsResult>",
        )

    def do_DELETE(self) -> None:
        parts = urlsplit(self.path)
        query = parse_qs(parts.query)
        key = parts.path.removeprefix("/bucket/")
        if self.locked:
            self._answer(403, "<Error><Code>AccessDenied</Code></Error>")
            return
        wanted = query.get("versionId")
        self.versions[:] = [
            v for v in self.versions if not (v[0] == key and (not wanted or v[1] == wanted[0]))
        ]
        self._answer(204, "")

    def do_HEAD(self) -> None:
        self.send_response(404)
        self.end_headers()

    def _answer(self, status: int, body: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@pytest.fixture
def versioned(
    serves: Callable[[type[http.server.BaseHTTPRequestHandler]], S3Store],
) -> tuple[S3Store, type[Versioned]]:
    class Own(Versioned):
        versions: ClassVar[list[tuple[str, str, bool]]] = [
            ("k/1", "c", True),
            ("k/1", "b", False),
            ("k/1", "a", False),
            ("k/1.erased", "d", False),
            ("k/10", "e", False),
        ]

    return serves(Own), Own


@pytest.mark.parametrize("status", ["Enabled", "Suspended"])
def test_every_version_goes_marks_of_deletion_too(
    versioned: tuple[S3Store, type[Versioned]], status: str
) -> None:
    store, bucket = versioned
    bucket.status = status
    store.purge("k/1")
    assert bucket.versions == [("k/1.erased", "d", False), ("k/10", "e", False)]


@pytest.mark.parametrize("status", ["", "unknown"])
def test_a_store_without_versions_is_asked_for_none(
    versioned: tuple[S3Store, type[Versioned]], status: str
) -> None:
    store, bucket = versioned
    bucket.status = status
    store.purge("k/1")
    assert bucket.versions == [("k/1.erased", "d", False), ("k/10", "e", False)]


def test_a_version_that_may_not_be_deleted_is_no_silent_success(
    versioned: tuple[S3Store, type[Versioned]],
) -> None:
    store, bucket = versioned
    bucket.locked = True
    with pytest.raises(StoreUnavailable, match="AccessDenied"):
        store.purge("k/1")
