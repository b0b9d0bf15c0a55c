"""The mismatch watch: figures by version, environment and fleet, the alarm, and a trainer that pauses and goes on."""

from __future__ import annotations

import threading
from collections.abc import Iterable

import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
from hypothesis import given

from rollwire.consumers.trainer.config import TrainerConfig
from rollwire.consumers.trainer.drift import START, Rule, State, judge, judge_all, notices, pauses
from rollwire.consumers.trainer.history import read_history
from rollwire.consumers.trainer.rehearsal import TINY as POLICY
from rollwire.consumers.trainer.rehearsal import TOPICS, Rehearsal, write_plans
from rollwire.consumers.trainer.run import run_trainer
from rollwire.kernels.mismatch import mismatch, mismatch_by
from rollwire.kernels.policy.model import Policy
from rollwire.kernels.policy.states import to_state
from rollwire.schemas.errors import MismatchDrift, PlanViolation
from rollwire.schemas.golden import load_examples
from rollwire.schemas.records import MismatchBy, Notice, TrainStep
from rollwire.streams.emit import decode_record
from rollwire.streams.seams.clock import SystemClock
from rollwire.streams.seams.log_memory import MemoryLog
from rollwire.streams.seams.scan import scan
from rollwire.streams.seams.store_memory import MemoryStore

pytestmark = pytest.mark.torch

LINEAGE = "0197a1b2-0000-7000-8000-0000000000aa"
SPEC = Rehearsal(POLICY, LINEAGE)
RULE = Rule(bound=0.1, steps=3, min_tokens=10)
EXAMPLE = next(e.event for e in load_examples("train-steps") if isinstance(e.event, TrainStep))
BEYOND, WITHIN, FEW = 0.2, 0.1, -1.0


def test_figures_by_version_environment_and_fleet() -> None:
    rng = np.random.default_rng(1)
    sources = [("countdown", "a"), ("", ""), ("countdown", "a"), ("countdown", "b"), ("unused", "a")]
    pi_S, mu_S = (rng.normal(-2, 1, 400).astype(np.float32) for _ in range(2))
    versions_S, source_S = rng.integers(3, 6, 400), rng.integers(0, 4, 400)
    rows = mismatch_by(pi_S, mu_S, versions_S, source_S, sources)
    names = [("", ""), ("countdown", "a"), ("countdown", "b")]
    assert [(row.environment, row.fleet, row.version) for row in rows] == [
        (*name, version) for name in names for version in (None, 3, 4, 5)
    ]
    for row in rows:
        mine_S = np.array([sources[s] == (row.environment, row.fleet) for s in source_S])
        if row.version is not None:
            mine_S &= versions_S == row.version
        whole = mismatch(pi_S[mine_S], mu_S[mine_S])
        assert (row.tokens, row.p50, row.p99, row.max) == (whole.tokens, whole.p50, whole.p99, whole.max)
    assert sum(row.tokens for row in rows if row.version is None) == 400
    with pytest.raises(PlanViolation):
        mismatch_by(pi_S, mu_S, versions_S[1:], source_S, sources)


def a_step(number: int, **p99: float) -> TrainStep:
    """p99 by fleet; `FEW` = beyond the bound, of too few tokens."""
    rows = [
        MismatchBy(
            version=version,
            environment="countdown",
            fleet=fleet,
            tokens=9 if value == FEW else 10,
            p50=0.0,
            p99=0.2 if value == FEW else value,
            max=9.0,
        )
        for fleet, value in p99.items()
        for version in (None, 7)
    ]
    return msgspec.structs.replace(EXAMPLE, step=number, mismatch_by=tuple(rows))


def alarms_of(series: Iterable[float], rule: Rule = RULE) -> list[tuple[int, bool]]:
    """(step, over) of everything made known of one fleet."""
    state, made = START, []
    for number, value in enumerate(series, 1):
        state = judge(state, a_step(number, a=value), rule)
        made += [(number, drift.over) for drift in state.drifts]
    return made


def test_an_alarm_needs_the_steps_in_a_row_and_comes_again_while_it_lasts() -> None:
    assert alarms_of([BEYOND] * 2 + [WITHIN] + [BEYOND] * 2) == []
    assert alarms_of([BEYOND] * 7 + [WITHIN] * 2) == [(3, False), (6, False), (8, True)]
    assert alarms_of([BEYOND, FEW, BEYOND, FEW, BEYOND]) == [(5, False)]
    assert alarms_of([float("nan")] * 3) == [(3, False)]
    assert alarms_of([WITHIN] * 9) == []


@given(series=st.lists(st.sampled_from([BEYOND, WITHIN, FEW]), max_size=40), needed=st.integers(1, 4))
def test_alarms_follow_the_definition(series: list[float], needed: int) -> None:
    judged = [(n, value) for n, value in enumerate(series, 1) if value != FEW]
    wanted: list[tuple[int, bool]] = []
    row = 0
    for number, value in judged:
        if value == BEYOND:
            row += 1
            if row % needed == 0:
                wanted.append((number, False))
        else:
            if row >= needed:
                wanted.append((number, True))
            row = 0
    assert alarms_of(series, RULE._replace(steps=needed)) == wanted


def test_fleets_are_watched_apart_and_one_notice_names_all() -> None:
    steps = [a_step(n, a=BEYOND, b=WITHIN if n < 4 else BEYOND) for n in range(1, 7)]
    state = START
    made: list[tuple[int, Notice]] = []
    for step in steps:
        state = judge(state, step, RULE)
        made += [(step.step, n) for n in notices(state, RULE, model="policy", lineage="l", at_us=1)]
    assert [(number, notice.name, notice.severity) for number, notice in made] == [
        (3, "mismatch_drift", "alarm"),
        (6, "mismatch_drift", "alarm"),
    ]
    assert "countdown/b" not in made[0][1].text
    assert "countdown/a" in made[1][1].text
    assert "countdown/b" in made[1][1].text
    assert made[1][1].attributes["p99 countdown/b"] == "0.2"
    assert judge_all(steps, RULE) == state


def test_only_an_alarm_that_nobody_accepted_pauses() -> None:
    config = TrainerConfig(mismatch_bound=0.1, mismatch_action="pause")
    alarm = judge_all([a_step(n, a=BEYOND) for n in (1, 2, 3)], RULE)
    assert pauses(alarm, config)
    assert pauses(alarm, config.model_copy(update={"mismatch_accepted_step": 2}))
    assert not pauses(alarm, config.model_copy(update={"mismatch_accepted_step": 3}))
    assert not pauses(alarm, config.model_copy(update={"mismatch_action": "warn"}))
    assert not pauses(judge(alarm, a_step(4, a=BEYOND), RULE), config)
    assert not pauses(State({}, 9, ()), config)


class Trained:
    """A trainer on plans whose logprobs have nothing to do with its policy: far beyond any bound."""

    def __init__(self) -> None:
        self.log, self.store = MemoryLog(TOPICS), MemoryStore()
        write_plans(self.log, SPEC, range(1, 6))

    def run(self, **settings: object) -> None:
        config = TrainerConfig(
            checkpoint_every=2, no_replay_every=0, mismatch_steps=2, mismatch_min_tokens=10
        )
        run_trainer(
            self.log,
            self.store,
            POLICY,
            config.model_copy(update=settings),
            prefix="t.",
            model="policy",
            lineage=LINEAGE,
            initial=to_state(Policy(POLICY, seed=3), "F32"),
            stop=threading.Event(),
            until_step=5,
        )

    def steps(self) -> tuple[TrainStep, ...]:
        return read_history(self.log, "policy", LINEAGE, deadline_s=5, clock=SystemClock()).steps

    def notices(self) -> list[Notice]:
        events = [decode_record(record) for record in scan(self.log, ("notices",))]
        return [event for event in events if isinstance(event, Notice)]


def test_nothing_is_watched_by_default() -> None:
    trained = Trained()
    trained.run()
    assert len(trained.steps()) == 5
    assert trained.notices() == []


def test_the_step_names_its_mismatch_by_fleet() -> None:
    trained = Trained()
    trained.run()
    rows = trained.steps()[-1].mismatch_by
    assert [(r.environment, r.fleet, r.version) for r in rows] == [
        ("rehearsal", "fleet-0", None),
        ("rehearsal", "fleet-0", 4),
        ("rehearsal", "fleet-1", None),
        ("rehearsal", "fleet-1", 3),
    ]
    assert max(row.max for row in rows) == trained.steps()[-1].mismatch.max


def test_warned_a_trainer_goes_on_with_the_same_bits() -> None:
    plain, warned = Trained(), Trained()
    plain.run()
    warned.run(mismatch_bound=0.01)
    assert [s.state_digest for s in warned.steps()] == [s.state_digest for s in plain.steps()]
    assert [n.attributes["step"] for n in warned.notices()] == ["2", "4"]
    assert {n.severity for n in warned.notices()} == {"alarm"}


def test_a_paused_trainer_stays_paused_until_told_and_goes_on_where_it_was() -> None:
    plain, paused = Trained(), Trained()
    plain.run()
    with pytest.raises(MismatchDrift, match="mismatch_accepted_step=2") as caught:
        paused.run(mismatch_bound=0.01, mismatch_action="pause")
    assert caught.value.exit_code == 3
    assert [s.step for s in paused.steps()] == [1, 2]
    with pytest.raises(MismatchDrift):
        paused.run(mismatch_bound=0.01, mismatch_action="pause")
    assert len(paused.steps()) == 2
    with pytest.raises(MismatchDrift, match="mismatch_accepted_step=4"):
        paused.run(mismatch_bound=0.01, mismatch_action="pause", mismatch_accepted_step=2)
    assert [n.attributes["step"] for n in paused.notices()] == ["2", "4"]
    paused.run(mismatch_bound=100.0, mismatch_action="pause")
    assert [s.state_digest for s in paused.steps()] == [s.state_digest for s in plain.steps()]
    assert len(paused.notices()) == 2


@pytest.mark.parametrize(
    ("settings", "counted"),
    [
        ({"token_mask": True, "token_mask_high": 1.2}, ("masked_low", "masked_high")),
        ({"sequence_reject": "k3", "sequence_low": 0.0, "sequence_high": 0.05}, ("rejected_sequences",)),
    ],
)
def test_corrections_are_counted_and_change_the_bits(
    settings: dict[str, object], counted: tuple[str, ...]
) -> None:
    plain, corrected = Trained(), Trained()
    plain.run()
    corrected.run(**settings)
    step = corrected.steps()[0]
    assert all(getattr(step, name) > 0 for name in counted)
    assert step.state_digest != plain.steps()[0].state_digest
    assert all(step.settings[name] == str(value) for name, value in settings.items())
    assert plain.steps()[0].masked_low == plain.steps()[0].rejected_sequences == 0


def test_a_pause_without_a_bound_is_a_wrong_setting() -> None:
    with pytest.raises(ValueError, match="mismatch_bound"):
        TrainerConfig(mismatch_action="pause")
    assert TrainerConfig(mismatch_action="pause", mismatch_bound=0.5).mismatch_bound == 0.5
