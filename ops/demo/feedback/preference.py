"""What simulated people like, which they tell nobody, and what they do about an answer. Pure.

The policy's task is countdown's: `7 3 12=48 ` asks for an expression. These people do not check the value; they like an
answer that uses their three numbers, each once, and reads plainly: without brackets and without a division.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from rollwire.producers.environments.arithmetic import evaluate


class PeopleConfig(BaseModel):
    """The crowd that asks, and how it reacts."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    people: int = Field(default=200, ge=1, description="different people; each has a data key")
    questions_per_s: float = Field(default=100.0, gt=0, description="mean rate, exponential gaps")
    max_waiting: int = Field(default=500, ge=1, description="questions without an answer; above, nobody asks")
    silent: float = Field(default=0.35, ge=0, le=1, description="share of answers on which nobody clicks")
    mistaken: float = Field(
        default=0.05, ge=0, le=1, description="share of clicks that say the opposite of what is felt"
    )
    comments: float = Field(default=0.03, ge=0, le=1, description="share of clicks with a written word")
    think_s: float = Field(default=0.4, ge=0, description="mean time from an answer to the click")
    max_think_s: float = Field(default=1.2, ge=0, description="and the longest")
    seed: int = Field(default=0, ge=0, description="of the questions and the reactions")


class Click(NamedTuple):
    """One piece of feedback: what `FeedbackClient.send` takes."""

    signal: str
    value: float | bool
    comment: str | None = None


def likes(numbers: Sequence[int], answer: str) -> bool:
    """Whether people like an answer to a question over `numbers`."""
    evaluated = evaluate(answer)
    if evaluated.outcome not in (None, "division by zero") or "(" in answer or "/" in answer:
        return False
    return sorted(evaluated.numbers) == sorted(numbers)


def react(liked: bool, rng: random.Random, config: PeopleConfig) -> tuple[Click, ...]:
    """What a person does about an answer: nothing, or one or two clicks of the product's kinds."""
    if rng.random() < config.silent:
        return ()
    felt = liked != (rng.random() < config.mistaken)
    comment = None
    if rng.random() < config.comments:
        comment = "just what I asked for" if felt else "hard to read"
    way = rng.random()
    if way < 0.5:
        return (Click("thumb", 1.0 if felt else -1.0, comment),)
    if way < 0.75:
        return (Click("accept", felt, comment),)
    survived = rng.uniform(0.8, 1.0) if felt else rng.uniform(0.0, 0.2)
    if felt or way < 0.9:
        return (Click("edit_survival", round(survived, 3), comment),)
    return (Click("accept", False, comment), Click("dissatisfied_follow_up", True))


def think_s(rng: random.Random, config: PeopleConfig) -> float:
    return min(rng.expovariate(1 / config.think_s), config.max_think_s) if config.think_s else 0.0
