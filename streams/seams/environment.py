"""The environment seam: where prompts come from and how a trajectory is judged.

Implementations live in `rollwire.producers.environments`; commands hand them to the fleet, the verifier and the evaluator.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray


class Task(NamedTuple):
    task_id: str  # equal problems have equal ids
    task: str  # the problem as JSON
    prompt_ids: NDArray[np.int64]  # [P]
    stop_ids: tuple[int, ...] = ()  # tokens that end a stretch, as the end token does: a tool call's last one


class Turn(NamedTuple):
    """What the environment says to a finished stretch of sampled tokens."""

    done: bool
    tool_ids: NDArray[np.int64]  # [N] tokens to put in before sampling goes on; never trained on


class Verdict(NamedTuple):
    reward: float | None  # None = could not be scored (time-out, evaluator died): never 0 for that
    components: tuple[tuple[str, float], ...]
    outcome: str


class Environment(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def end_id(self) -> int: ...

    @property
    def max_new_tokens(self) -> int:
        """Of a trajectory, behind its prompt: tokens sampled in all turns and those that tools put in."""
        ...

    def reset(self, seed: int, *, held_out: bool = False) -> Task:
        """The task of a seed, drawn from the training tasks or from the held-out ones; the two are disjoint."""
        ...

    def step(self, task: str, sampled_ids: NDArray[np.int64]) -> Turn:
        """After a stretch that ended with the end token or one of the task's `stop_ids`. `sampled_ids` [S] are the
        sampled tokens of all stretches so far, end to end and without what tools put between them."""
        ...

    def score(self, task: str, sampled_ids: NDArray[np.int64], finish_reason: str) -> Verdict:
        """The verdict on a whole trajectory; `sampled_ids` [S] as in `step`."""
        ...

    def decode(self, token_ids: NDArray[np.int64]) -> str: ...
