"""Groups as `assemble` would emit them, small and valid."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import pytest

from rollwire.kernels.advantages import group_advantages
from rollwire.schemas.records import Cut, Group, Member, Position, Rollout, Segment, Span

LINEAGE = "0197a1b2-0000-7000-8000-0000000000aa"


class MakeGroup(Protocol):
    def __call__(
        self,
        number: int,
        versions: Sequence[int] = (0,),
        *,
        rewards: Sequence[float | None] = (1.0, 0.0),
        lengths: Sequence[int] | None = None,
        lineage: str = LINEAGE,
        model: str = "policy",
    ) -> Group: ...


@pytest.fixture(scope="session")
def make_group() -> MakeGroup:
    return _group


def _group(
    number: int,
    versions: Sequence[int] = (0,),
    *,
    rewards: Sequence[float | None] = (1.0, 0.0),
    lengths: Sequence[int] | None = None,
    lineage: str = LINEAGE,
    model: str = "policy",
) -> Group:
    """`versions`: of member i, cycled. `lengths`: tokens of each member; the first is the prompt, the rest is sampled."""
    opened_ms = 1_767_225_600_000 + number
    group_id = f"{opened_ms >> 16:08x}-{opened_ms & 0xFFFF:04x}-7000-8000-{number:012x}"
    advantages = group_advantages(rewards).advantages
    sizes = [4 + (number + i) % 5 for i in range(len(rewards))] if lengths is None else lengths
    members = []
    for index, (reward, advantage, length) in enumerate(zip(rewards, advantages, sizes, strict=True)):
        rng = np.random.default_rng([number, index])
        sampled = max(length - 1, 0)
        version = versions[index % len(versions)]
        rollout = Rollout(
            rollout_id=f"{group_id}.{index}",
            group_id=group_id,
            index=index,
            group_size=len(rewards),
            model=model,
            lineage=lineage,
            environment="countdown",
            task_id=f"task-{number}",
            task="{}",
            token_ids=rng.integers(0, 20, length).astype("<u1").tobytes(),
            token_dtype="u1",
            segments=(
                Segment(kind="prompt", start=0, end=min(1, length)),
                Segment(kind="sampled", start=min(1, length), end=length),
            ),
            loss_mask=bytes([0] * min(1, length) + [1] * sampled),
            logprobs=(-rng.random(sampled)).astype("<f4").tobytes(),
            spans=(Span(version=version, start=0, end=sampled),),
            finish_reason="stop",
            temperature=1.0,
            top_k_experts=0,
            fleet="fleet",
            replica=f"replica-{number % 2}",
            seed=number,
            started_us=opened_ms * 1_000,
            finished_us=opened_ms * 1_000 + 1,
        )
        trace = Position(topic="routing-traces", partition=0, offset=number * 10 + index)
        members.append(Member(rollout=rollout, reward=reward, advantage=advantage, trace=trace))
    return Group(
        group_id=group_id,
        model=model,
        lineage=lineage,
        environment="countdown",
        task_id=f"task-{number}",
        group_size=len(rewards),
        baseline="mean",
        members=tuple(members),
        cut=Cut(inputs=(), clock_us=opened_ms * 1_000),
    )
