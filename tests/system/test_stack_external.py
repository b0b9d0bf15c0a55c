"""A stack on services that are there already: every command runs against it, and `down` leaves them alone."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rollwire.ops.cli import run
from rollwire.ops.role_run import open_store
from rollwire.ops.settings import build_settings, save_settings
from rollwire.ops.stack import StackConfig, StackInfo, kill_service, read_stack, up
from rollwire.ops.stack.status import status
from rollwire.schemas import records as r
from rollwire.schemas.errors import StackError
from rollwire.streams import synthetic
from rollwire.streams.emit import outgoing
from rollwire.streams.seams.log_kafka import KafkaLog

pytestmark = pytest.mark.system
SCRIPT = Path(sys.executable).with_name("rollwire")


def until(holds: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    pause = threading.Event()
    while not holds():
        assert time.monotonic() < deadline, "the condition did not come true"
        pause.wait(0.2)


@contextmanager
def role(name: str, folder: Path) -> Iterator[None]:
    process = subprocess.Popen([SCRIPT, "run", name, "--dir", folder])
    try:
        yield
        process.terminate()
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.wait(10)


@pytest.fixture
def credentials(stack: StackInfo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("boto3.DEFAULT_SESSION", None)  # it remembers the credentials of an earlier test
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", stack.access_key or "")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", stack.secret_key or "")
    monkeypatch.delenv("AWS_REGION", raising=False)
    monkeypatch.delenv("AWS_DEFAULT_REGION", raising=False)


@pytest.mark.usefixtures("credentials")
def test_a_flow_on_services_of_others(
    stack: StackInfo, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "B"
    bucket = f"b{uuid.uuid4().hex[:12]}"
    at = ["--dir", str(folder)]
    own = ["--kafka", f"kafka://{stack.bootstrap}", "--s3", f"{stack.s3_endpoint}/{bucket}"]

    def rollwire(*words: str) -> tuple[int, str]:
        capsys.readouterr()
        code = run([*words, *at])
        return code, capsys.readouterr().out

    code, said = rollwire("up", *own)  # Redis is started
    assert code == 0
    assert said.count("(external)") == 2
    info = read_stack(folder)
    assert (info.external, list(info.services)) == (("kafka", "s3"), ["redis"])
    assert (info.bootstrap, info.bucket, info.access_key, info.secret_key) == (
        stack.bootstrap,
        bucket,
        None,
        None,
    )
    assert str(stack.secret_key) not in (folder / "stack.json").read_text()
    assert [(one.name, one.alive, one.external) for one in status(info)] == [
        ("kafka", True, True),
        ("s3", True, True),
        ("redis", True, False),
    ]
    assert rollwire("status")[0] == 0
    assert rollwire("up", *own)[0] == 0  # what is there stays
    assert rollwire("up")[0] == 0  # also where it is not named again
    assert read_stack(folder) == info
    assert rollwire("up", "--redis", "redis://127.0.0.1:1")[0] == 2  # another one than the stack's
    with pytest.raises(StackError, match="not started here"):
        kill_service(info, "kafka")

    settings = build_settings({"prefix": f"t{uuid.uuid4().hex[:12]}."}, where="the test")
    save_settings(folder / "runs" / "0001-test", settings)
    assert rollwire("topics", "apply")[0] == 0
    log = KafkaLog(stack.bootstrap, settings.prefix)
    now_us = time.time_ns() // 1_000
    group = synthetic.group_id(now_us, 1)
    events: list[r.Event] = [synthetic.rollout(group, i, 2, at_us=now_us, top_k=0) for i in range(2)]
    events += [synthetic.reward(group, i, float(i), at_us=now_us) for i in range(2)]
    log.writer().write([outgoing(event, source="test", time_us=now_us) for event in events])
    with role("assemble", folder):
        until(lambda: rollwire("cat", "groups")[1] != "")
    log.close()
    shown = json.loads(rollwire("cat", "groups")[1])
    assert shown["event"]["group_id"] == group
    assert rollwire("ledger")[0] == 0
    assert rollwire("dlq", "list")[0] == 1
    store = open_store(info, None)
    assert store.create("key", b"data")
    assert store.get("key") == b"data"

    code, said = rollwire("down")
    assert code == 0
    assert said == "ended redis; left alone: kafka, s3\n"
    assert not (folder / "stack.json").exists()
    assert all(one.alive and not one.external for one in status(read_stack(stack.dir)))
    assert open_store(stack, bucket).get("key") == b"data"


@pytest.mark.usefixtures("credentials")
def test_nothing_is_started_where_everything_is_there(stack: StackInfo, tmp_path: Path) -> None:
    config = StackConfig(
        dir=tmp_path,
        kafka=stack.bootstrap,
        s3=stack.s3_endpoint,
        redis=stack.redis_url,
        cache=tmp_path / "empty",
    )
    info = up(config)  # without jars, which nothing needs
    assert info.services == {}
    assert info.ready
    assert (info.bootstrap, info.s3_endpoint, info.redis_url) == (
        stack.bootstrap,
        stack.s3_endpoint,
        stack.redis_url,
    )
    assert not (tmp_path / "empty").exists()
