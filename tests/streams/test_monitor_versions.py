"""C55: the monitor starts on versions that are supported, and says which they are where it does not."""

from __future__ import annotations

import itertools

import pytest

from rollwire.schemas.errors import EnvironmentMissing
from rollwire.streams.monitor import run_monitor, versions
from rollwire.streams.monitor.versions import check_versions, installed

GOOD = {"Python": "3.11.7", "faust-streaming": "0.15.3", "aiokafka": "0.14.0", "mode-streaming": "0.7.1"}


@pytest.mark.parametrize(
    ("python", "aiokafka"), list(itertools.product(["3.11.0", "3.12.9", "3.13.1"], ["0.12.0", "0.14.0"]))
)
def test_c55_supported_versions_pass(python: str, aiokafka: str) -> None:
    check_versions({**GOOD, "Python": python, "aiokafka": aiokafka})


@pytest.mark.parametrize(
    ("name", "version"),
    [
        ("Python", "3.10.13"),
        ("Python", "3.14.0"),
        ("aiokafka", "0.11.9"),
        ("aiokafka", "0.15.0rc1"),
        ("aiokafka", "unknown"),
        ("faust-streaming", "0.15.2"),
        ("faust-streaming", "0.16"),
        ("mode-streaming", "0.3.5"),
    ],
)
def test_c55_others_are_refused_by_name(name: str, version: str) -> None:
    with pytest.raises(EnvironmentMissing, match=f"{name} {version} .supported: ") as caught:
        check_versions({**GOOD, name: version})
    assert caught.value.exit_code == 2


def test_c55_what_is_not_there_is_named_too() -> None:
    with pytest.raises(EnvironmentMissing, match="aiokafka is not there"):
        check_versions({name: version for name, version in GOOD.items() if name != "aiokafka"})


def test_c55_this_environment_is_supported_and_a_start_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    check_versions(installed())
    monkeypatch.setitem(versions.SUPPORTED, "aiokafka", ((9,), (10,)))  # type: ignore[arg-type,unused-ignore]
    with pytest.raises(EnvironmentMissing, match="aiokafka"):
        run_monitor("127.0.0.1:1", "p.", None)
