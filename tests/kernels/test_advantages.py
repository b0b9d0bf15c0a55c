"""Cases C07, C08, C09 and the properties of group advantages."""

from __future__ import annotations

import math
import random
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwire.kernels.advantages import Baseline, group_advantages
from rollwire.schemas.errors import Refused

rewards = st.floats(min_value=-1e6, max_value=1e6, allow_nan=False)
groups = st.lists(st.none() | rewards, max_size=40)
baselines: st.SearchStrategy[Baseline] = st.sampled_from(["mean", "leave_one_out"])


@pytest.mark.parametrize("value", [0.1, 0.5, -0.0, 1e-310, float(np.float32(0.1))])
def test_c07_equal_rewards_are_seen_although_their_std_is_not_zero(value: float) -> None:
    result = group_advantages([value] * 7)
    assert result.no_signal == "equal_rewards"
    assert result.advantages == (0.0,) * 7
    assert result.mean == value


def test_c07_one_loser_keeps_all_members() -> None:
    result = group_advantages([0.0] + [0.95] * 7)
    assert result.no_signal is None
    values = [a for a in result.advantages if a is not None]
    assert len(values) == 8
    assert math.isclose(math.fsum(values), 0.0, abs_tol=1e-12)


def test_c07_a_difference_of_one_ulp_is_a_difference() -> None:
    assert group_advantages([0.1, np.nextafter(0.1, 1.0)]).no_signal is None


def test_c08_group_of_one_has_no_nan() -> None:
    for baseline in ("mean", "leave_one_out"):
        result = group_advantages([1.0], baseline)
        assert result == ((0.0,), 1.0, 1, "group_of_one")


def test_c08_one_scored_of_two() -> None:
    assert group_advantages([1.0, None], "leave_one_out") == ((0.0, None), 1.0, 1, "unscorable")


def test_c09_missing_is_not_zero() -> None:
    assert group_advantages([1.0, 0.0, None]) == ((0.5, -0.5, None), 0.5, 2, None)
    assert group_advantages([None, None]) == ((None, None), None, 0, "unscorable")
    assert group_advantages([]) == ((), None, 0, "unscorable")


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_c09_nan_is_refused(bad: float) -> None:
    with pytest.raises(Refused) as refused:
        group_advantages([1.0, 0.0, None, bad])
    assert refused.value.reason == "not_finite"


@pytest.mark.parametrize("extreme", [[1.7e308, -1.7e308], [1.7e308, 1.6e308, 1.5e308], [1e39, 0.0]])
def test_what_float32_cannot_hold_is_refused(extreme: list[float]) -> None:
    with pytest.raises(Refused) as refused:
        group_advantages(extreme)
    assert refused.value.reason == "not_finite"


def test_the_mean_of_equal_extremes_does_not_overflow() -> None:
    assert group_advantages([1.7e308, 1.7e308]).mean == 1.7e308


@given(groups, baselines)
def test_finite_and_none_exactly_where_the_reward_is_none(
    group: list[float | None], baseline: Baseline
) -> None:
    result = group_advantages(group, baseline)
    assert [a is None for a in result.advantages] == [r is None for r in group]
    assert all(math.isfinite(a) for a in result.advantages if a is not None)
    assert result.scored == sum(r is not None for r in group)
    scored = [r for r in group if r is not None]
    assert (result.no_signal is None) == (len(set(scored)) > 1)
    if result.no_signal is not None:
        assert all(a == 0.0 for a in result.advantages if a is not None)


@given(groups.filter(lambda g: len({r for r in g if r is not None}) > 1))
def test_against_exact_arithmetic(group: list[float | None]) -> None:
    scored = [Fraction(r) for r in group if r is not None]
    size = max(1.0, float(max(abs(r) for r in scored)))
    mean, n = sum(scored) / len(scored), len(scored)
    for baseline in ("mean", "leave_one_out"):
        for reward, advantage in zip(group, group_advantages(group, baseline).advantages, strict=True):
            if reward is None or advantage is None:
                continue
            base = mean if baseline == "mean" else (sum(scored) - Fraction(reward)) / (n - 1)
            assert abs(advantage - float(Fraction(reward) - base)) <= 1e-14 * size


@given(groups, baselines, st.integers(0, 1000))
def test_the_order_of_members_changes_no_bit(
    group: list[float | None], baseline: Baseline, seed: int
) -> None:
    order = list(range(len(group)))
    random.Random(seed).shuffle(order)
    straight = group_advantages(group, baseline).advantages
    shuffled = group_advantages([group[i] for i in order], baseline).advantages
    assert [straight[i] for i in order] == list(shuffled)
