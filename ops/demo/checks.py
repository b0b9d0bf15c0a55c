"""What a demo must show before it may exit with 0, and the figures it writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rollwire.ops.demo.tally import RunFacts
from rollwire.ops.figures import Figure

GAIN_STEPS = (
    250  # gains are judged from the default length on; a shorter run shows the flow, not the learning
)
MAX_CONTROL_GAIN = 0.04
MIN_HELDOUT_TASKS = 512
MIN_DISTINCT_TASKS = 400
MIN_VERSIONS = 20
MIN_MIXED_SHARE = 0.05
MAX_WALL_S = 480.0


@dataclass(frozen=True, slots=True)
class Bars:
    """What a run of the default length must show, by environment."""

    heldout_gain: float
    distinct_gain: float
    tools: bool  # whether its rollouts hold tool results


BARS: Mapping[str, Bars] = {
    "countdown": Bars(0.18, 0.08, tools=False),
    "calculator": Bars(0.10, 0.08, tools=True),
}


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    ok: bool
    text: str


def figures(facts: RunFacts, *, ledger_gap: int, wall_s: float, control: bool) -> list[Figure]:
    """The demo's figures, under their stable names; what could not be measured is left out."""
    final = facts.final_version
    heldout_gain, distinct_gain = facts.gain(facts.heldout), facts.gain(facts.distinct)
    values: list[tuple[str, float | None, str]] = [
        ("demo.heldout_before", facts.heldout.get(0), "share"),
        ("demo.heldout_after", facts.heldout.get(final), "share"),
        ("demo.distinct_before", facts.distinct.get(0), "share"),
        ("demo.distinct_after", facts.distinct.get(final), "share"),
        ("demo.heldout_tasks", facts.heldout_tasks, "tasks"),
        ("demo.distinct_tasks", facts.distinct_tasks, "tasks"),
        ("demo.heldout_overlap", facts.heldout_overlap, "rollouts"),
        ("demo.trained_lag_max", facts.trained_lag_max, "versions"),
        ("demo.versions", facts.versions, "versions"),
        ("demo.version_holes", facts.version_holes, "versions"),
        ("demo.mixed_version_share", facts.mixed_version_share, "share"),
        ("demo.replica_digest_equal", float(facts.replicas_equal), "bool"),
        ("demo.ledger_gap", ledger_gap, "events"),
        ("demo.mismatch_p99", facts.mismatch_p99, "nats"),
        ("demo.mismatch_p99_no_replay", facts.mismatch_p99_no_replay, "nats"),
        ("demo.routes_differing", facts.routes_differing, "share"),
        ("demo.delta_pct", facts.delta_pct, "%"),
        ("demo.learning_rate", facts.learning_rate, "1"),
        ("demo.pause_ms_p50", facts.pause_ms_p50, "ms"),
        ("demo.tokens_per_s", facts.train_tokens_per_s, "tokens/s"),
        ("demo.rollouts", facts.rollouts, "rollouts"),
        ("demo.wall_s", wall_s, "s"),
    ]
    if facts.tool_tokens:
        values.append(("demo.tool_tokens", facts.tool_tokens, "tokens"))
        values.append(("demo.tool_tokens_trained", facts.tool_tokens_trained, "tokens"))
    if control:
        values.append(("demo.control_gain", heldout_gain, "share"))
    else:
        values.append(("demo.heldout_gain", heldout_gain, "share"))
        values.append(("demo.distinct_gain", distinct_gain, "share"))
    baselines = {"demo.heldout_after": facts.heldout.get(0), "demo.distinct_after": facts.distinct.get(0)}
    return [
        Figure(name=name, value=value, unit=unit, baseline=baselines.get(name))
        for name, value, unit in values
        if value is not None
    ]


def checks(
    facts: RunFacts,
    *,
    environment: str,
    steps: int,
    max_lag: int,
    ledger_gap: int,
    wall_s: float,
    control: bool,
) -> list[Check]:
    """Every bar of the demo with what was seen. A figure that is missing fails its check."""
    bars = BARS[environment]
    heldout_gain, distinct_gain = facts.gain(facts.heldout), facts.gain(facts.distinct)
    found = [
        Check(
            "steps",
            facts.final_version >= steps,
            f"{max(facts.final_version, 0)} of {steps} steps became versions",
        ),
        Check(
            "held out",
            facts.heldout_overlap == 0
            and facts.heldout_tasks >= MIN_HELDOUT_TASKS
            and facts.distinct_tasks >= MIN_DISTINCT_TASKS,
            f"{facts.heldout_tasks} held-out draws and {facts.distinct_tasks} distinct tasks; "
            f"{facts.heldout_overlap} of {facts.rollouts} training rollouts were on one of them",
        ),
        Check(
            "lag",
            facts.trained_lag_max <= max_lag,
            f"trained on lag {facts.trained_lag_max} at most, limit {max_lag}",
        ),
        Check("holes", facts.version_holes == 0, f"{facts.version_holes} versions missing or twice"),
        Check(
            "replicas",
            facts.replicas_equal,
            "every replica ends on the trainer's digest"
            if facts.replicas_equal
            else f"replicas end on {dict(facts.replicas)}, the trainer on {facts.final_version}",
        ),
        Check("ledger", ledger_gap == 0, f"{ledger_gap} events unaccounted for"),
        Check(
            "swaps in flight",
            facts.mixed_version_share >= MIN_MIXED_SHARE or facts.final_version < MIN_VERSIONS,
            f"{facts.mixed_version_share:.1%} of rollouts carry two or more versions",
        ),
    ]
    if bars.tools:
        found.append(
            Check(
                "tool results",
                facts.tool_tokens > 0 and facts.tool_tokens_trained == 0,
                f"{facts.tool_tokens} tokens of tool results, {facts.tool_tokens_trained} of them with a loss",
            )
        )
    if steps >= GAIN_STEPS:
        found.append(Check("versions", facts.versions >= MIN_VERSIONS, f"{facts.versions} versions"))
        if control:
            found.append(
                Check(
                    "control",
                    heldout_gain is not None and heldout_gain <= MAX_CONTROL_GAIN,
                    f"gain with shuffled advantages {_points(heldout_gain)}, at most {_points(MAX_CONTROL_GAIN)}",
                )
            )
        else:
            found.append(
                Check(
                    "held-out gain",
                    heldout_gain is not None and heldout_gain >= bars.heldout_gain,
                    f"{_points(heldout_gain)} over tasks as drawn, at least {_points(bars.heldout_gain)}",
                )
            )
            found.append(
                Check(
                    "distinct gain",
                    distinct_gain is not None and distinct_gain >= bars.distinct_gain,
                    f"{_points(distinct_gain)} over distinct tasks, at least {_points(bars.distinct_gain)}",
                )
            )
        if steps == GAIN_STEPS:
            found.append(
                Check("wall time", wall_s <= MAX_WALL_S, f"{wall_s:.0f} s, at most {MAX_WALL_S:.0f} s")
            )
    return found


def _points(gain: float | None) -> str:
    return "not measured" if gain is None else f"{100 * gain:+.1f} points"
