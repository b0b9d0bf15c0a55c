"""What a feedback run is judged by, from events made by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from rollwire.ops.demo.feedback.checks import feedback_checks, feedback_figures
from rollwire.ops.demo.feedback.people import Told
from rollwire.ops.demo.feedback.recipe import FEEDBACK_STEPS
from rollwire.ops.demo.feedback.tally import FeedbackFacts, FeedbackTally
from rollwire.producers.environments.countdown import END_ID, encode_text
from rollwire.producers.serving.answer import Question, by_finish, rollout_of, trajectory_of
from rollwire.producers.trajectory import Origin
from rollwire.schemas.ids import new_group_id
from rollwire.schemas.records import Event, Feedback, ProductionRollout, Reward
from rollwire.streams.seams.engine import Sampled
from rollwire.streams.seams.keys_memory import MemoryKeys
from rollwire.streams.seams.sealing import seal_field

LINEAGE = "0197a1b2-0000-7000-8000-0000000000aa"
NOW_US = 1_767_225_600_000_000
SUBJECT = "ab" * 16
ORIGIN = Origin("policy", LINEAGE, "production", "serving", "serving-0", "u4", 1.0, 0, None)


class Run:
    """Makes the events of a run."""

    def __init__(self) -> None:
        self.keys = MemoryKeys()
        self.tally = FeedbackTally(self.keys, LINEAGE, "serving-0")
        self.count = 0

    def answer(self, text: str, version: int = 0, subject: str = SUBJECT) -> ProductionRollout:
        self.count += 1
        at_us = NOW_US + self.count * 1_000_000
        question = Question(encode_text("7 3 12=48 "), subject)
        trajectory = trajectory_of(question, new_group_id(at_us, self.count), 0, at_us)
        ids_N = np.append(encode_text(text), END_ID)
        logp_N, versions_N = np.full(ids_N.size, -0.5, np.float32), np.full(ids_N.size, version)
        trajectory.add_sampled(Sampled("r", ids_N, logp_N, versions_N, None, "stop"))
        rollout = rollout_of(
            trajectory,
            "stop",
            ORIGIN,
            subject=subject,
            tenant="default",
            outcome=by_finish(ids_N, "stop"),
            seal=lambda who, which, tokens: seal_field(self.keys, who, which, "token_ids", tokens),
            now_us=at_us,
        )
        assert rollout is not None
        return rollout

    def add(self, *events: Event) -> None:
        for event in events:
            self.tally.add(event)


def click(rollout: ProductionRollout, feedback_id: str, after_us: int = 500_000) -> Feedback:
    return Feedback(
        feedback_id=feedback_id,
        id_source="client",
        tenant="default",
        group_id=rollout.group_id,
        rollout_id=rollout.rollout_id,
        signal="thumb",
        value=1.0,
        label=None,
        happened_us=rollout.started_us,
        received_us=rollout.started_us + after_us,
        subject=SUBJECT,
        comment=None,
        seal=None,
        dialect="rollwire",
        key_id="key",
    )


def reward(rollout: ProductionRollout, *evidence: str) -> Reward:
    return Reward(
        rollout_id=rollout.rollout_id,
        group_id=rollout.group_id,
        reward=1.0,
        components=(),
        outcome="answered",
        source="user",
        verifier="demo",
        verifier_version="1",
        evidence=evidence,
        scored_us=rollout.started_us + 1,
    )


def test_likes_are_found_by_opening_what_was_answered() -> None:
    run = Run()
    before = [run.answer(text) for text in ("7+3", "(7-3)*12", "7+3+12", "12/3")]
    after = [run.answer(text, version=5) for text in ("7+3*12", "7+3-12", "7*3*12", "(7+3)-12")]
    run.add(*after, *before)  # partitions come in any order
    facts = run.tally.facts(4)
    assert (facts.likes_before, facts.likes_after, facts.gain) == (0.25, 0.75, 0.5)
    assert (facts.before_versions, facts.after_versions) == ((0, 0), (5, 5))
    assert (facts.answers, facts.served_versions, facts.unrewarded) == (8, 2, 8)


def test_repeats_count_once_and_a_reward_that_is_missing_or_double_is_found() -> None:
    run = Run()
    answers = [run.answer("7+3+12") for _ in range(3)]
    run.add(*answers, answers[0], *(click(a, "one") for a in answers[:1] * 2), click(answers[1], "two"))
    run.add(reward(answers[0], "one"), reward(answers[1]), reward(answers[1]))
    facts = run.tally.facts(1)
    assert facts.unaccounted == 1
    assert (facts.answers, facts.clicks, facts.clicked) == (3, 2, 2)
    assert (facts.unrewarded, facts.rewarded_twice) == (1, 1)


def test_what_an_erased_person_was_answered_is_left_out() -> None:
    run = Run()
    mine, other = run.answer("7+3+12"), run.answer("7+3+12", subject="cd" * 16)
    run.keys.destroy(SUBJECT)
    run.add(mine, other)
    assert list(run.tally.answers) == [other.rollout_id]


GOOD = FeedbackFacts(
    answers=4_000,
    likes_before=0.5,
    likes_after=0.9,
    likes_of=400,
    before_versions=(0, 0),
    after_versions=(60, 60),
    clicks=2_600,
    clicked=2_500,
    unrewarded=0,
    rewarded_twice=0,
    cycle_s=(3.0, 4.0, 9.0),
    coverage={"answered": (100, 60)},
    final_version=FEEDBACK_STEPS,
    versions=FEEDBACK_STEPS + 1,
    version_holes=0,
    served_versions=50,
    serving_digest_equal=True,
    trained_lag_max=6,
    trained=2_400,
    fates={},
    unaccounted=0,
    refused={"late": 3},
)
TOLD = Told(4_000, 4_000, 0, 2_600, 2_600, 0, 0)


def broken(
    facts: FeedbackFacts = GOOD,
    told: Told = TOLD,
    *,
    gap: int = 0,
    wall_s: float = 200.0,
    control: bool = False,
) -> set[str]:
    found = feedback_checks(
        facts, told, steps=FEEDBACK_STEPS, max_lag=12, ledger_gap=gap, wall_s=wall_s, control=control
    )
    return {check.name for check in found if not check.ok}


def test_a_good_run_holds_every_bar_and_a_control_that_learns_does_not() -> None:
    assert broken() == set()
    assert broken(control=True) == {"control"}
    assert broken(replace(GOOD, likes_after=0.4), control=True) == set()


@pytest.mark.parametrize(
    ("changed", "check"),
    [
        ({"likes_after": 0.6}, "likes"),
        ({"likes_before": None}, "likes"),
        ({"unrewarded": 1}, "rewards"),
        ({"rewarded_twice": 1}, "rewards"),
        ({"unaccounted": 1}, "rewards"),
        ({"clicks": 2_599}, "clicks"),
        ({"cycle_s": ()}, "cycle"),
        ({"coverage": {}}, "coverage"),
        ({"final_version": FEEDBACK_STEPS - 1}, "steps"),
        ({"version_holes": 1}, "holes"),
        ({"served_versions": 3}, "versions"),
        ({"serving_digest_equal": False}, "served"),
        ({"trained_lag_max": 13}, "lag"),
    ],
)
def test_each_bar_that_is_missed_is_named(changed: dict[str, Any], check: str) -> None:
    fields = {f.name: getattr(GOOD, f.name) for f in dataclasses.fields(GOOD)}
    assert broken(FeedbackFacts(**(fields | changed))) == {check}


@pytest.mark.parametrize(
    ("judged", "check"),
    [
        (lambda: broken(gap=1), "ledger"),
        (lambda: broken(wall_s=400.0), "wall time"),
        (lambda: broken(told=msgspec.structs.replace(TOLD, refused=1)), "clicks"),
        (lambda: broken(told=msgspec.structs.replace(TOLD, pending=1)), "clicks"),
    ],
)
def test_so_is_what_the_topics_do_not_say(judged: Callable[[], set[str]], check: str) -> None:
    assert judged() == {check}


def test_figures_have_stable_names_and_clicks_that_are_missing_are_lost() -> None:
    told = msgspec.structs.replace(TOLD, accepted=2_603)
    figures = feedback_figures(GOOD, told, ledger_gap=0, wall_s=1.0, control=False)
    named = {figure.name: figure.value for figure in figures}
    assert named["demo.clicks_lost"] == 3
    assert (named["demo.likes_before"], named["demo.likes_after"]) == (0.5, 0.9)
    assert (named["demo.cycle_s_p50"], named["demo.cycle_s_p95"]) == (4.0, 9.0)
    assert named["demo.coverage"] == 0.6
    assert "demo.control_gain" not in named
