"""S3 behind the object store seam, through boto3: create-only puts that settle what a lost answer leaves open.

A 412 means "maybe mine": the first try may have landed and its answer been lost (C64). It is settled by the object's
content. A 409 means that nothing landed yet: it is tried again. A multipart upload's late part could replace a retried
one (C66), so objects are put in one request, with a SHA-256 that the store checks.
"""

from __future__ import annotations

import base64
import hashlib
import secrets
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Final, NoReturn, TypeVar, cast

import boto3
import stamina
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from rollwire.schemas.errors import ObjectConflict, ObjectMissing, StoreUnavailable, StoreUnfit
from rollwire.streams.seams.store import ObjectInfo
from rollwire.streams.seams.store_memory import REFRESH_US, check_range, verify

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client
    from mypy_boto3_s3.literals import BucketLocationConstraintType
    from mypy_boto3_s3.type_defs import (
        GetObjectRequestTypeDef,
        ListObjectsV2RequestTypeDef,
        PutObjectRequestTypeDef,
    )

_T = TypeVar("_T")
_ATTEMPTS: Final = 5
_DEFAULT_REGION: Final = "us-east-1"
_CONFLICT: Final = 409
_EXISTS: Final = 412
_FULL: Final = 507
_TOO_LARGE: Final = frozenset({"EntityTooLarge", "MaxMessageLengthExceeded"})
_REFUSED: Final = frozenset({400, 501})  # the store does not know something that a request asks for
_NOT_KNOWN: Final = 501
# Not the request was wrong, but what arrived of it.
_DAMAGED: Final = frozenset({"BadDigest", "IncompleteBody", "RequestTimeout", "XAmzContentSHA256Mismatch"})
_MISSING: Final = frozenset({"404", "NoSuchKey", "NotFound"})


class S3Store:
    """One bucket of one store. `timeout_s` bounds each call, all of its tries together; `read_timeout_s` the silence of
    the store within one try (by default half of that, 5 s at least)."""

    def __init__(
        self,
        endpoint: str | None,
        bucket: str,
        access_key: str | None = None,
        secret_key: str | None = None,
        region: str = _DEFAULT_REGION,
        *,
        timeout_s: float = 60.0,
        read_timeout_s: float | None = None,
        clock_us: Callable[[], int] = lambda: time.time_ns() // 1_000,
    ) -> None:
        self._bucket = bucket
        self._region = region
        self._endpoint = endpoint or "AWS"
        self._timeout_s = timeout_s
        self._clock_us = clock_us
        self._client: S3Client = boto3.client(
            "s3",
            endpoint_url=endpoint,
            aws_access_key_id=access_key,
            aws_secret_access_key=secret_key,
            region_name=region,
            config=Config(
                # Retries are ours: botocore's would meet their own 412 and hide it.
                retries={"mode": "standard", "total_max_attempts": 1},
                connect_timeout=5,
                read_timeout=max(5.0, timeout_s / 2) if read_timeout_s is None else read_timeout_s,
                max_pool_connections=16,
                # The checksum that we send is signed and covers the body: a second digest of it in the signature would be
                # computed on both sides for nothing, and makes stores keep a whole body in memory before they take it.
                s3={"addressing_style": "path", "payload_signing_enabled": False},
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
            ),
        )

    def ensure_bucket(self) -> None:
        """Makes the bucket where it does not exist."""
        try:
            self._call("making the bucket", lambda: self._client.head_bucket(Bucket=self._bucket))
        except ObjectMissing:
            try:
                self._call("making the bucket", self._create_bucket)
            except ObjectConflict:
                return  # another process made it in between

    def _create_bucket(self) -> None:
        if self._region == _DEFAULT_REGION:
            self._client.create_bucket(Bucket=self._bucket)
        else:  # AWS refuses a bucket for elsewhere that does not say so
            where = cast("BucketLocationConstraintType", self._region)
            self._client.create_bucket(
                Bucket=self._bucket, CreateBucketConfiguration={"LocationConstraint": where}
            )

    def create(self, key: str, data: bytes) -> bool:
        digest = hashlib.sha256(data).digest()
        try:
            self._put(key, data, digest, only_new=True)
        except _Exists:
            pass
        else:
            return True
        info = self.head(key)
        if info is None or info.size != len(data) or self._digest(key) != digest:
            raise ObjectConflict(f"{key!r} in bucket {self._bucket!r} exists with other content")
        if self._clock_us() - info.modified_us > REFRESH_US:
            self._put(key, data, digest, only_new=False)
        return False

    def get(self, key: str, *, sha256: str | None = None) -> bytes:
        data = self._read(key, None)
        verify(key, data, sha256)
        return data

    def get_range(self, key: str, start: int, end: int) -> bytes:
        check_range(key, start, end)
        return self._read(key, f"bytes={start}-{end - 1}")

    def head(self, key: str) -> ObjectInfo | None:
        try:
            found = self._call(
                f"head of {key!r}", lambda: self._client.head_object(Bucket=self._bucket, Key=key)
            )
        except ObjectMissing:
            return None
        return ObjectInfo(key, found["ContentLength"], round(found["LastModified"].timestamp() * 1e6))

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        request: ListObjectsV2RequestTypeDef = {"Bucket": self._bucket, "Prefix": prefix}
        while True:
            page = self._call(f"listing {prefix!r}", partial(self._client.list_objects_v2, **request))
            for found in page.get("Contents", []):
                modified = found.get("LastModified")
                yield ObjectInfo(
                    found.get("Key", ""),
                    found.get("Size", 0),
                    0 if modified is None else round(modified.timestamp() * 1e6),
                )
            token = page.get("NextContinuationToken", "")
            if not page.get("IsTruncated") or not token:
                return
            request["ContinuationToken"] = token

    def delete(self, key: str) -> None:
        self._call(f"deleting {key!r}", lambda: self._client.delete_object(Bucket=self._bucket, Key=key))

    def purge(self, key: str) -> None:
        if not self._keeps_versions():
            self.delete(key)
            if self.head(key) is not None:
                raise StoreUnavailable(f"{key!r} is still there after it was deleted: is another writing it?")
            return
        while versions := self._versions(key):
            before = len(versions)
            for version in versions:
                self._call(
                    f"deleting version {version} of {key!r}",
                    partial(self._client.delete_object, Bucket=self._bucket, Key=key, VersionId=version),
                )
            if len(left := self._versions(key)) >= before:
                raise StoreUnavailable(
                    f"{len(left)} versions of {key!r} in bucket {self._bucket!r} are still there after they were "
                    "deleted: does the bucket have an object lock?"
                )

    def _keeps_versions(self) -> bool:
        """Asked each time: versioning may be switched on at any time."""
        try:
            answer = self._call(
                f"asking whether bucket {self._bucket!r} keeps versions",
                partial(self._client.get_bucket_versioning, Bucket=self._bucket),
            )
        except StoreUnavailable as failure:
            if isinstance(failure.__cause__, ClientError) and _status(failure.__cause__) == _NOT_KNOWN:
                return False  # a store that does not know versions has none
            raise
        return answer.get("Status") in ("Enabled", "Suspended")  # suspended: those made before are kept

    def _versions(self, key: str) -> tuple[str, ...]:
        """Of this key, marks of deletion among them."""
        found: tuple[str, ...] = ()
        # Keys come in order and a key is the first of those it is a prefix of: one page holds all that matter, mostly.
        request: dict[str, str] = {"Bucket": self._bucket, "Prefix": key}
        while True:
            page = self._call(
                f"listing the versions of {key!r}",
                partial(self._client.list_object_versions, **request),  # type: ignore[arg-type]
            )
            for one in (*page.get("Versions", ()), *page.get("DeleteMarkers", ())):
                if one.get("Key") == key:
                    found += (one.get("VersionId", "null"),)
            if not page.get("IsTruncated"):
                return found
            request["KeyMarker"] = page.get("NextKeyMarker", "")
            request["VersionIdMarker"] = page.get("NextVersionIdMarker", "")

    def hold(self, key: str, until_us: int) -> bool:
        # Asked first: a store that does not know of locks takes a request for one for a put of the object.
        if not self._locks():
            return False
        until = datetime.fromtimestamp(until_us / 1e6, UTC)
        self._call(
            f"locking {key!r}",
            partial(
                self._client.put_object_retention,
                Bucket=self._bucket,
                Key=key,
                Retention={"Mode": "COMPLIANCE", "RetainUntilDate": until},
                ChecksumAlgorithm="SHA256",
            ),
        )
        return True

    def _locks(self) -> bool:
        """Asked each time: object lock may be switched on at any time."""
        try:
            answer = self._call(
                f"asking whether bucket {self._bucket!r} has an object lock",
                partial(self._client.get_object_lock_configuration, Bucket=self._bucket),
            )
        except ObjectMissing:
            return False  # AWS: no configuration of it
        except StoreUnavailable as failure:
            if isinstance(failure.__cause__, ClientError) and _status(failure.__cause__) in _REFUSED:
                return False  # a store that does not know locks has none
            raise
        return answer.get("ObjectLockConfiguration", {}).get("ObjectLockEnabled") == "Enabled"

    def probe(self) -> None:
        key = f".rollwire/probe/{secrets.token_hex(16)}"
        first, second = b"first " + key.encode(), b"second " + key.encode()
        advice = (
            f"{self._endpoint} cannot hold weights: use a store that honours conditional writes "
            "(AWS S3, S3Proxy, versitygw, MinIO from 2024-11 on)"
        )
        try:
            try:
                self._put(key, first, hashlib.sha256(first).digest(), only_new=True)
            except StoreUnavailable as failure:
                if isinstance(failure.__cause__, ClientError) and _status(failure.__cause__) in _REFUSED:
                    raise StoreUnfit(
                        f"the store at {self._endpoint} refuses a put with If-None-Match and a SHA-256 "
                        f"(x-amz-checksum-sha256): {failure}. {advice}"
                    ) from failure
                raise
            try:
                self._put(key, second, hashlib.sha256(second).digest(), only_new=True)
            except _Exists:
                pass
            else:
                raise StoreUnfit(
                    f"the store ignores If-None-Match: a second writer replaced an object. {advice}"
                )
            if self._read(key, None) != first:
                raise StoreUnfit(
                    f"the store refused a second writer and kept its content all the same. {advice}"
                )
            if self._read(key, "bytes=1-3") != first[1:4]:
                raise StoreUnfit(f"the store does not serve ranges. {advice}")
        finally:
            self.delete(key)

    def _put(self, key: str, data: bytes, digest: bytes, *, only_new: bool) -> None:
        request: PutObjectRequestTypeDef = {
            "Bucket": self._bucket,
            "Key": key,
            "Body": data,
            "ContentLength": len(data),
            "ChecksumAlgorithm": "SHA256",
            "ChecksumSHA256": base64.b64encode(digest).decode(),
        }
        if only_new:
            request["IfNoneMatch"] = "*"
        self._call(f"put of {key!r} ({len(data)} bytes)", partial(self._client.put_object, **request))

    def _digest(self, key: str) -> bytes:
        return hashlib.sha256(self._read(key, None)).digest()

    def _read(self, key: str, byte_range: str | None) -> bytes:
        request: GetObjectRequestTypeDef = {"Bucket": self._bucket, "Key": key}
        if byte_range is not None:
            request["Range"] = byte_range
        return self._call(f"get of {key!r}", lambda: self._client.get_object(**request)["Body"].read())

    def _call(self, what: str, call: Callable[[], _T]) -> _T:
        """One request, tried again while that may help and the deadline allows."""
        try:
            for attempt in stamina.retry_context(
                on=_worth_another_try,
                attempts=_ATTEMPTS,
                timeout=self._timeout_s,
                wait_initial=0.1,
                wait_max=5.0,
                wait_jitter=0.5,
            ):
                with attempt:
                    return call()
        except ClientError as failure:
            self._raise(what, failure)
        except BotoCoreError as failure:
            raise StoreUnavailable(f"{what} at {self._endpoint}: {failure}; is the store up?") from failure
        raise StoreUnavailable(f"{what} at {self._endpoint}: no try was made")

    def _raise(self, what: str, failure: ClientError) -> NoReturn:
        status, code = _status(failure), failure.response.get("Error", {}).get("Code", "")
        text = f"{what} in bucket {self._bucket!r} at {self._endpoint}: {code} (HTTP {status})"
        if status == _EXISTS:
            raise _Exists(text) from failure
        if code in _MISSING or status == 404:
            raise ObjectMissing(text) from failure
        if code in ("BucketAlreadyOwnedByYou", "BucketAlreadyExists"):
            raise ObjectConflict(text) from failure
        if code in _TOO_LARGE or status == 413:
            raise StoreUnfit(
                f"{text}: the store takes no object of this size in one request; make the publisher's shards smaller "
                "(publisher.anchor_shard_bytes, publisher.shard_bytes)"
            ) from failure
        if status == _FULL or "space" in str(failure).lower():
            raise StoreUnavailable(
                f"{text}: the store is full; free space on its disk, then go on"
            ) from failure
        if status >= 500:
            raise StoreUnavailable(
                f"{text} after {_ATTEMPTS} tries; look at the store's log and at the space on its disk"
            ) from failure
        raise StoreUnavailable(f"{text}; {failure}") from failure


class _Exists(Exception):
    """412: the key is there."""


def _status(failure: ClientError) -> int:
    return int(failure.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def _worth_another_try(failure: Exception) -> bool:
    if isinstance(failure, ClientError):
        code = failure.response.get("Error", {}).get("Code", "")
        if code in ("BucketAlreadyOwnedByYou", "BucketAlreadyExists"):
            return False
        if code in _DAMAGED:
            return True
        return _status(failure) in (_CONFLICT, 429) or (
            _status(failure) >= 500 and _status(failure) not in (_FULL, _NOT_KNOWN)
        )
    return isinstance(failure, BotoCoreError)
