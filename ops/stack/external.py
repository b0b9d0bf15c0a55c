"""Services that a user already has: how their URLs are read, and the real request that tells whether they answer.

Nothing of them is started, ended or configured, except that the bucket is made where it is missing. Credentials for the
store come from where every AWS client takes them (environment, `~/.aws`, a role), never from a command line or a
file of ours.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from typing import NamedTuple
from urllib.parse import SplitResult, urlsplit

from rollwire.ops.stack.config import StackConfig
from rollwire.ops.stack.info import ServiceName
from rollwire.schemas.errors import ConfigError, StackError, StoreError, StoreUnfit

LOCAL_REGION = "us-east-1"  # the local S3 server, and most that are not AWS, have one region only
_ANSWER_S = 10.0


class External(NamedTuple):
    """One service that is not ours."""

    name: ServiceName
    address: str  # as people see it: without a password
    # One real request. Raises `StackError` that names the address and what to do, `StoreUnfit` for a store that cannot be used.
    check: Callable[[], None]


class StoreAt(NamedTuple):
    """A bucket of a store. `endpoint` None = AWS's own."""

    endpoint: str | None
    bucket: str | None  # None = the default one
    region: str


def kafka_bootstrap(url: str) -> str:
    """`host:port[,host:port]`, with or without `kafka://` before it, as clients want it. Raises `ConfigError`."""
    bare = url.removeprefix("kafka://").rstrip("/")
    for part in bare.split(","):
        host, colon, port = part.rpartition(":")
        if not (colon and host and port.isdecimal() and 0 < int(port) < 65_536) or "/" in part:
            raise ConfigError(f"--kafka {url!r} is not of the form host:port[,host:port]")
    return bare


def store_at(url: str, environment: Mapping[str, str] | None = None) -> StoreAt:
    """`http(s)://host[:port][/bucket]`, or `s3://bucket` for AWS itself. Raises `ConfigError`.

    The region is AWS's own setting (`AWS_REGION`, `AWS_DEFAULT_REGION`), else us-east-1, which stores with one region take.
    """
    environment = os.environ if environment is None else environment
    region = environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION") or LOCAL_REGION
    parts = _split("--s3", url)
    if parts.username or parts.password:
        raise ConfigError("--s3 holds credentials: give them as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
    if parts.scheme == "s3" and parts.hostname and not parts.path.strip("/"):
        return StoreAt(None, parts.hostname, region)
    bucket = parts.path.strip("/")
    if parts.scheme not in ("http", "https") or not parts.hostname or "/" in bucket or parts.query:
        raise ConfigError(f"--s3 {url!r} is neither http(s)://host[:port][/bucket] nor s3://bucket")
    return StoreAt(f"{parts.scheme}://{parts.netloc}", bucket or None, region)


def redis_address(url: str) -> str:
    """A Redis URL without its password, for people. Raises `ConfigError` for what is none."""
    parts = _split("--redis", url)
    if parts.scheme not in ("redis", "rediss") or not parts.hostname:
        raise ConfigError(
            f"--redis {parts.scheme}://... is not of the form redis[s]://[:password@]host[:port][/db]"
        )
    return f"{parts.hostname}:{parts.port or 6379}"


def _split(option: str, url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        _ = parts.port  # parsed only when asked for
    except ValueError as error:
        raise ConfigError(f"{option}: no URL: {error}") from None
    return parts


def externals(config: StackConfig) -> dict[ServiceName, External]:
    """The services of `config` that are not to be started, by name. Raises `ConfigError` for a URL that cannot be."""
    found: dict[ServiceName, External] = {}
    if config.kafka is not None:
        bootstrap = kafka_bootstrap(config.kafka)
        found["kafka"] = External("kafka", bootstrap, lambda: _ask_kafka(bootstrap))
    if config.s3 is not None:
        at = store_at(config.s3)
        bucket = at.bucket or config.bucket
        address = f"{at.endpoint or 's3:/'}/{bucket}"
        found["s3"] = External("s3", address, lambda: _ask_s3(at, bucket, address))
    if config.redis is not None:
        url, shown = config.redis, redis_address(config.redis)
        found["redis"] = External("redis", shown, lambda: _ask_redis(url, shown))
    return found


def _ask_kafka(bootstrap: str) -> None:
    from confluent_kafka import KafkaException
    from confluent_kafka.admin import AdminClient

    silent = logging.getLogger("rollwire.ops.stack.external")
    silent.addHandler(logging.NullHandler())
    silent.propagate = False
    client = AdminClient({"bootstrap.servers": bootstrap, "log_level": 0}, logger=silent)
    try:
        answer = client.list_topics(timeout=_ANSWER_S)
    except KafkaException as failure:
        raise StackError(
            f"Kafka at {bootstrap} did not answer within {_ANSWER_S:.0f} s ({failure.args[0].str()}): is it up, is the "
            "port that of a plaintext listener, and do its advertised listeners name a host that this machine reaches?"
        ) from None
    if not answer.brokers:
        raise StackError(f"Kafka at {bootstrap} names no broker: wait until it has started")


def _ask_s3(at: StoreAt, bucket: str, address: str) -> None:
    from botocore.exceptions import BotoCoreError, NoCredentialsError

    from rollwire.streams.seams.store_s3 import S3Store

    try:
        store = S3Store(at.endpoint, bucket, region=at.region, timeout_s=_ANSWER_S)
        store.ensure_bucket()
        store.probe()
    except StoreUnfit:
        raise
    except (BotoCoreError, StoreError) as failure:
        if isinstance(failure.__cause__, NoCredentialsError):
            raise StackError(
                f"no credentials for the store at {address}: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or "
                "AWS_PROFILE"
            ) from None
        raise StackError(
            f"the store at {address} cannot be used ({failure}): is it up, are the AWS_* credentials and the region "
            f"({at.region}) right, and may they make the bucket?"
        ) from failure


def _ask_redis(url: str, address: str) -> None:
    from redis import Redis
    from redis.exceptions import RedisError

    try:
        with Redis.from_url(url, socket_timeout=_ANSWER_S, socket_connect_timeout=_ANSWER_S) as client:
            client.ping()
    except (RedisError, OSError) as failure:
        raise StackError(
            f"Redis at {address} did not answer ({failure}): is it up, and are its password and TLS (rediss://) right?"
        ) from None
