"""Exact arithmetic on untrusted text: recursive descent over fractions, never `eval`.

    expression := term   (("+" | "-") term)*
    term       := factor (("*" | "/") factor)*
    factor     := number | "(" expression ")"
    number     := "0" | [1-9][0-9]*          ASCII digits only

So unary minus, leading zeros, `**`, `//`, spaces, digits of other scripts and trailing text do not parse. Length and
nesting are limited before anything is computed, which bounds the work of one call to microseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Final, Literal, NamedTuple

Outcome = Literal[
    "right",  # every number once, and the target is reached
    "wrong value",  # every number once, another value
    "wrong numbers",  # a number is missing, repeated or foreign
    "division by zero",
    "does not parse",
    "too long",
    "too deep",
]

MAX_LENGTH: Final = 64  # characters; the longest honest answer over three numbers up to 12 has 10
MAX_DEPTH: Final = 8  # nested parentheses

_DIGITS: Final = frozenset("0123456789")


class Evaluated(NamedTuple):
    """`value` is None where `outcome` says why there is none."""

    value: Fraction | None
    numbers: tuple[int, ...]  # in the order written
    outcome: Outcome | None


class _Malformed(Exception):
    """Ends the descent; never leaves this module."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome)
        self.outcome: Outcome = outcome


class _Descent:
    """One pass over one text. `at` is the next character that is not consumed."""

    def __init__(self, text: str, max_depth: int) -> None:
        self.text = text
        self.at = 0
        self.depth_left = max_depth
        self.numbers: list[int] = []

    def peek(self) -> str:
        return self.text[self.at] if self.at < len(self.text) else ""

    def expression(self) -> Fraction:
        value = self.term()
        while (sign := self.peek()) in ("+", "-"):
            self.at += 1
            right = self.term()
            value = value + right if sign == "+" else value - right
        return value

    def term(self) -> Fraction:
        value = self.factor()
        while (sign := self.peek()) in ("*", "/"):
            self.at += 1
            right = self.factor()
            if sign == "*":
                value = value * right
            elif right == 0:
                raise _Malformed("division by zero")
            else:
                value = value / right
        return value

    def factor(self) -> Fraction:
        if self.peek() != "(":
            return self.number()
        if self.depth_left == 0:
            raise _Malformed("too deep")
        self.at += 1
        self.depth_left -= 1
        value = self.expression()
        if self.peek() != ")":
            raise _Malformed("does not parse")
        self.at += 1
        self.depth_left += 1
        return value

    def number(self) -> Fraction:
        start = self.at
        while self.peek() in _DIGITS:
            self.at += 1
        digits = self.text[start : self.at]
        if not digits or (digits[0] == "0" and len(digits) > 1):
            raise _Malformed("does not parse")
        value = int(digits)
        self.numbers.append(value)
        return Fraction(value)


def evaluate(text: str, *, max_length: int = MAX_LENGTH, max_depth: int = MAX_DEPTH) -> Evaluated:
    """The exact value of `text` and the numbers in it; never raises, whatever the text."""
    if len(text) > max_length:
        return Evaluated(None, (), "too long")
    descent = _Descent(text, max_depth)
    try:
        value = descent.expression()
    except _Malformed as malformed:
        return Evaluated(None, tuple(descent.numbers), malformed.outcome)
    if descent.at != len(text):
        return Evaluated(None, tuple(descent.numbers), "does not parse")
    return Evaluated(value, tuple(descent.numbers), None)


def judge(text: str, numbers: Sequence[int], target: int) -> Outcome:
    """Does `text` reach `target` with each of `numbers` used exactly once? Never raises."""
    evaluated = evaluate(text)
    if evaluated.outcome is not None:
        return evaluated.outcome
    if sorted(evaluated.numbers) != sorted(numbers):
        return "wrong numbers"
    return "right" if evaluated.value == target else "wrong value"
