"""What the simulated people like, and that the demo's rules take what they do about it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from rollwire.ops.demo.feedback.preference import PeopleConfig, likes, react, think_s
from rollwire.ops.demo.feedback.recipe import RULES_FILE
from rollwire.ops.gateway import read_rules
from rollwire.schemas.rules import Rules, check_value

NUMBERS = (7, 3, 12)


@pytest.mark.parametrize(
    ("answer", "liked"),
    [
        ("7+3*12", True),
        ("12-7-3", True),
        ("(7-3)*12", False),  # brackets
        ("12/3+7", False),  # a division
        ("7+3", False),  # a number is missing
        ("7+3+12+3", False),
        ("7+3+11", False),
        ("7+*3", False),
        ("", False),
    ],
)
def test_people_like_plain_expressions_over_their_numbers(answer: str, liked: bool) -> None:
    assert likes(NUMBERS, answer) is liked


def rules() -> Rules:
    from rollwire.ops.demo.feedback import recipe

    return read_rules(Path(recipe.__file__).parent / RULES_FILE)


def test_every_click_is_one_that_the_rules_take_and_most_say_what_is_felt() -> None:
    known, rng, config = rules(), random.Random(3), PeopleConfig()
    reactions = [(liked, react(liked, rng, config)) for liked in (True, False) for _ in range(3_000)]
    silent = sum(not clicks for _, clicks in reactions) / len(reactions)
    assert 0.3 < silent < 0.4
    right = wrong = comments = 0
    for liked, clicks in reactions:
        for click in clicks:
            signal = known.signals[click.signal]
            value = check_value(known, click.signal, click.value, None)
            assert value is not None
            assert signal.worth is not None
            assert signal.weight > 0
            comments += click.comment is not None
        if clicks:
            first = known.signals[clicks[0].signal]
            value = check_value(known, clicks[0].signal, clicks[0].value, None)
            low, high = first.range or (0.0, 1.0)
            pleased = (value or 0.0) > (low + high) / 2
            right, wrong = right + (pleased == liked), wrong + (pleased != liked)
    assert 0.02 < wrong / (right + wrong) < 0.08
    assert comments > 0


def test_reactions_follow_from_the_draws_alone() -> None:
    config = PeopleConfig()
    first, second = ([react(True, random.Random(seed), config) for seed in range(50)] for _ in range(2))
    assert first == second
    assert all(think_s(random.Random(s), config) <= config.max_think_s for s in range(200))


def test_people_click_within_the_window() -> None:
    assert PeopleConfig().max_think_s < rules().window_s
