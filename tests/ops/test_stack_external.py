"""Services that a user already has: how their URLs are read, and what is said where they do not answer."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from rollwire.ops.cli import run
from rollwire.ops.stack import StackConfig, external
from rollwire.ops.stack.external import (
    LOCAL_REGION,
    StoreAt,
    externals,
    kafka_bootstrap,
    redis_address,
    store_at,
)
from rollwire.schemas.errors import ConfigError


@pytest.fixture
def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


@pytest.mark.parametrize("url", ["a:9092", "kafka://a:9092", "kafka://a:9092/"])
def test_kafka_urls(url: str) -> None:
    assert kafka_bootstrap(url) == "a:9092"
    assert kafka_bootstrap("a:1,b:2") == "a:1,b:2"


@pytest.mark.parametrize("url", ["", "a", "a:", ":9092", "a:0", "a:99999", "http://a:9092", "a:1,", "a:1/x"])
def test_what_is_no_kafka_url(url: str) -> None:
    with pytest.raises(ConfigError, match="host:port"):
        kafka_bootstrap(url)


@pytest.mark.parametrize(
    ("url", "environment", "found"),
    [
        ("http://a:9000", {}, StoreAt("http://a:9000", None, LOCAL_REGION)),
        ("https://a/bucket/", {"AWS_REGION": "eu-west-1"}, StoreAt("https://a", "bucket", "eu-west-1")),
        ("s3://bucket", {"AWS_DEFAULT_REGION": "x"}, StoreAt(None, "bucket", "x")),
    ],
)
def test_store_urls(url: str, environment: dict[str, str], found: StoreAt) -> None:
    assert store_at(url, environment) == found


@pytest.mark.parametrize(
    "url", ["", "a:9000", "s3://", "s3://b/prefix", "http://a/b/c", "ftp://a", "http://a:x"]
)
def test_what_is_no_store_url(url: str) -> None:
    with pytest.raises(ConfigError, match="--s3"):
        store_at(url, {})


def test_credentials_do_not_belong_into_a_url() -> None:
    with pytest.raises(ConfigError, match="AWS_ACCESS_KEY_ID") as caught:
        store_at("http://key:secret@a:9000", {})
    assert "secret@" not in str(caught.value)


def test_redis_urls() -> None:
    assert redis_address("redis://:secret@a/0") == "a:6379"
    assert redis_address("rediss://a:1") == "a:1"
    for url in ("a:6379", "http://a", "redis://"):
        with pytest.raises(ConfigError, match="--redis"):
            redis_address(url)


def test_what_is_named_is_not_started() -> None:
    assert externals(StackConfig()) == {}
    found = externals(StackConfig(kafka="a:1", s3="s3://bucket", redis="redis://:secret@b"))
    assert [(one.name, one.address) for one in found.values()] == [
        ("kafka", "a:1"),
        ("s3", "s3://bucket"),
        ("redis", "b:6379"),
    ]


@pytest.mark.parametrize(
    ("option", "url", "says"),
    [
        ("--kafka", "127.0.0.1:{port}", "Kafka at 127.0.0.1:{port} did not answer"),
        ("--s3", "http://127.0.0.1:{port}/b", "the store at http://127.0.0.1:{port}/b cannot be used"),
        ("--redis", "redis://:hidden@127.0.0.1:{port}", "Redis at 127.0.0.1:{port} did not answer"),
    ],
)
def test_a_service_that_does_not_answer_is_named_with_what_to_do(
    option: str,
    url: str,
    says: str,
    closed_port: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(external, "_ANSWER_S", 0.5)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    began = ["up", "--dir", str(tmp_path), option, url.format(port=closed_port)]
    assert run(began) == 2
    said = capsys.readouterr().err
    assert says.format(port=closed_port) in said
    assert "is it up" in said
    assert "hidden" not in said
    assert not (tmp_path / "stack.json").exists()  # and nothing else was started


def test_a_store_without_credentials_says_where_they_come_from(
    closed_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("boto3.DEFAULT_SESSION", None)  # it remembers the credentials of an earlier test
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    assert run(["up", "--dir", str(tmp_path), "--s3", f"http://127.0.0.1:{closed_port}"]) == 2
    assert "no credentials for the store at" in capsys.readouterr().err
