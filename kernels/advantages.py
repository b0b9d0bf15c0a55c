"""Advantages of one group: reward minus a baseline over its scored members (GRPO's group baseline, Shao et al. 2024),
without division by the standard deviation (Liu et al. 2025, "Understanding R1-Zero-like training", section 3.1).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, Literal, NamedTuple

from rollwire.schemas.errors import Refused

Baseline = Literal["mean", "leave_one_out"]
NoSignal = Literal["equal_rewards", "unscorable", "group_of_one"]

# Advantages travel as float32: what float32 turns to infinity must not leave.
FLOAT32_MAX: Final = 3.4028234663852886e38


class AdvantageResult(NamedTuple):
    """`advantages` has one entry per member: None exactly where the reward is None."""

    advantages: tuple[float | None, ...]
    mean: float | None  # of the scored rewards; None = no member was scored
    scored: int
    no_signal: NoSignal | None  # why the group teaches nothing; then every scored advantage is exactly 0.0


def group_advantages(rewards: Sequence[float | None], baseline: Baseline = "mean") -> AdvantageResult:
    """Advantages over one whole group.

    A reward of None means "could not be scored": it is kept out of the mean and gets no advantage (C09).
    "mean": r_i - mean(r). "leave_one_out": r_i - mean of the others, which is n / (n - 1) times the former
    (RLOO, Ahmadian et al. 2024). The order of members changes no bit of the result.

    Equal rewards are found by exact comparison of all scored rewards, never by a standard deviation (C07). The result
    of a group without signal names the reason: `group_of_one` (one member in all), `unscorable` (fewer than two
    members were scored), `equal_rewards`.

    Raises `Refused("not_finite")` for a reward that is NaN or infinite, and where an advantage would leave float32's
    range: nothing is clamped.
    """
    scored = [float(reward) for reward in rewards if reward is not None]
    for reward in scored:
        if not math.isfinite(reward):
            raise Refused("not_finite", f"reward {reward} of a group of {len(rewards)}")
    if not scored:
        return AdvantageResult((None,) * len(rewards), None, 0, "unscorable")
    count = len(scored)
    first = scored[0]
    if all(reward == first for reward in scored):
        # The mean is the reward itself: summing and dividing could be off by a rounding.
        reason: NoSignal = "equal_rewards"
        if count == 1:
            reason = "group_of_one" if len(rewards) == 1 else "unscorable"
        zeros = tuple(None if reward is None else 0.0 for reward in rewards)
        return AdvantageResult(zeros, first, count, reason)
    mean = _mean(scored)
    factor = count / (count - 1) if baseline == "leave_one_out" else 1.0
    advantages = tuple(None if reward is None else (float(reward) - mean) * factor for reward in rewards)
    for advantage in advantages:
        if advantage is not None and not abs(advantage) <= FLOAT32_MAX:
            raise Refused("not_finite", f"advantage {advantage} does not fit float32")
    return AdvantageResult(advantages, mean, count, None)


def _mean(values: Sequence[float]) -> float:
    """Exactly rounded sum over the count: independent of the order of `values`."""
    try:
        return math.fsum(values) / len(values)
    except OverflowError as error:
        raise Refused("not_finite", "the sum of the rewards is beyond float64") from error
