"""`rollwire replay`: what a person may say, and what is wrong with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollwire.ops.commands.replay import changes_of, check_changes, window_of
from rollwire.ops.replay.shadow import check_prefix
from rollwire.schemas.errors import ConfigError
from rollwire.schemas.rules.parse import default_text
from rollwire.streams.replay.window import Window

NOON = 1_796_040_000_000_000  # 2026-11-30T12:00:00Z


@pytest.mark.parametrize(
    ("start", "end", "window"),
    [
        (None, None, Window()),
        ("2026-11-30T12:00", None, Window(from_us=NOON)),
        ("2026-11-30T20:00+08:00", "2026-11-30T12:00:01Z", Window(from_us=NOON, to_us=NOON + 1_000_000)),
        ("5", "17", Window(from_offset=5, to_offset=17)),
    ],
)
def test_a_window_is_of_times_or_of_offsets(start: str | None, end: str | None, window: Window) -> None:
    assert window_of(start, end) == window


@pytest.mark.parametrize(
    ("start", "end"), [("noon", None), ("17", "5"), ("2026-11-30", "2026-11-29"), ("1960-01-01", None)]
)
def test_a_window_that_is_none_is_named(start: str | None, end: str | None) -> None:
    with pytest.raises(ConfigError):
        window_of(start, end)


def test_settings_are_read_as_json_and_rules_from_their_file(tmp_path: Path) -> None:
    changes, rules = changes_of(["pack.max_lag_versions=2", "assemble.baseline=leave_one_out"])
    assert changes == {"pack.max_lag_versions": 2, "assemble.baseline": "leave_one_out"}
    assert rules is None
    file = tmp_path / "rules.toml"
    file.write_text(default_text(), "utf-8")
    assert changes_of([f"rules={file}"])[1] is not None


@pytest.mark.parametrize("given", ["pack", "=2", "trainer.learning_rate=1", "pack=2", "rules=/nowhere.toml"])
def test_what_is_no_setting_of_a_replay_is_named(given: str) -> None:
    with pytest.raises(ConfigError):
        changes_of([given])


@pytest.mark.parametrize("into", ["", "run.", "run.shadow.", "r"])
def test_shadow_topics_are_never_those_of_the_history(into: str) -> None:
    with pytest.raises(ConfigError):
        check_prefix("run.", into)
    check_prefix("run.", "shadow.")


def test_a_setting_of_nobody_who_is_replayed_is_named() -> None:
    check_changes(["pack.max_lag_versions", "production.baseline"], ["assemble-production", "pack"])
    check_changes([], ["attribute"])
    with pytest.raises(ConfigError, match="assemble is not replayed"):
        check_changes(["pack.max_lag_versions", "assemble.baseline"], ["attribute", "pack"])
