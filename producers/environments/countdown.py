"""Countdown: reach a target from three numbers, each used exactly once.

Prompt `7 3 12=48 `, completion `(7-3)*12<eos>`. Every task comes from a random expression tree over three numbers of
1..12 whose value is an integer of 0..99; the tree is also the demonstration. There are only 12^3 * 2 * 4^2 trees, so
all are laid out once and a draw is one look-up: the distribution is that of drawing trees and rejecting misfits.
The prompt names the numbers in random order: in the tree's own order it would give half of the answer away.

Training and held-out tasks are disjoint by construction: a task's side is a function of its id, and its id is a
hash of (sorted numbers, target) alone, so no reordering of a held-out problem is ever trained on.

    N sequences, W the widest one, P prompt tokens
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from rollwire.producers.environments.arithmetic import judge
from rollwire.producers.environments.demonstrations import Demonstrations, Part, lay_out
from rollwire.producers.environments.drawing import is_held_out, pick
from rollwire.schemas.errors import ConfigError
from rollwire.streams.seams.environment import Task, Turn, Verdict

VOCABULARY: Final[tuple[str, ...]] = ("<pad>", "<eos>", *"0123456789+-*/() =")
PAD_ID: Final = 0
END_ID: Final = 1

MAX_NUMBER: Final = 12
MAX_TARGET: Final = 99
MAX_NEW_TOKENS: Final = 16

_ORDERS: Final = tuple(itertools.permutations(range(3)))
_ID_OF: Final[dict[str, int]] = {text: i for i, text in enumerate(VOCABULARY)}
_COMPONENTS: Final = ("parses", "numbers", "value")
# How many of the components hold, by outcome.
_REACHED: Final[dict[str, int]] = {"right": 3, "wrong value": 2, "wrong numbers": 1}


class Problem(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`Task.task` is this as JSON."""

    numbers: tuple[int, int, int]  # in the order of the prompt
    target: int


class _Tree(NamedTuple):
    """One expression tree: a problem together with the text that solves it."""

    numbers: tuple[int, int, int]
    target: int
    text: str


def problem_id(numbers: Sequence[int], target: int) -> str:
    """16 hex digits, equal for equal problems whatever the order of their numbers."""
    canonical = f"countdown:{','.join(map(str, sorted(numbers)))}={target}"
    return hashlib.blake2b(canonical.encode(), digest_size=8).hexdigest()


def encode_text(text: str) -> NDArray[np.int64]:
    """Ids of a text over the vocabulary's characters. Raises `ConfigError` for any other character."""
    try:
        return np.array([_ID_OF[character] for character in text], dtype=np.int64)
    except KeyError as unknown:
        raise ConfigError(f"character {unknown} is not in the countdown vocabulary") from None


def _apply(sign: str, left: Fraction, right: Fraction) -> Fraction | None:
    if sign == "+":
        return left + right
    if sign == "-":
        return left - right
    if sign == "*":
        return left * right
    return left / right if right else None


def _all_trees() -> list[_Tree]:
    """Every tree with an integer value of 0..MAX_TARGET, in a fixed order; parentheses only where they matter."""
    trees: list[_Tree] = []
    signs = "+-*/"
    whole = [Fraction(n) for n in range(MAX_NUMBER + 1)]
    for a, b, c in itertools.product(range(1, MAX_NUMBER + 1), repeat=3):
        for outer, inner in itertools.product(signs, signs):
            head = _apply(inner, whole[a], whole[b])
            value = None if head is None else _apply(outer, head, whole[c])
            if value is not None and value.denominator == 1 and 0 <= value <= MAX_TARGET:
                plain = inner in "*/" or outer in "+-"
                text = f"{a}{inner}{b}{outer}{c}" if plain else f"({a}{inner}{b}){outer}{c}"
                trees.append(_Tree((a, b, c), int(value), text))
            tail = _apply(inner, whole[b], whole[c])
            value = None if tail is None else _apply(outer, whole[a], tail)
            if value is not None and value.denominator == 1 and 0 <= value <= MAX_TARGET:
                plain = outer == "+" or (inner in "*/" and outer in "-*")
                text = f"{a}{outer}{b}{inner}{c}" if plain else f"{a}{outer}({b}{inner}{c})"
                trees.append(_Tree((a, b, c), int(value), text))
    return trees


@lru_cache(maxsize=1)
def _sides() -> dict[bool, tuple[_Tree, ...]]:
    """All trees, by whether their problem is held out."""
    sides: dict[bool, list[_Tree]] = {False: [], True: []}
    for tree in _all_trees():
        sides[is_held_out(problem_id(tree.numbers, tree.target))].append(tree)
    return {side: tuple(trees) for side, trees in sides.items()}


def _shuffled(tree: _Tree, purpose: str, seed: int, counter: int) -> _Tree:
    """The same tree with its numbers in an order of their own; the solution stays."""
    order = _ORDERS[pick(f"{purpose} order", seed, counter, len(_ORDERS))]
    return tree._replace(numbers=(tree.numbers[order[0]], tree.numbers[order[1]], tree.numbers[order[2]]))


def _drawn(purpose: str, seed: int, counter: int, *, held_out: bool) -> _Tree:
    trees = _sides()[held_out]
    return _shuffled(trees[pick(purpose, seed, counter, len(trees))], purpose, seed, counter)


class Countdown:
    """Implements `streams.seams.environment.Environment`. Stateless: a task is a function of its seed."""

    def __init__(self) -> None:
        self.name: Final[str] = "countdown"
        self.vocab_size: Final[int] = len(VOCABULARY)
        self.end_id: Final[int] = END_ID
        self.max_new_tokens: Final[int] = MAX_NEW_TOKENS

    def reset(self, seed: int, *, held_out: bool = False) -> Task:
        """The task of a seed. Purely a function of its arguments."""
        return _task(_drawn("reset", seed, 0, held_out=held_out))

    def step(self, task: str, sampled_ids: NDArray[np.int64]) -> Turn:
        """Countdown has one turn."""
        return Turn(True, np.empty(0, dtype=np.int64))

    def score(self, task: str, sampled_ids: NDArray[np.int64], finish_reason: str) -> Verdict:
        """Reward 1 for a right answer that the policy ended itself, else 0; None where sampling was aborted.

        `task` is JSON from `reset`; raises `ConfigError` where it is not.
        """
        if finish_reason not in ("stop", "length"):
            return Verdict(None, (), "aborted" if finish_reason == "abort" else "unknown finish")
        try:
            problem = msgspec.json.decode(task, type=Problem)
        except msgspec.DecodeError as error:
            raise ConfigError(f"not a countdown task: {error}") from error
        if finish_reason != "stop" or sampled_ids.size == 0 or int(sampled_ids[-1]) != END_ID:
            return self._verdict("unfinished")
        return self._verdict(judge(self.decode(sampled_ids[:-1]), problem.numbers, problem.target))

    def encode(self, text: str) -> NDArray[np.int64]:
        """Ids of a text. Raises `ConfigError` for a character outside the vocabulary."""
        return encode_text(text)

    def decode(self, token_ids: NDArray[np.int64]) -> str:
        """Text of ids; ids outside the vocabulary become U+FFFD, which no parser accepts."""
        return "".join(VOCABULARY[i] if 0 <= i < len(VOCABULARY) else "\ufffd" for i in token_ids.tolist())

    def demonstrations(self, n: int, seed: int) -> Demonstrations:
        """`n` solved training tasks, as drawn, for supervised warm-up."""
        trees = [_drawn("demonstration", seed, counter, held_out=False) for counter in range(n)]
        return lay_out(
            [
                (
                    Part(encode_text(_prompt(tree)), False),
                    Part(np.append(encode_text(tree.text), END_ID), True),
                )
                for tree in trees
            ],
            PAD_ID,
        )

    def held_out_draws(self, n: int, seed: int) -> list[Task]:
        """`n` held-out tasks as they are drawn: problems with many solutions come more often."""
        return [_task(_drawn("held-out", seed, counter, held_out=True)) for counter in range(n)]

    def distinct_held_out(self, n: int, seed: int) -> list[Task]:
        """`n` different held-out problems, each equally likely. Raises `ConfigError` when there are fewer."""
        first: dict[str, _Tree] = {}
        for tree in _sides()[True]:
            first.setdefault(problem_id(tree.numbers, tree.target), tree)
        if n > len(first):
            raise ConfigError(f"{n} distinct held-out problems were asked for, there are {len(first)}")
        order = sorted(first, key=lambda task_id: hashlib.blake2b(f"{seed}:{task_id}".encode()).digest())
        return [_task(_shuffled(first[task_id], "distinct", seed, int(task_id, 16))) for task_id in order[:n]]

    def problems(self, *, held_out: bool) -> frozenset[str]:
        """Ids of all problems of one side."""
        return frozenset(problem_id(tree.numbers, tree.target) for tree in _sides()[held_out])

    @staticmethod
    def _verdict(outcome: str) -> Verdict:
        reached = _REACHED.get(outcome, 0)
        components = tuple((name, float(i < reached)) for i, name in enumerate(_COMPONENTS))
        return Verdict(1.0 if outcome == "right" else 0.0, components, outcome)


def _prompt(tree: _Tree) -> str:
    return f"{' '.join(map(str, tree.numbers))}={tree.target} "


def _task(tree: _Tree) -> Task:
    problem = Problem(numbers=tree.numbers, target=tree.target)
    return Task(
        problem_id(tree.numbers, tree.target),
        msgspec.json.encode(problem).decode(),
        encode_text(_prompt(tree)),
    )
