"""S3Proxy over a folder: an S3 server that honours `If-None-Match`, on 127.0.0.1."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import TYPE_CHECKING

from rollwire.ops.stack.info import Choices
from rollwire.ops.stack.ports import HOST
from rollwire.ops.stack.service import Service
from rollwire.schemas.errors import StackError, StoreUnfit

if TYPE_CHECKING:
    from botocore.exceptions import ClientError
    from mypy_boto3_s3 import S3Client

# Its own DEBUG level, the default, makes it 40 times slower.
_LOGBACK = """\
<configuration>
  <appender name="console" class="ch.qos.logback.core.ConsoleAppender">
    <encoder><pattern>%d{ISO8601} %p %logger{1} %m%n</pattern></encoder>
  </appender>
  <root level="WARN"><appender-ref ref="console"/></root>
</configuration>
"""
# A put that is not sent in chunks is held in memory to check its signature; shards are far below this.
_MAX_PUT_BYTES = 128 << 20


def server_properties(buckets: Path, port: int, access_key: str, secret_key: str) -> str:
    """S3Proxy's configuration."""
    settings = {
        "s3proxy.endpoint": f"http://{HOST}:{port}",
        "s3proxy.authorization": "aws-v2-or-v4",
        "s3proxy.identity": access_key,
        "s3proxy.credential": secret_key,
        "s3proxy.v4-max-non-chunked-request-size": _MAX_PUT_BYTES,
        "jclouds.provider": "filesystem-nio2",
        "jclouds.filesystem.basedir": buckets.as_posix(),
        "jclouds.identity": access_key,
        "jclouds.credential": secret_key,
    }
    return "".join(f"{key}={value}\n" for key, value in settings.items())


def s3_service(java: Path, jars: Path, folder: Path, choices: Choices, bucket: str, heap_mib: int) -> Service:
    """`choices` must have the S3 port."""
    if choices.s3_port is None:
        raise StackError("the S3 server's port has not been chosen")
    endpoint = f"http://{HOST}:{choices.s3_port}"
    properties, logback, buckets = folder / "s3proxy.properties", folder / "logback.xml", folder / "buckets"
    text = server_properties(buckets, choices.s3_port, choices.access_key, choices.secret_key)

    def prepare() -> None:
        buckets.mkdir(parents=True, exist_ok=True)
        properties.touch(mode=0o600)
        properties.write_text(text)
        logback.write_text(_LOGBACK)

    client: list[
        S3Client
    ] = []  # made at the first request: importing boto3 takes as long as the server needs to start

    def ask() -> bool:
        from botocore.exceptions import BotoCoreError, ClientError

        if not client:
            client.append(_client(endpoint, choices))
        try:
            _ensure_bucket(client[0], bucket)
            _check_conditions(client[0], bucket, endpoint)
        except BotoCoreError:
            return False
        except ClientError as error:
            if _status(error) >= 500:
                return False
            raise StackError(
                f"the S3 server at {endpoint} refuses its own credentials or bucket: {error}"
            ) from error
        return True

    heap = [
        f"-Xmx{heap_mib}m",
        f"-Xms{min(heap_mib, 64)}m",
        "-XX:+UseSerialGC",
        "-Xshare:auto",
        "-XX:+ExitOnOutOfMemoryError",
    ]
    command = [
        str(java), *heap, f"-Dlogback.configurationFile={logback}", "-cp", f"{jars}/*",
        "org.gaul.s3proxy.Main", "--properties", str(properties),
    ]  # fmt: skip
    return Service("s3", endpoint, command, prepare, ask)


def _client(endpoint: str, choices: Choices) -> S3Client:
    import boto3
    from botocore.config import Config

    return boto3.client(
        "s3",
        endpoint_url=endpoint,
        aws_access_key_id=choices.access_key,
        aws_secret_access_key=choices.secret_key,
        region_name="us-east-1",
        # The caller asks again and again; a retry in here would only hide how long it takes.
        config=Config(
            s3={"addressing_style": "path"},
            retries={"total_max_attempts": 1},
            connect_timeout=2,
            read_timeout=10,
        ),
    )


def _status(error: ClientError) -> int:
    """The HTTP status that the server answered; 0 where it answered none."""
    return error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)


def _ensure_bucket(client: S3Client, bucket: str) -> None:
    from botocore.exceptions import ClientError

    try:
        client.head_bucket(Bucket=bucket)
    except ClientError as error:
        if _status(error) != 404:
            raise
        client.create_bucket(Bucket=bucket)


def _check_conditions(client: S3Client, bucket: str, endpoint: str) -> None:
    """Creates an object twice; the second time has to be refused. Raises `StoreUnfit` otherwise (law 3)."""
    from botocore.exceptions import ClientError

    key = f".probe/{uuid.uuid4()}"
    client.put_object(Bucket=bucket, Key=key, Body=b"first", IfNoneMatch="*")
    try:
        client.put_object(Bucket=bucket, Key=key, Body=b"second", IfNoneMatch="*")
    except ClientError as error:
        if _status(error) != 412:
            raise
    else:
        raise StoreUnfit(
            f"the store at {endpoint} ignores If-None-Match: two writers of one key would both succeed."
            " Use a store that honours it (S3, MinIO, Ceph, S3Proxy on a file system)"
        )
    finally:
        client.delete_object(Bucket=bucket, Key=key)
