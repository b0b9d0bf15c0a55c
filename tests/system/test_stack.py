"""The local stack with its real servers: start, restart, faults, and what is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import boto3
import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from redis import Redis

from rollwire.ops.stack import StackConfig, StackInfo, down, kill_service, restart_broker, running_stack, up
from rollwire.ops.stack.info import stack_file
from rollwire.ops.stack.processes import is_alive
from rollwire.ops.stack.status import status
from rollwire.schemas.errors import StackError

pytestmark = pytest.mark.system

SCRIPT = Path(sys.executable).with_name("rollwire")


def _until(condition: Callable[[], bool], deadline_s: float = 60.0) -> None:
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.02)


def _processes_that_name(folder: Path) -> list[str]:
    """Command lines of all processes that have to do with the folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if str(folder) in command and "pytest" not in command:
            found.append(command[:200])
    return found


@pytest.fixture(scope="module")
def folder_of_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("own")
    with running_stack(folder):
        yield folder


@pytest.fixture
def own(folder_of_own: Path) -> StackInfo:
    """A stack to which these tests do what they like; whatever the one before has ended runs again."""
    return up(StackConfig(dir=folder_of_own))


def _write(info: StackInfo, topic: str, value: bytes) -> None:
    admin = AdminClient({"bootstrap.servers": info.bootstrap})
    if topic not in admin.list_topics(timeout=30).topics:
        admin.create_topics([NewTopic(topic, 1, 1)])[topic].result(30)
    producer = Producer({"bootstrap.servers": info.bootstrap, "acks": "all"})
    producer.produce(topic, value)
    assert producer.flush(30) == 0


def _read(info: StackInfo, topic: str) -> list[bytes]:
    consumer = Consumer(
        {"bootstrap.servers": info.bootstrap, "group.id": "none", "enable.auto.commit": False}
    )
    try:
        _, end = consumer.get_watermark_offsets(TopicPartition(topic, 0), timeout=30)
        consumer.assign([TopicPartition(topic, 0, 0)])
        values: list[bytes] = []
        _until(lambda: _poll_into(consumer, values) >= end)
        return values
    finally:
        consumer.close()


def _poll_into(consumer: Consumer, values: list[bytes]) -> int:
    message = consumer.poll(0.1)
    if message is not None and message.error() is None:
        values.append(message.value() or b"")
    return len(values)


def _object(info: StackInfo, key: str, body: bytes | None = None) -> bytes:
    client = boto3.client(
        "s3",
        endpoint_url=info.s3_endpoint,
        aws_access_key_id=info.access_key,
        aws_secret_access_key=info.secret_key,
        region_name="us-east-1",
    )
    if body is not None:
        client.put_object(Bucket=info.bucket, Key=key, Body=body)
    return client.get_object(Bucket=info.bucket, Key=key)["Body"].read()


def test_a_restart_keeps_the_ports_the_log_and_the_buckets(own: StackInfo) -> None:
    assert [one.alive for one in status(own)] == [True, True, True]
    assert all(one.address.removeprefix("http://").startswith("127.0.0.1:") for one in status(own))
    assert up(own.config) == own, "a running stack is left as it is"
    _write(own, "kept", b"before")
    _object(own, "kept", b"weights")

    assert down(own.dir) == ["kafka", "s3", "redis"]
    assert not [process for process in own.services.values() if is_alive(process.pid, process.started)]
    assert not stack_file(own.dir).exists()

    again = up(own.config)
    assert (again.bootstrap, again.s3_endpoint, again.redis_url) == (
        own.bootstrap,
        own.s3_endpoint,
        own.redis_url,
    )
    _write(again, "kept", b"after")
    assert _read(again, "kept") == [b"before", b"after"]
    assert _object(again, "kept") == b"weights"


def test_a_killed_service_comes_back_and_the_others_stay(own: StackInfo) -> None:
    with Redis.from_url(own.redis_url) as client:
        client.set("held", "only for now")
    kill_service(own, "redis")
    assert [one.alive for one in status(own)] == [True, True, False]
    back = up(own.config)
    assert back.redis_url == own.redis_url
    assert {name for name in own.services if back.pids[name] != own.pids[name]} == {"redis"}
    with Redis.from_url(back.redis_url) as client:
        assert client.get("held") is None, "Redis keeps nothing (law 1)"


def test_a_killed_broker_comes_back_with_its_log(own: StackInfo) -> None:
    _write(own, "survives", b"acknowledged")
    back = restart_broker(own)
    assert back.bootstrap == own.bootstrap
    assert back.pids["kafka"] != own.pids["kafka"]
    assert _read(back, "survives") == [b"acknowledged"]


def test_another_port_after_a_restart_does_not_lose_the_log(own: StackInfo) -> None:
    """The controller's address is written into its own log: a new one has to be taken over from the settings."""
    _write(own, "moved", b"before")
    down(own.dir)
    first, second = (int(own.bootstrap.partition(":")[2]) + step for step in (1, 2))
    moved = up(own.config.model_copy(update={"kafka_port": first, "controller_port": second}))
    assert moved.bootstrap == f"127.0.0.1:{first}"
    _write(moved, "moved", b"after")
    assert _read(moved, "moved") == [b"before", b"after"]


def test_a_half_started_stack_cleans_up_after_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "bin"
    broken.mkdir()
    (broken / "redis-server").write_text("#!/bin/sh\nsleep 1\necho 'Fatal: cannot allocate memory'\nexit 1\n")
    (broken / "redis-server").chmod(0o755)
    monkeypatch.setenv("PATH", f"{broken}{os.pathsep}{os.environ['PATH']}")
    folder = tmp_path / "half"
    with pytest.raises(StackError, match=r"redis ended while it started: Fatal: cannot allocate memory"):
        up(StackConfig(dir=folder))
    assert not stack_file(folder).exists()
    assert _processes_that_name(folder) == []


def test_the_stack_outlives_the_command_and_down_ends_it(tmp_path: Path) -> None:
    folder = tmp_path / "cli"

    def rollwire(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(SCRIPT), *arguments, "--dir", str(folder)]
        return subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)

    started = rollwire("up")
    assert started.returncode == 0, started.stderr
    assert "kafka answers on 127.0.0.1:" in started.stderr
    try:
        shown = rollwire("status")
        assert shown.returncode == 0
        assert shown.stdout.count("running") == 3
        assert "Kafka Server started" in rollwire("logs", "kafka").stdout
    finally:
        ended = rollwire("down")
    assert ended.stdout.strip() == "ended kafka, s3, redis"
    assert _processes_that_name(folder) == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_a_start_that_is_broken_off_leaves_nothing_running(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    """Ctrl-C cleans up by itself; after kill -9 the record finds what was started, and `down` ends it."""
    folder = tmp_path / f"broken-{uuid.uuid4().hex[:6]}"
    starting = subprocess.Popen([SCRIPT, "up", "--dir", folder], stderr=subprocess.PIPE, text=True)
    with starting:
        _until(lambda: stack_file(folder).exists())
        starting.send_signal(number)
        assert starting.wait(60) == code
    if number is signal.SIGKILL:
        down(folder)
    assert _processes_that_name(folder) == []
    assert not stack_file(folder).exists()
