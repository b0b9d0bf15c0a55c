"""From a question and what an engine sampled to an answer and its event `production-rollouts`. Pure.

P prompt tokens, N sampled tokens
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from rollwire.producers.trajectory import Origin, Trajectory
from rollwire.schemas.records import ProductionRollout, Seal
from rollwire.streams.seams.engine import Sampled
from rollwire.streams.seams.environment import Task

Classify = Callable[[NDArray[np.int64], str], str]
"""The outcome class of sampled tokens [N] that ended with a finish reason: what coverage is counted by."""
SealTokens = Callable[[str, str, bytes], tuple[bytes, Seal]]
"""(pseudonym, rollout id, tokens) to ciphertext of the same length and what opens it."""


class Texts(Protocol):
    """Between what people read and what the policy reads. The environments implement it."""

    def encode(self, text: str) -> NDArray[np.int64]:
        """Raises `ConfigError` for what cannot be written in the policy's vocabulary."""
        ...

    def decode(self, token_ids: NDArray[np.int64]) -> str: ...


class Question(NamedTuple):
    prompt_ids: NDArray[np.int64]  # [P]
    subject: str  # pseudonym of who asks


class Answer(NamedTuple):
    """What whoever asked is told; `rollout_id` is what feedback names."""

    rollout_id: str
    sampled_ids: NDArray[np.int64]  # [N], without the token that ended it
    version: int  # that sampled its last token
    finish_reason: str


def by_finish(sampled_ids: NDArray[np.int64], finish_reason: str) -> str:
    """The classes of a policy whose answers nobody looks into."""
    return {"stop": "answered", "length": "cut_off", "abort": "broken_off"}.get(finish_reason, "unknown")


def trajectory_of(question: Question, group_id: str, seed: int, now_us: int) -> Trajectory:
    """One sample a prompt. Neither the task nor its id tells what was asked: an id made of a short prompt could be guessed."""
    return Trajectory(group_id, 0, 1, Task(group_id, "", question.prompt_ids), seed, now_us)


def answer_of(trajectory: Trajectory, sampled: Sampled, end_id: int) -> Answer:
    ids_N = sampled.token_ids
    shown_N = ids_N[:-1] if ids_N.size and int(ids_N[-1]) == end_id else ids_N
    version = int(sampled.versions[-1]) if sampled.versions.size else -1
    return Answer(trajectory.rollout_id, shown_N, version, sampled.finish_reason)


def rollout_of(
    trajectory: Trajectory,
    finish_reason: str,
    origin: Origin,
    *,
    subject: str,
    tenant: str,
    outcome: str,
    seal: SealTokens,
    now_us: int,
) -> ProductionRollout | None:
    """The event; None where nothing was sampled. `origin.token_dtype` must be "u4"; what `seal` raises goes up.

    No routing trace goes with it: the experts that a token took tell which token it was.
    """
    rollout = trajectory.finish(origin, finish_reason, now_us).rollout
    if rollout is None:
        return None
    token_ids, sealed = seal(subject, rollout.rollout_id, rollout.token_ids)
    fields = msgspec.structs.asdict(rollout)
    fields |= {"token_ids": token_ids, "sealed": sealed, "outcome": outcome, "tenant": tenant}
    return ProductionRollout(**fields)
