"""Which schema registry a command means: the one that is said, else that of the run whose topics it reads."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollwire.consumers.trainer.connect import LiveStack
from rollwire.ops import roles
from rollwire.ops.broker import broker
from rollwire.ops.demo.supervisor import PARENT
from rollwire.ops.registry import set_registry
from rollwire.ops.settings import build_settings, save_settings
from rollwire.schemas import codec
from rollwire.schemas.errors import EnvironmentMissing
from rollwire.schemas.framing import confluent_id
from rollwire.schemas.golden import load_examples
from rollwire.streams.seams.registry_confluent import ConfluentRegistry

EVENT = load_examples("rewards")[0].event


@pytest.fixture(autouse=True)
def _no_registry_afterwards() -> Iterator[None]:
    yield
    set_registry(None, "")


def writes_confluent() -> bool:
    return confluent_id(codec.encode(EVENT, source="test", time_us=1_767_225_600_000_000).value) is not None


def _run(folder: Path, name: str, **settings: str) -> None:
    (folder / "runs" / name).mkdir(parents=True)
    (folder / "runs" / name / "run.json").write_text(json.dumps({"prefix": f"{name}.", **settings}))


def test_a_run_says_its_registry(tmp_path: Path) -> None:
    _run(tmp_path, "1", schema_registry_url="mock://one")
    _run(tmp_path, "2")
    assert broker(tmp_path, "b:1").prefix == "2."
    assert not writes_confluent()
    assert broker(tmp_path, "b:1", "1.").prefix == "1."
    assert writes_confluent()
    assert broker(tmp_path, "b:1", "other.").prefix == "other."
    assert not writes_confluent()
    assert broker(tmp_path / "nothing", "b:1").prefix == "rollwire."
    broker(tmp_path, "b:1", "2.", "mock://said")
    assert writes_confluent()


def test_the_setting_is_none_by_default() -> None:
    assert build_settings({}, where="x").schema_registry_url is None
    assert (
        build_settings({"schema_registry_url": "http://r:1"}, where="x").schema_registry_url == "http://r:1"
    )


def test_without_the_extra_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "httpx2", None)
    with pytest.raises(EnvironmentMissing, match=r"install rollwire\[registry\]"):
        ConfluentRegistry("http://r:1")


def test_a_role_writes_by_its_runs_registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    monkeypatch.setitem(roles.ROLES, "monitor", lambda _: seen.append(writes_confluent()))
    monkeypatch.setattr(roles, "read_stack", lambda _: None)
    monkeypatch.setattr(roles, "configure_logging", lambda: None)
    monkeypatch.delenv(PARENT, raising=False)
    for url in ("mock://role", None):
        save_settings(tmp_path, build_settings({"schema_registry_url": url}, where="x"))
        roles.run_role("monitor", tmp_path, tmp_path)
    assert seen == [True, False]


@pytest.mark.parametrize(("url", "confluent"), [("mock://rank", True), (None, False)])
def test_a_ranks_process_writes_by_its_runs_registry(url: str | None, confluent: bool) -> None:
    stack = LiveStack("127.0.0.1:9", "p.", "http://127.0.0.1:9", "bucket", "key", "secret", registry_url=url)
    log, _ = stack()
    log.close()
    assert writes_confluent() is confluent
