"""Calculator: arithmetic that is too long to do in one's head, and a tool that does it exactly.

Prompt `47*38-125=`. The policy may answer at once, or first write a call such as `[47*38-125]`: the bracket ends the
stretch, the environment puts `1911` behind it, and sampling goes on from exactly the tokens that stand there. It has
`MAX_CALLS` calls; the trajectory ends with `<eos>`, and what stands between the last call's bracket and `<eos>` is the
answer. It must be a plain number: an expression of the right value is no answer, or else repeating the prompt would be one.

A call that does not parse, divides by zero or has a result of more than `MAX_RESULT` characters is answered with `?`.
Which call was answered how follows from the sampled tokens alone, since a bracket always ends a stretch.

A task's factors are in random order and its numbers of random width, so short tasks repeat among the draws; the set of
distinct tasks is mostly long ones. Training and held-out tasks are disjoint by construction: a task's side is a function
of its id, and its id is a hash of the task with its factors sorted.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from rollwire.producers.environments.arithmetic import evaluate
from rollwire.producers.environments.demonstrations import Demonstrations, Part, lay_out
from rollwire.producers.environments.drawing import is_held_out, pick
from rollwire.schemas.errors import ConfigError
from rollwire.streams.seams.environment import Task, Turn, Verdict

VOCABULARY: Final[tuple[str, ...]] = ("<pad>", "<eos>", *"0123456789+-*/()[]=?")
PAD_ID: Final = 0
END_ID: Final = 1
CALL_END: Final = "]"

MAX_CALLS: Final = 2
MAX_RESULT: Final = 6  # characters; the longest honest one has 4
MAX_NEW_TOKENS: Final = 40  # tool results included
MAX_FACTOR: Final = 99
MAX_TERM: Final = 99
FAILED: Final = "?"

_ID_OF: Final[dict[str, int]] = {text: i for i, text in enumerate(VOCABULARY)}
CALL_END_ID: Final = _ID_OF[CALL_END]
_COMPONENTS: Final = ("called", "answered", "value")

# The warm start is weak on purpose: what RL then finds is that calling pays, and how to call and copy without a slip.
CALLS_IN_100: Final = 40  # demonstrations that call; the others guess
SLIPS_IN_100: Final = 50  # of those that call, with one digit wrong in the call or in the answer


class Problem(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`Task.task` is this as JSON."""

    text: str  # as in the prompt, without its `=`
    value: int


class _Operands(NamedTuple):
    a: int
    b: int
    sign: str
    c: int

    @property
    def text(self) -> str:
        return f"{self.a}*{self.b}{self.sign}{self.c}"

    @property
    def value(self) -> int:
        return self.a * self.b + (self.c if self.sign == "+" else -self.c)


class _Said(NamedTuple):
    """What a policy's sampled tokens come to."""

    calls: tuple[str, ...]  # the text of each finished call, its brackets included
    rest: str  # what stands behind the last call


def problem_id(a: int, b: int, sign: str, c: int) -> str:
    """16 hex digits, equal for equal problems whatever the order of the factors."""
    canonical = f"calculator:{min(a, b)}*{max(a, b)}{sign}{c}"
    return hashlib.blake2b(canonical.encode(), digest_size=8).hexdigest()


def encode_text(text: str) -> NDArray[np.int64]:
    """Ids of a text over the vocabulary's characters. Raises `ConfigError` for any other character."""
    try:
        return np.array([_ID_OF[character] for character in text], dtype=np.int64)
    except KeyError as unknown:
        raise ConfigError(f"character {unknown} is not in the calculator's vocabulary") from None


def result_of(call: str) -> str:
    """What the tool says to a call, as `[47*38]`: an exact integer or fraction, or `?`. Never raises."""
    at = call.rfind("[")
    evaluated = evaluate(call[at + 1 : -1]) if at >= 0 else None
    if evaluated is None or evaluated.value is None:
        return FAILED
    text = str(evaluated.value)
    return text if len(text) <= MAX_RESULT else FAILED


def _number(purpose: str, seed: int, counter: int, low: int, high: int) -> int:
    """One digit in a third of the draws, else as many as `high` has; then a number of that width."""
    narrow = pick(f"{purpose} width", seed, counter, 3) == 0
    start, end = (low, 9) if narrow else (10, high)
    return start + pick(purpose, seed, counter, end - start + 1)


def _drawn(purpose: str, seed: int, *, held_out: bool) -> _Operands:
    """The first fitting problem of a seed's own sequence."""
    attempt = 0
    while True:
        operands = _Operands(
            _number(f"{purpose} a", seed, attempt, 2, MAX_FACTOR),
            _number(f"{purpose} b", seed, attempt, 2, MAX_FACTOR),
            "+-"[pick(f"{purpose} sign", seed, attempt, 2)],
            _number(f"{purpose} c", seed, attempt, 1, MAX_TERM),
        )
        if operands.value >= 0 and is_held_out(problem_id(*operands)) == held_out:
            return operands
        attempt += 1


@lru_cache(maxsize=2)
def _problems(held_out: bool) -> frozenset[str]:
    ids: set[str] = set()
    for a in range(2, MAX_FACTOR + 1):
        for b in range(a, MAX_FACTOR + 1):
            for c in range(1, MAX_TERM + 1):
                signs = "+-" if a * b >= c else "+"
                ids.update(i for sign in signs if is_held_out(i := problem_id(a, b, sign, c)) == held_out)
    return frozenset(ids)


def _wrong_digit(text: str, purpose: str, seed: int, counter: int) -> str:
    """`text` with one of its digits replaced by another digit."""
    places = [i for i, character in enumerate(text) if character.isdigit()]
    place = places[pick(f"{purpose} place", seed, counter, len(places))]
    others = [digit for digit in "123456789" if digit != text[place]]  # a leading 0 would not parse
    digit = others[pick(f"{purpose} digit", seed, counter, len(others))]
    return f"{text[:place]}{digit}{text[place + 1 :]}"


class Calculator:
    """Implements `streams.seams.environment.Environment`. Stateless: a task is a function of its seed."""

    def __init__(self) -> None:
        self.name: Final[str] = "calculator"
        self.vocab_size: Final[int] = len(VOCABULARY)
        self.end_id: Final[int] = END_ID
        self.max_new_tokens: Final[int] = MAX_NEW_TOKENS

    def reset(self, seed: int, *, held_out: bool = False) -> Task:
        """The task of a seed. Purely a function of its arguments."""
        return _task(_drawn("reset", seed, held_out=held_out))

    def step(self, task: str, sampled_ids: NDArray[np.int64]) -> Turn:
        """A finished call gets its result while the budget of calls lasts; anything else ends the trajectory."""
        calls, rest = self._said(sampled_ids)
        if rest or not calls or len(calls) > MAX_CALLS:
            return Turn(True, np.empty(0, dtype=np.int64))
        return Turn(False, encode_text(result_of(calls[-1])))

    def score(self, task: str, sampled_ids: NDArray[np.int64], finish_reason: str) -> Verdict:
        """Reward 1 for a right answer that the policy ended itself, else 0; None where sampling was aborted.

        `sampled_ids` are those of all turns. `task` is JSON from `reset`; raises `ConfigError` where it is not.
        """
        if finish_reason not in ("stop", "length"):
            return Verdict(None, (), "aborted" if finish_reason == "abort" else "unknown finish")
        try:
            problem = msgspec.json.decode(task, type=Problem)
        except msgspec.DecodeError as error:
            raise ConfigError(f"not a calculator task: {error}") from error
        ended = finish_reason == "stop" and sampled_ids.size > 0 and int(sampled_ids[-1]) == END_ID
        calls, rest = self._said(sampled_ids[:-1] if ended else sampled_ids)
        if not ended:
            return _verdict(len(calls), False, "too many calls" if len(calls) > MAX_CALLS else "unfinished")
        evaluated = evaluate(rest)
        if not rest.isdigit() or evaluated.value is None:
            return _verdict(len(calls), False, "no number")
        return _verdict(len(calls), True, "right" if evaluated.value == problem.value else "wrong value")

    def encode(self, text: str) -> NDArray[np.int64]:
        """Ids of a text. Raises `ConfigError` for a character outside the vocabulary."""
        return encode_text(text)

    def decode(self, token_ids: NDArray[np.int64]) -> str:
        """Text of ids; ids outside the vocabulary become U+FFFD, which no parser accepts."""
        return "".join(VOCABULARY[i] if 0 <= i < len(VOCABULARY) else "\ufffd" for i in token_ids.tolist())

    def demonstrations(self, n: int, seed: int) -> Demonstrations:
        """`n` training tasks, as drawn: some call the tool, half of them with a slip, the others state the value at once."""
        return lay_out([_demonstration(seed, counter) for counter in range(n)], PAD_ID)

    def held_out_draws(self, n: int, seed: int) -> list[Task]:
        """`n` held-out tasks as they are drawn: short ones repeat."""
        return [_task(_drawn(f"held-out {seed}", counter, held_out=True)) for counter in range(n)]

    def distinct_held_out(self, n: int, seed: int) -> list[Task]:
        """`n` different held-out problems, each equally likely. Raises `ConfigError` when there are fewer."""
        if n > (there_are := len(_problems(True))):
            raise ConfigError(f"{n} distinct held-out problems were asked for, there are {there_are}")
        found: dict[str, _Operands] = {}
        counter = 0
        while len(found) < n:
            a = 2 + pick("distinct a", seed, counter, MAX_FACTOR - 1)
            b = 2 + pick("distinct b", seed, counter, MAX_FACTOR - 1)
            sign = "+-"[pick("distinct sign", seed, counter, 2)]
            c = 1 + pick("distinct c", seed, counter, MAX_TERM)
            counter += 1
            task_id = problem_id(a, b, sign, c)
            # A pair of factors comes in two orders, a square in one: half of the former makes them alike.
            unordered = a == b or pick("distinct half", seed, counter, 2) == 0
            operands = _Operands(a, b, sign, c)
            if unordered and operands.value >= 0 and is_held_out(task_id):
                found.setdefault(task_id, operands)
        return [_task(operands) for operands in found.values()]

    def problems(self, *, held_out: bool) -> frozenset[str]:
        """Ids of all problems of one side; about a second's work."""
        return _problems(held_out)

    def _said(self, sampled_ids: NDArray[np.int64]) -> _Said:
        *calls, rest = self.decode(sampled_ids).split(CALL_END)
        return _Said(tuple(f"{call}{CALL_END}" for call in calls), rest)


def _demonstration(seed: int, counter: int) -> list[Part]:
    operands = _drawn(f"demonstration {seed}", counter, held_out=False)
    prompt, answer = Part(encode_text(f"{operands.text}="), False), str(operands.value)
    if pick("demonstration calls", seed, counter, 100) >= CALLS_IN_100:
        return [prompt, _answer(answer)]
    call = f"[{operands.text}]"
    if pick("demonstration slips", seed, counter, 100) < SLIPS_IN_100:
        if pick("demonstration slips where", seed, counter, 2):
            call = _wrong_digit(call, "demonstration slip", seed, counter)
            answer = result_of(call)
        else:
            answer = _wrong_digit(answer, "demonstration slip", seed, counter)
    return [
        prompt,
        Part(encode_text(call), True),
        Part(encode_text(result_of(call)), False),
        _answer(answer),
    ]


def _answer(text: str) -> Part:
    return Part(np.append(encode_text(text), END_ID), True)


def _task(operands: _Operands) -> Task:
    problem = Problem(text=operands.text, value=operands.value)
    return Task(
        problem_id(*operands),
        msgspec.json.encode(problem).decode(),
        encode_text(f"{operands.text}="),
        (CALL_END_ID,),
    )


def _verdict(calls: int, answered: bool, outcome: str) -> Verdict:
    values = (float(calls > 0), float(answered), float(outcome == "right"))
    return Verdict(values[2], tuple(zip(_COMPONENTS, values, strict=True)), outcome)
