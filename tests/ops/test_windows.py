"""Windows of feedback against the deadlines of those who wait for its rewards."""

from __future__ import annotations

import msgspec
import pytest

from rollwire.ops.settings import build_settings
from rollwire.ops.windows import check_windows
from rollwire.schemas.errors import ConfigError
from rollwire.schemas.rules import default_rules

LIVE = {"pack": {"cohort": {"production_share": 1.0}}}


def test_the_defaults_fit() -> None:
    check_windows(default_rules(), build_settings({}, where="here"))
    check_windows(default_rules(), build_settings(LIVE, where="here"))


def test_a_window_that_ends_behind_the_join_is_an_error_that_names_both() -> None:
    long = msgspec.structs.replace(default_rules(), window_s=7_200.0)
    with pytest.raises(ConfigError, match=r"7200 s after.*production\.group_deadline_s is 7200: .* raise"):
        check_windows(long, build_settings({}, where="here"))


def test_an_answer_must_not_be_too_old_for_a_plan_when_its_reward_is_given() -> None:
    settings = build_settings(
        {"pack": {"cohort": {"production_share": 1.0, "max_age_s": 600.0}}}, where="here"
    )
    with pytest.raises(ConfigError, match=r"pack\.cohort\.max_age_s is 600"):
        check_windows(default_rules(), settings)
    # Who trains on no live traffic has no use for that.
    check_windows(default_rules(), build_settings({"pack": {"cohort": {"max_age_s": 600.0}}}, where="here"))
