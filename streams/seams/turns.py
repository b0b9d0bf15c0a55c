"""What follows a finished stretch of sampled tokens: the end of the trajectory, or a tool's tokens and another stretch.

The fleet and the evaluator take the same turns, so the rule stands here. Pure.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollwire.streams.seams.environment import Environment


class Next(NamedTuple):
    """Exactly one of the two: the trajectory's finish reason, or the tool's tokens and how many may be sampled on them."""

    finish_reason: str | None
    tool_ids: NDArray[np.int64]  # [N]
    max_new_tokens: int


_NO_TOKENS = np.empty(0, dtype=np.int64)


def after_stretch(
    environment: Environment,
    task: str,
    sampled_ids: NDArray[np.int64],
    tokens_used: int,
    finish_reason: str,
) -> Next:
    """`sampled_ids` [S] are those of all stretches so far, `tokens_used` counts all tokens behind the prompt, tool
    results included: both kinds share `environment.max_new_tokens`. A result that leaves no room to go on ends the
    trajectory as "length" and is not put in; a stretch that did not stop by itself has no next one.
    """
    if finish_reason != "stop":
        return Next(finish_reason, _NO_TOKENS, 0)
    turn = environment.step(task, sampled_ids)
    if turn.done:
        return Next("stop", _NO_TOKENS, 0)
    left = environment.max_new_tokens - tokens_used - turn.tool_ids.size
    return Next(None, turn.tool_ids, left) if left > 0 else Next("length", _NO_TOKENS, 0)
