"""What a feedback demo must show before it may exit with 0, and the figures it writes."""

from __future__ import annotations

from typing import Final

from rollwire.ops.demo.checks import Check
from rollwire.ops.demo.feedback.people import Told
from rollwire.ops.demo.feedback.recipe import FEEDBACK_STEPS
from rollwire.ops.demo.feedback.tally import FeedbackFacts
from rollwire.ops.figures import Figure

MIN_GAIN: Final = 0.15
MAX_CONTROL_GAIN: Final = 0.04
MIN_SERVED: Final = 20
MAX_WALL_S: Final = 360.0


def feedback_figures(
    facts: FeedbackFacts, told: Told, *, ledger_gap: int, wall_s: float, control: bool
) -> list[Figure]:
    """Under their stable names; what could not be measured is left out."""
    values: list[tuple[str, float | None, str]] = [
        ("demo.likes_before", facts.likes_before, "share"),
        ("demo.likes_after", facts.likes_after, "share"),
        ("demo.control_gain" if control else "demo.likes_gain", facts.gain, "share"),
        ("demo.likes_of", facts.likes_of, "answers"),
        ("demo.cycle_s_p50", facts.cycle(0.5), "s"),
        ("demo.cycle_s_p95", facts.cycle(0.95), "s"),
        ("demo.coverage", facts.covered, "share"),
        ("demo.versions", facts.versions, "versions"),
        ("demo.version_holes", facts.version_holes, "versions"),
        ("demo.served_versions", facts.served_versions, "versions"),
        ("demo.answers", facts.answers, "answers"),
        ("demo.clicks", facts.clicks, "events"),
        ("demo.clicks_lost", max(0, told.accepted - facts.clicks), "events"),
        ("demo.clicks_refused", sum(facts.refused.values()), "events"),
        ("demo.clicks_unaccounted", facts.unaccounted, "events"),
        ("demo.unrewarded", facts.unrewarded, "answers"),
        ("demo.trained", facts.trained, "answers"),
        ("demo.trained_lag_max", facts.trained_lag_max, "versions"),
        ("demo.ledger_gap", ledger_gap, "events"),
        ("demo.wall_s", wall_s, "s"),
    ]
    baselines = {"demo.likes_after": facts.likes_before}
    return [
        Figure(name=name, value=value, unit=unit, baseline=baselines.get(name))
        for name, value, unit in values
        if value is not None
    ]


def feedback_checks(
    facts: FeedbackFacts,
    told: Told,
    *,
    steps: int,
    max_lag: int,
    ledger_gap: int,
    wall_s: float,
    control: bool,
) -> list[Check]:
    """Every bar with what was seen. A figure that is missing fails its check."""
    covered = ", ".join(f"{name} {s} of {n}" for name, (n, s) in facts.coverage.items())
    found = [
        Check(
            "steps",
            facts.final_version >= steps,
            f"{max(facts.final_version, 0)} of {steps} steps became versions",
        ),
        Check("holes", facts.version_holes == 0, f"{facts.version_holes} versions missing or twice"),
        Check(
            "clicks",
            facts.clicks > 0 and told.accepted <= facts.clicks and told.refused == told.pending == 0,
            f"{told.accepted:,} acknowledged, {facts.clicks:,} in the log, {told.refused} refused, {told.pending} open",
        ),
        Check(
            "rewards",
            facts.answers > 0 and facts.unrewarded == facts.rewarded_twice == facts.unaccounted == 0,
            f"{facts.answers:,} answers, {facts.unrewarded} without a reward, {facts.rewarded_twice} with two; "
            f"{facts.unaccounted} clicks behind none, {sum(facts.refused.values())} came too late",
        ),
        Check(
            "cycle",
            bool(facts.cycle_s),
            f"{_seconds(facts.cycle(0.5))} from a click to a served version trained on it, p95 {_seconds(facts.cycle(0.95))}",
        ),
        Check(
            "coverage",
            facts.covered is not None and facts.covered > 0,
            f"with a signal: {covered or 'not measured'}",
        ),
        Check(
            "served",
            facts.serving_digest_equal,
            f"{facts.served_versions} versions answered people, the last of them with the trainer's digest"
            if facts.serving_digest_equal
            else "people are not answered with the last version",
        ),
        Check(
            "lag",
            facts.trained_lag_max <= max_lag,
            f"trained on lag {facts.trained_lag_max} at most, limit {max_lag}",
        ),
        Check("ledger", ledger_gap == 0, f"{ledger_gap} events unaccounted for"),
    ]
    if steps >= FEEDBACK_STEPS:
        found.append(
            Check(
                "versions",
                facts.served_versions >= MIN_SERVED,
                f"{facts.served_versions} versions answered people, at least {MIN_SERVED}",
            )
        )
        gain = facts.gain
        if control:
            found.append(
                Check(
                    "control",
                    gain is not None and gain <= MAX_CONTROL_GAIN,
                    f"likes with shuffled advantages {points(gain)}, at most {points(MAX_CONTROL_GAIN)}",
                )
            )
        else:
            found.append(
                Check(
                    "likes",
                    gain is not None and gain >= MIN_GAIN,
                    f"{points(gain)} over {facts.likes_of} answers each, at least {points(MIN_GAIN)}",
                )
            )
    if steps == FEEDBACK_STEPS:
        found.append(Check("wall time", wall_s <= MAX_WALL_S, f"{wall_s:.0f} s, at most {MAX_WALL_S:.0f} s"))
    return found


def points(gain: float | None) -> str:
    return "not measured" if gain is None else f"{100 * gain:+.1f} points"


def _seconds(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.1f} s"
