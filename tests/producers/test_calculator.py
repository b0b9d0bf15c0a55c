"""Calculator: calls are answered exactly, answers are plain numbers, sides are disjoint, tool tokens are not trained on."""

from __future__ import annotations

from collections import Counter

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from rollwire.producers.environments.calculator import (
    CALL_END_ID,
    CALLS_IN_100,
    END_ID,
    MAX_CALLS,
    MAX_NEW_TOKENS,
    MAX_RESULT,
    PAD_ID,
    VOCABULARY,
    Calculator,
    Problem,
    encode_text,
    problem_id,
    result_of,
)
from rollwire.producers.environments.drawing import is_held_out
from rollwire.schemas.errors import ConfigError
from rollwire.streams.seams.environment import Environment

TASK = msgspec.json.encode(Problem(text="47*38-125", value=1661)).decode()


@pytest.fixture(scope="module")
def calculator() -> Calculator:
    return Calculator()


def said(text: str, *, ended: bool = True) -> NDArray[np.int64]:
    return np.append(encode_text(text), END_ID) if ended else encode_text(text)


def test_it_is_an_environment(calculator: Calculator) -> None:
    environment: Environment = calculator
    assert environment.vocab_size == len(VOCABULARY) == 22
    assert VOCABULARY[environment.end_id] == "<eos>"
    assert VOCABULARY[PAD_ID] == "<pad>"
    assert VOCABULARY[CALL_END_ID] == "]"


def test_a_task_is_a_function_of_its_seed_and_names_its_stop(calculator: Calculator) -> None:
    for seed in range(200):
        task = calculator.reset(seed)
        assert task.task == calculator.reset(seed).task
        problem = msgspec.json.decode(task.task, type=Problem)
        assert calculator.decode(task.prompt_ids) == f"{problem.text}="
        assert result_of(f"[{problem.text}]") == str(problem.value)
        assert problem.value >= 0
        assert task.stop_ids == (CALL_END_ID,)
        assert not is_held_out(task.task_id)
        assert is_held_out(calculator.reset(seed, held_out=True).task_id)


def test_sides_are_disjoint_and_tasks_lie_on_theirs(calculator: Calculator) -> None:
    train, held_out = calculator.problems(held_out=False), calculator.problems(held_out=True)
    assert not train & held_out
    assert 0.09 < len(held_out) / (len(train) + len(held_out)) < 0.11
    draws, distinct = calculator.held_out_draws(512, 3), calculator.distinct_held_out(400, 3)
    assert {task.task_id for task in (*draws, *distinct)} <= held_out
    assert {calculator.reset(seed).task_id for seed in range(500)} <= train
    assert len({task.task_id for task in distinct}) == 400
    assert max(Counter(task.task_id for task in draws).values()) > 1


def test_factors_in_another_order_are_the_same_problem() -> None:
    assert problem_id(47, 38, "-", 5) == problem_id(38, 47, "-", 5)
    assert problem_id(47, 38, "-", 5) != problem_id(47, 38, "+", 5)


def test_more_distinct_tasks_than_there_are_is_an_error(calculator: Calculator) -> None:
    with pytest.raises(ConfigError, match="distinct"):
        calculator.distinct_held_out(10**7, 0)


@pytest.mark.parametrize(
    ("call", "result"),
    [
        ("[47*38]", "1786"),
        ("[47*38-125]", "1661"),
        ("[3-5]", "-2"),
        ("[6/4]", "3/2"),
        ("[6/0]", "?"),
        ("[6/(3-3)]", "?"),
        ("[07]", "?"),
        ("[]", "?"),
        ("]", "?"),
        ("12]", "?"),
        ("[1[2+3]", "5"),
        ("[999*1000]", "999000"),
        ("[9999*1000]", "?"),
        ("[1/1234567]", "?"),
        ("[2**9]", "?"),
        ("[<pad>]", "?"),
        (f"[{'(' * 30}1{')' * 30}]", "?"),
    ],
)
def test_the_tool_is_exact_and_never_raises(call: str, result: str) -> None:
    assert result_of(call) == result


def test_a_call_is_answered_while_the_budget_lasts(calculator: Calculator) -> None:
    one = said("[47*38]", ended=False)
    turn = calculator.step(TASK, one)
    assert not turn.done
    assert calculator.decode(turn.tool_ids) == "1786"
    two = said("[47*38][1786-125]", ended=False)
    assert calculator.decode(calculator.step(TASK, two).tool_ids) == "1661"
    three = said("[47*38]" + "[1]" * MAX_CALLS, ended=False)
    assert calculator.step(TASK, three).done
    assert calculator.step(TASK, said("[47*38-125]1661")).done
    assert calculator.step(TASK, said("[47*38-125]")).done
    assert calculator.step(TASK, said("1661")).done


@pytest.mark.parametrize(
    ("text", "ended", "reason", "reward", "outcome"),
    [
        ("1661", True, "stop", 1.0, "right"),
        ("[47*38-125]1661", True, "stop", 1.0, "right"),
        ("[47*38][1786-125]1661", True, "stop", 1.0, "right"),
        ("[47*38-125]1662", True, "stop", 0.0, "wrong value"),
        ("47*38-125", True, "stop", 0.0, "no number"),
        ("01661", True, "stop", 0.0, "no number"),
        ("(1661)", True, "stop", 0.0, "no number"),
        ("[47*38-125]", True, "stop", 0.0, "no number"),
        ("", True, "stop", 0.0, "no number"),
        ("[1", True, "stop", 0.0, "no number"),
        ("[47*38-125]1661", False, "length", 0.0, "unfinished"),
        ("[47*38-125]", False, "length", 0.0, "unfinished"),
        ("[1][2][3]", False, "stop", 0.0, "too many calls"),
        ("1661", True, "abort", None, "aborted"),
        ("1661", True, "vanished", None, "unknown finish"),
    ],
)
def test_verdicts(
    calculator: Calculator, text: str, ended: bool, reason: str, reward: float | None, outcome: str
) -> None:
    verdict = calculator.score(TASK, said(text, ended=ended), reason)
    assert (verdict.reward, verdict.outcome) == (reward, outcome)
    if reward is not None:
        assert dict(verdict.components)["called"] == float("]" in text)


@given(st.lists(st.integers(-2, 30), max_size=40))
def test_any_tokens_can_be_stepped_and_scored(ids: list[int]) -> None:
    calculator = Calculator()
    sampled_S = np.array(ids, dtype=np.int64)
    turn = calculator.step(TASK, sampled_S)
    assert turn.done == (turn.tool_ids.size == 0)
    assert turn.tool_ids.size <= MAX_RESULT
    assert CALL_END_ID not in turn.tool_ids
    assert calculator.score(TASK, sampled_S, "stop").reward in (0.0, 1.0)


def test_a_task_of_another_environment_is_an_error(calculator: Calculator) -> None:
    with pytest.raises(ConfigError, match="calculator task"):
        calculator.score('{"numbers": [1, 2, 3], "target": 6}', said("6"), "stop")


def test_demonstrations_call_rarely_and_leave_the_results_out_of_the_loss(calculator: Calculator) -> None:
    demonstrations = calculator.demonstrations(2_000, 5)
    again = calculator.demonstrations(2_000, 5)
    assert (demonstrations.tokens_NW == again.tokens_NW).all()
    calls = right = 0
    for ids_W, mask_W, length in zip(*demonstrations, strict=True):
        text = calculator.decode(ids_W[:length])
        prompt, _, behind = text.partition("=")
        assert length <= len(prompt) + 1 + MAX_NEW_TOKENS
        assert not mask_W[: len(prompt) + 1].any()
        assert not mask_W[length:].any()
        sampled_S = ids_W[mask_W]
        assert int(sampled_S[-1]) == END_ID
        if "[" not in behind:
            assert mask_W[len(prompt) + 1 : length].all()
            assert behind == f"{result_of(f'[{prompt}]')}<eos>"
            continue
        calls += 1
        call = behind[: behind.index("]") + 1]
        tool_ids = ids_W[:length][~mask_W[:length]][len(prompt) + 1 :]
        assert calculator.decode(tool_ids) == result_of(call)
        task = msgspec.json.encode(Problem(text=prompt, value=int(result_of(f"[{prompt}]")))).decode()
        right += calculator.score(task, sampled_S, "stop").reward == 1.0
    assert abs(calls - 20 * CALLS_IN_100) < 100
    assert 0.4 < right / calls < 0.6


def test_no_character_outside_the_vocabulary() -> None:
    with pytest.raises(ConfigError, match="'x'"):
        encode_text("4x7")
