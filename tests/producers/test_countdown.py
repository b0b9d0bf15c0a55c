"""Countdown: disjoint by proof, deterministic, and its demonstrations are right."""

from __future__ import annotations

from collections import Counter

import msgspec
import numpy as np
import pytest

from rollwire.producers.environments.countdown import (
    END_ID,
    MAX_NEW_TOKENS,
    PAD_ID,
    VOCABULARY,
    Countdown,
    Problem,
    encode_text,
    problem_id,
)
from rollwire.producers.environments.drawing import HELD_OUT_ONE_IN, is_held_out
from rollwire.schemas.errors import ConfigError
from rollwire.streams.seams.environment import Environment, Task


@pytest.fixture(scope="module")
def countdown() -> Countdown:
    return Countdown()


def answer(text: str, *, ended: bool = True) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    ids = encode_text(text)
    return np.append(ids, END_ID) if ended else ids


def task_json(numbers: tuple[int, int, int], target: int) -> str:
    return msgspec.json.encode(Problem(numbers=numbers, target=target)).decode()


def test_it_is_an_environment(countdown: Countdown) -> None:
    environment: Environment = countdown
    assert environment.vocab_size == len(VOCABULARY) == 20
    assert VOCABULARY[environment.end_id] == "<eos>"
    assert VOCABULARY[PAD_ID] == "<pad>"


def test_prompt_reads_as_in_the_recipe(countdown: Countdown) -> None:
    task = countdown.reset(7)
    problem = msgspec.json.decode(task.task, type=Problem)
    a, b, c = problem.numbers
    assert countdown.decode(task.prompt_ids) == f"{a} {b} {c}={problem.target} "
    assert task.prompt_ids.dtype == np.int64


def test_sides_are_disjoint_and_complete(countdown: Countdown) -> None:
    train, held_out = countdown.problems(held_out=False), countdown.problems(held_out=True)
    assert not train & held_out
    assert all(is_held_out(task_id) for task_id in held_out)
    assert not any(is_held_out(task_id) for task_id in train)
    share = len(held_out) / len(train | held_out)
    assert abs(share - 1 / HELD_OUT_ONE_IN) < 0.02


def test_draws_stay_on_their_side(countdown: Countdown) -> None:
    for seed in range(2_000):
        assert not is_held_out(countdown.reset(seed).task_id)
        assert is_held_out(countdown.reset(seed, held_out=True).task_id)


def test_order_of_numbers_does_not_change_the_side() -> None:
    assert problem_id((7, 3, 12), 48) == problem_id((12, 7, 3), 48) == problem_id((3, 12, 7), 48)
    assert problem_id((7, 3, 12), 48) != problem_id((7, 3, 12), 47)
    assert problem_id((1, 11, 2), 5) != problem_id((11, 1, 1), 5)


def test_a_seed_is_a_task(countdown: Countdown) -> None:
    again = Countdown()
    for seed in (0, 1, 12_345_678_901_234):
        first, second = countdown.reset(seed), again.reset(seed)
        assert first.task == second.task
        assert first.task_id == second.task_id
        assert np.array_equal(first.prompt_ids, second.prompt_ids)
    assert len({countdown.reset(seed).task_id for seed in range(500)}) > 200


def test_demonstrations_are_right_and_only_their_completion_is_masked_in(countdown: Countdown) -> None:
    n = 3_000
    demos = countdown.demonstrations(n, seed=3)
    assert demos.tokens_NW.shape == demos.loss_mask_NW.shape
    assert demos.tokens_NW.shape[0] == n
    outcomes: Counter[str] = Counter()
    for tokens_W, mask_W, length in zip(
        demos.tokens_NW, demos.loss_mask_NW, demos.lengths_N.tolist(), strict=True
    ):
        assert (tokens_W[length:] == PAD_ID).all()
        assert not mask_W[length:].any()
        start = int(np.flatnonzero(mask_W)[0])
        assert mask_W[start:length].all()
        prompt = countdown.decode(tokens_W[:start])
        numbers_text, target_text = prompt.split("=")
        a, b, c = map(int, numbers_text.split(" "))
        completion = tokens_W[start:length]
        assert completion.size <= MAX_NEW_TOKENS
        assert not is_held_out(problem_id((a, b, c), int(target_text)))
        outcomes[countdown.score(task_json((a, b, c), int(target_text)), completion, "stop").outcome] += 1
    assert outcomes == {"right": n}


def test_demonstrations_follow_their_seed(countdown: Countdown) -> None:
    first, same, other = (countdown.demonstrations(50, seed) for seed in (1, 1, 2))
    assert np.array_equal(first.tokens_NW, same.tokens_NW)
    assert first.tokens_NW.shape != other.tokens_NW.shape or not np.array_equal(
        first.tokens_NW, other.tokens_NW
    )


def test_held_out_sets(countdown: Countdown) -> None:
    draws = countdown.held_out_draws(512, seed=0)
    assert len(draws) == 512
    assert len({task.task_id for task in draws}) < 400  # as drawn: frequent problems repeat
    distinct = countdown.distinct_held_out(400, seed=0)
    assert len({task.task_id for task in distinct}) == 400
    assert all(is_held_out(task.task_id) for task in [*draws, *distinct])
    available = len(countdown.problems(held_out=True))
    with pytest.raises(ConfigError, match=f"there are {available}"):
        countdown.distinct_held_out(available + 1, seed=0)


@pytest.mark.parametrize(
    ("text", "ended", "finish_reason", "reward", "outcome"),
    [
        ("(7-3)*12", True, "stop", 1.0, "right"),
        ("12*(7-3)", True, "stop", 1.0, "right"),
        ("7*3+12", True, "stop", 0.0, "wrong value"),
        ("48", True, "stop", 0.0, "wrong numbers"),
        ("(7-3)*12*12/12", True, "stop", 0.0, "wrong numbers"),
        ("(7-3)*", True, "stop", 0.0, "does not parse"),
        ("", True, "stop", 0.0, "does not parse"),
        ("(7-3)*12", False, "stop", 0.0, "unfinished"),
        ("(7-3)*12", False, "length", 0.0, "unfinished"),
        ("(7-3)*12", True, "abort", None, "aborted"),
    ],
)
def test_scores(
    countdown: Countdown, text: str, ended: bool, finish_reason: str, reward: float | None, outcome: str
) -> None:
    verdict = countdown.score(task_json((7, 3, 12), 48), answer(text, ended=ended), finish_reason)
    assert verdict.reward == reward
    assert verdict.outcome == outcome
    if reward is not None:
        assert [name for name, _ in verdict.components] == ["parses", "numbers", "value"]
        assert min((value for _, value in verdict.components), default=0.0) == reward


def test_ids_outside_the_vocabulary_score_zero(countdown: Countdown) -> None:
    ids = np.array([2, 999, -4, END_ID], dtype=np.int64)
    assert countdown.score(task_json((7, 3, 12), 48), ids, "stop").outcome == "does not parse"


@pytest.mark.parametrize(
    "task", ["", "{}", '{"numbers":[1,2],"target":3}', '{"numbers":[1,2,3],"target":"x"}']
)
def test_a_foreign_task_is_an_error_not_a_score(countdown: Countdown, task: str) -> None:
    with pytest.raises(ConfigError, match="not a countdown task"):
        countdown.score(task, answer("1+2"), "stop")


def test_step_ends_the_only_turn(countdown: Countdown) -> None:
    task: Task = countdown.reset(0)
    turn = countdown.step(task.task, answer("1+2"))
    assert turn.done
    assert turn.tool_ids.size == 0
