"""The evaluator against Python's own parser as oracle (in the test only), and against hostile text."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwire.producers.environments.arithmetic import MAX_DEPTH, MAX_LENGTH, evaluate, judge

_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def oracle(text: str) -> Fraction:
    """Raises ZeroDivisionError."""

    def value(node: ast.expr) -> Fraction:
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return Fraction(node.value)
        assert isinstance(node, ast.BinOp)
        return _OPERATORS[type(node.op)](value(node.left), value(node.right))

    return value(ast.parse(text, mode="eval").body)


def _join(parts: tuple[str, str, str]) -> str:
    left, sign, right = parts
    return f"{left}{sign}{right}"


well_formed = st.recursive(
    st.integers(0, 120).map(str),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from("+-*/"), inner).map(_join), inner.map(lambda text: f"({text})")
    ),
    max_leaves=9,
)


@given(well_formed)
def test_equals_the_oracle_on_well_formed_text(text: str) -> None:
    mine = evaluate(text, max_length=10_000, max_depth=100)
    try:
        expected = oracle(text)
    except ZeroDivisionError:
        assert mine.outcome == "division by zero"
    else:
        assert mine.outcome is None
        assert mine.value == expected
        assert list(mine.numbers) == [
            int(run) for run in "".join(c if c.isdigit() else " " for c in text).split()
        ]


@given(st.text(alphabet="0123456789+-*/() =", max_size=24))
def test_whatever_is_accepted_python_reads_the_same_way(text: str) -> None:
    mine = evaluate(text)
    if mine.value is not None:
        assert mine.value == oracle(text)


@given(st.text(max_size=200))
def test_never_raises(text: str) -> None:
    evaluate(text)


@pytest.mark.parametrize(
    "text",
    [
        "", "-3", "3-", "+3", "1--2", "2*-3", "(-3)", "03", "00", "1+02", "2**3", "7//2", "1 + 2", " 1", "1 ", "1\n", "١+٢",
        "1²", "１+２", "1_0", "1.5", "1e3", "0x1", "()", "(1", "1)", "(1+2", "1+2)", ")(", "2(3)", "(2)(3)", "1,2", "a", "1+a",
        "__import__", "1if 1else 2", "1+2=3", "1\x00", "\ufffd",
    ],
)  # fmt: skip
def test_rejects(text: str) -> None:
    assert evaluate(text).outcome == "does not parse"


@pytest.mark.parametrize("text", ["1/0", "1/(2-2)", "0/0", "1/(0*5)", "(3-3)/(4-4)"])
def test_division_by_zero_is_an_outcome(text: str) -> None:
    assert evaluate(text).outcome == "division by zero"


def test_limits_hold_before_anything_is_computed() -> None:
    assert evaluate("(" * 1_000_000).outcome == "too long"
    assert evaluate("9" * 5_000).outcome == "too long"  # above int()'s own limit, which raises
    assert evaluate("9" * MAX_LENGTH).value == Fraction(10**MAX_LENGTH - 1)
    assert evaluate("(" * MAX_DEPTH + "1" + ")" * MAX_DEPTH).value == 1
    assert evaluate("(" * (MAX_DEPTH + 1) + "1" + ")" * (MAX_DEPTH + 1)).outcome == "too deep"
    assert evaluate("(1)+" * 15 + "(1)").value == 16  # depth is nesting, not count


def test_fractions_are_exact() -> None:
    assert evaluate("9/(3/10)").value == 30
    assert evaluate("1/3*3").value == 1
    assert evaluate("1/3+1/3+1/3").value == 1


@pytest.mark.parametrize(
    ("text", "outcome"),
    [
        ("(7-3)*12", "right"),
        ("7-3*12", "wrong value"),
        ("(7-3)*12+0", "wrong numbers"),
        ("4*12", "wrong numbers"),
        ("(7-3)*7", "wrong numbers"),
        ("73-12", "wrong numbers"),
        ("(7-3", "does not parse"),
        ("12/(7-3-4)", "division by zero"),
    ],
)
def test_each_number_exactly_once(text: str, outcome: str) -> None:
    assert judge(text, (7, 3, 12), 48) == outcome


def test_equal_numbers_must_all_be_used() -> None:
    assert judge("5+5+1", (5, 5, 1), 11) == "right"
    assert judge("5+1", (5, 5, 1), 6) == "wrong numbers"
    assert judge("5+1+1", (5, 5, 1), 7) == "wrong numbers"
