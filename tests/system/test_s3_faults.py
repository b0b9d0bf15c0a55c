"""The real S3 server behind a proxy that breaks its word: what each broken promise comes to at our end."""

from __future__ import annotations

import hashlib
import io
import os
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import boto3
import pytest
from botocore.config import Config

from rollwire.ops.chaos import s3_proxy
from rollwire.ops.chaos.s3_proxy import S3Proxy, requests
from rollwire.ops.stack import StackInfo
from rollwire.schemas.errors import DeltaCorrupt, ObjectConflict, StoreUnavailable, StoreUnfit
from rollwire.streams.seams.store_s3 import S3Store

pytestmark = pytest.mark.system

WAIT = 60.0
DATA = os.urandom(300_000)
SHA = hashlib.sha256(DATA).hexdigest()


@pytest.fixture
def proxy(stack: StackInfo) -> Iterator[S3Proxy]:
    assert stack.s3_endpoint is not None
    with S3Proxy(stack.s3_endpoint) as proxy:
        yield proxy


@pytest.fixture
def bucket(stack: StackInfo) -> str:
    name = f"t{uuid.uuid4().hex[:12]}"
    S3Store(stack.s3_endpoint, name, stack.access_key, stack.secret_key).ensure_bucket()
    return name


@pytest.fixture
def store(stack: StackInfo, proxy: S3Proxy, bucket: str) -> S3Store:
    """The store through the proxy."""
    return S3Store(proxy.endpoint, bucket, stack.access_key, stack.secret_key, timeout_s=20.0)


@pytest.fixture
def behind(stack: StackInfo, bucket: str) -> S3Store:
    """The same bucket, without the proxy."""
    return S3Store(stack.s3_endpoint, bucket, stack.access_key, stack.secret_key)


def puts(proxy: S3Proxy) -> int:
    return sum(request.method == "PUT" for request in proxy.seen)


def test_what_no_rule_takes_goes_through(store: S3Store) -> None:
    store.probe()
    assert store.create("a/b c+ü", DATA)
    assert not store.create("a/b c+ü", DATA)
    assert store.get("a/b c+ü", sha256=SHA) == DATA
    assert store.get_range("a/b c+ü", 10, 20) == DATA[10:20]
    info = store.head("a/b c+ü")
    assert info is not None
    assert info.size == len(DATA)
    assert [o.key for o in store.list("a/")] == ["a/b c+ü"]
    store.delete("a/b c+ü")
    assert store.head("a/b c+ü") is None


@pytest.mark.parametrize("after", [0, 1_000, len(DATA) - 1])
def test_a_cut_upload_leaves_nothing_or_all_of_it(
    store: S3Store, behind: S3Store, proxy: S3Proxy, after: int
) -> None:
    cut = proxy.rule(requests("PUT"), s3_proxy.cut_upload(after))
    assert store.create("k", DATA)
    assert cut.hits == 1
    assert puts(proxy) == 2
    assert behind.get("k", sha256=SHA) == DATA


def test_an_upload_that_is_always_cut_leaves_no_object(
    stack: StackInfo, behind: S3Store, proxy: S3Proxy, bucket: str
) -> None:
    proxy.rule(requests("PUT"), s3_proxy.cut_upload(100_000), times=None)
    store = S3Store(proxy.endpoint, bucket, stack.access_key, stack.secret_key, timeout_s=2.0)
    with pytest.raises(StoreUnavailable, match=r"put of 'k' \(300000 bytes\)"):
        store.create("k", DATA)
    assert behind.head("k") is None
    assert list(behind.list("")) == []


@pytest.mark.parametrize("after", [0, 150_000, len(DATA) - 1])
def test_a_cut_download_is_read_again(store: S3Store, behind: S3Store, proxy: S3Proxy, after: int) -> None:
    behind.create("k", DATA)
    cut = proxy.rule(requests("GET"), s3_proxy.cut_download(after))
    assert store.get("k", sha256=SHA) == DATA
    assert cut.hits == 1


def test_a_damaged_download_is_named(store: S3Store, behind: S3Store, proxy: S3Proxy) -> None:
    behind.create("k", DATA)
    proxy.rule(requests("GET"), s3_proxy.damage_download(123_456))
    with pytest.raises(DeltaCorrupt, match="'k': 300000 bytes with SHA-256"):
        store.get("k", sha256=SHA)
    assert store.get("k", sha256=SHA) == DATA


def test_c64_the_reply_of_a_put_is_lost(store: S3Store, behind: S3Store, proxy: S3Proxy) -> None:
    """The retry meets its own success (412), which is settled by content."""
    lost = proxy.rule(requests("PUT", "/manifests/"), s3_proxy.lose_reply)
    assert not store.create("weights/p/manifests/x.json", DATA)  # it was there: ours
    assert lost.hits == 1
    assert behind.get("weights/p/manifests/x.json", sha256=SHA) == DATA


def test_c64_a_409_means_that_nothing_landed(store: S3Store, behind: S3Store, proxy: S3Proxy) -> None:
    proxy.rule(requests("PUT"), s3_proxy.answer(409, "ConditionalRequestConflict"))
    assert store.create("k", DATA)
    assert behind.get("k", sha256=SHA) == DATA


def test_c64_of_rivals_with_lost_replies_one_wins(store: S3Store, behind: S3Store, proxy: S3Proxy) -> None:
    proxy.rule(requests("PUT"), s3_proxy.lose_reply, times=2)
    contents = [DATA, DATA[::-1]]

    def create(data: bytes) -> bool:
        try:
            store.create("k", data)
        except ObjectConflict:
            return False
        return True

    with ThreadPoolExecutor(2) as pool:
        won = list(pool.map(create, contents))
    assert won.count(True) == 1
    assert behind.get("k") == contents[won.index(True)]


@pytest.mark.parametrize(("status", "code"), [(500, "InternalError"), (503, "SlowDown")])
def test_errors_for_a_while_are_waited_out(store: S3Store, proxy: S3Proxy, status: int, code: str) -> None:
    trouble = proxy.rule(lambda _request: True, s3_proxy.answer(status, code), times=3)
    assert store.create("k", DATA)
    assert trouble.hits == 3
    assert store.get("k", sha256=SHA) == DATA


def test_a_slow_store_is_waited_for(store: S3Store, proxy: S3Proxy) -> None:
    proxy.rule(requests("PUT"), s3_proxy.slow(0.5))
    assert store.create("k", DATA)
    assert puts(proxy) == 1


def test_c66_a_put_that_lands_after_its_retry_changes_nothing(
    stack: StackInfo, behind: S3Store, proxy: S3Proxy, bucket: str
) -> None:
    """Objects go up in one conditional request, so what comes late meets the object of its retry."""
    gate = threading.Event()
    late = proxy.rule(requests("PUT"), s3_proxy.hold(gate))
    store = S3Store(
        proxy.endpoint, bucket, stack.access_key, stack.secret_key, timeout_s=30.0, read_timeout_s=1.0
    )
    assert store.create("k", DATA)
    first = behind.head("k")
    assert not late.hit.is_set()
    gate.set()
    assert late.hit.wait(WAIT)
    assert behind.head("k") == first
    assert behind.get("k", sha256=SHA) == DATA


def test_c66_a_damaged_upload_never_becomes_an_object(
    store: S3Store, behind: S3Store, proxy: S3Proxy
) -> None:
    """The server checks the SHA-256 that comes with a put; the next try is whole."""
    damage = proxy.rule(requests("PUT"), s3_proxy.damage_upload(200_000))
    assert store.create("k", DATA)
    assert damage.hits == 1
    assert behind.get("k", sha256=SHA) == DATA


def test_a_store_that_ignores_the_condition_is_refused(
    stack: StackInfo, store: S3Store, proxy: S3Proxy
) -> None:
    assert stack.access_key is not None
    assert stack.secret_key is not None
    proxy.rule(requests("PUT"), s3_proxy.strip_condition(stack.access_key, stack.secret_key), times=None)
    with pytest.raises(StoreUnfit, match="ignores If-None-Match"):
        store.probe()


def test_c63_nothing_of_ours_needs_the_new_default_checksums(
    store: S3Store, behind: S3Store, proxy: S3Proxy
) -> None:
    """Bodies go as they are, in one piece, with the one checksum that we ask for."""
    store.probe()
    assert store.create("k", DATA)
    for request in proxy.seen:
        assert "aws-chunked" not in request.headers.get("content-encoding", "")
        assert "x-amz-trailer" not in request.headers
        sums = {name for name in request.headers if name.startswith("x-amz-checksum-")}
        assert sums <= {"x-amz-checksum-sha256", "x-amz-checksum-algorithm", "x-amz-checksum-mode"}
    put = next(request for request in proxy.seen if request.method == "PUT")
    assert "x-amz-checksum-sha256" in put.headers
    assert behind.get("k", sha256=SHA) == DATA


@pytest.mark.parametrize("sums", ["when_required", "when_supported"])
def test_c63_the_store_of_the_stack_takes_whatever_boto3_sends(
    stack: StackInfo, bucket: str, sums: str
) -> None:
    client: Any = boto3.client(
        "s3",
        endpoint_url=stack.s3_endpoint,
        aws_access_key_id=stack.access_key,
        aws_secret_access_key=stack.secret_key,
        region_name=stack.region,
        config=Config(
            s3={"addressing_style": "path"},
            request_checksum_calculation=sums,  # type: ignore[arg-type]
            response_checksum_validation=sums,  # type: ignore[arg-type]
        ),
    )
    client.put_object(Bucket=bucket, Key="bytes", Body=DATA)
    client.put_object(Bucket=bucket, Key="file", Body=io.BytesIO(DATA))
    upload = client.create_multipart_upload(Bucket=bucket, Key="parts")["UploadId"]
    parts = [
        {
            "PartNumber": number,
            "ETag": client.upload_part(
                Bucket=bucket, Key="parts", UploadId=upload, PartNumber=number, Body=bytes(5 << 20)
            )["ETag"],
        }
        for number in (1, 2, 3)
    ]
    client.complete_multipart_upload(
        Bucket=bucket, Key="parts", UploadId=upload, MultipartUpload={"Parts": parts}
    )
    assert client.get_object(Bucket=bucket, Key="file")["Body"].read() == DATA
    assert client.head_object(Bucket=bucket, Key="parts")["ContentLength"] == 15 << 20
    for number in range(10):
        client.put_object(Bucket=bucket, Key=f"n{number}", Body=b"n")
    gone = client.delete_objects(
        Bucket=bucket, Delete={"Objects": [{"Key": f"n{number}"} for number in range(10)]}
    )
    assert len(gone["Deleted"]) == 10
    client.close()


def test_c63_a_store_that_refuses_the_checksum_is_named_at_the_start(store: S3Store, proxy: S3Proxy) -> None:
    proxy.rule(
        lambda request: "x-amz-checksum-sha256" in request.headers,
        s3_proxy.answer(501, "NotImplemented"),
        times=None,
    )
    with pytest.raises(StoreUnfit, match=rf"(?s){proxy.endpoint}.*x-amz-checksum-sha256"):
        store.probe()
