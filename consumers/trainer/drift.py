"""The watch over the mismatch: an alarm when its p99 stays beyond a bound. A fold over `train-steps`; no I/O, no torch.

Each environment and fleet is watched on its own, over all versions: a broken fleet must not hide behind good ones. The
state follows from the committed steps alone, so a trainer that starts again holds what the one before it held.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from rollwire.consumers.trainer.config import TrainerConfig
from rollwire.schemas.records import Notice, TrainStep

ALARM = "mismatch_drift"
OVER = "mismatch_drift_over"


class Rule(NamedTuple):
    bound: float  # nats
    steps: int  # in a row
    min_tokens: int  # fewer judge nothing


class Row(NamedTuple):
    """Of one environment and fleet."""

    steps: int = 0  # beyond the bound, in a row, since the row began or since its last alarm
    alarmed: bool = False  # since it was last within


class Drift(NamedTuple):
    """What a step made known of one environment and fleet."""

    environment: str
    fleet: str
    p99: float
    over: bool  # back within the bound after an alarm; else the alarm


class State(NamedTuple):
    rows: Mapping[tuple[str, str], Row]
    step: int  # the last one judged
    drifts: tuple[Drift, ...]  # what that one made known

    @property
    def alarms(self) -> tuple[Drift, ...]:
        return tuple(drift for drift in self.drifts if not drift.over)


START = State({}, 0, ())


def rule_of(config: TrainerConfig) -> Rule | None:
    """None where nothing is watched."""
    if config.mismatch_bound is None:
        return None
    return Rule(config.mismatch_bound, config.mismatch_steps, config.mismatch_min_tokens)


def judge(state: State, step: TrainStep, rule: Rule) -> State:
    """The state after `step`. An alarm is raised at the `steps`th step beyond the bound in a row, and again after as
    many more: it is not forgotten while it lasts."""
    rows = dict(state.rows)
    drifts: list[Drift] = []
    for one in step.mismatch_by:
        if one.version is not None or one.tokens < rule.min_tokens:
            continue
        key = (one.environment, one.fleet)
        row = rows.get(key, Row())
        # Not `>`: a value that is no number is not within any bound.
        if one.p99 <= rule.bound:
            if row.alarmed:
                drifts.append(Drift(*key, one.p99, over=True))
            rows[key] = Row()
        elif row.steps + 1 < rule.steps:
            rows[key] = row._replace(steps=row.steps + 1)
        else:
            drifts.append(Drift(*key, one.p99, over=False))
            rows[key] = Row(0, alarmed=True)
    return State(rows, step.step, tuple(drifts))


def judge_all(steps: Iterable[TrainStep], rule: Rule) -> State:
    state = START
    for step in steps:
        state = judge(state, step, rule)
    return state


def pauses(state: State, config: TrainerConfig) -> bool:
    """Whether the last step judged raised an alarm that ends the trainer."""
    return (
        config.mismatch_action == "pause"
        and bool(state.alarms)
        and state.step > config.mismatch_accepted_step
    )


def notices(state: State, rule: Rule, *, model: str, lineage: str, at_us: int) -> tuple[Notice, ...]:
    """What the last step made known, for `notices`: at most one alarm and one all-clear a step."""
    made: list[Notice] = []
    for name, over in ((ALARM, False), (OVER, True)):
        drifts = [drift for drift in state.drifts if drift.over is over]
        if not drifts:
            continue
        values = ", ".join(f"{_label(drift)} {drift.p99:.3g}" for drift in drifts)
        text = (
            f"mismatch p99 is within {rule.bound:g} nats again at step {state.step}: {values}"
            if over
            else f"mismatch p99 beyond {rule.bound:g} nats for {rule.steps} steps up to step {state.step}: {values}"
        )
        made.append(
            Notice(
                model=model,
                name=name,
                severity="info" if over else "alarm",
                text=text,
                attributes={
                    "lineage": lineage,
                    "step": str(state.step),
                    "bound": repr(rule.bound),
                    "steps": str(rule.steps),
                    **{f"p99 {_label(drift)}": repr(drift.p99) for drift in drifts},
                },
                at_us=at_us,
            )
        )
    return tuple(made)


def pause_text(state: State, rule: Rule) -> str:
    """What happened and how to go on."""
    values = ", ".join(f"{_label(drift)} {drift.p99:.3g}" for drift in state.alarms)
    return (
        f"paused after step {state.step}, which is committed: mismatch p99 beyond {rule.bound:g} nats for {rule.steps} "
        f"steps in a row ({values}). To go on, accept it with mismatch_accepted_step={state.step}, or start with another "
        "mismatch_bound or mismatch_action=warn"
    )


def _label(drift: Drift) -> str:
    return f"{drift.environment or 'unknown'}/{drift.fleet or 'unknown'}"
